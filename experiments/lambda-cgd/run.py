"""DP-λCGD's CNN on CIFAR-10: which λ trains best, and how it stands beside BISR, BandInvMF and BLT.

python experiments/lambda-cgd/run.py --plan                      # the noise of every method, into plans.json (a CPU)
python experiments/lambda-cgd/run.py --workers 14 --minutes 9    # the most important missing runs (a GPU)
python experiments/lambda-cgd/run.py --report                    # pictures, and the tables of README.md
python experiments/lambda-cgd/run.py --smoke                     # all of it on digits, in seconds
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import plans  # noqa: E402
import report  # noqa: E402
from experiments.harness import Results, work  # noqa: E402
from schedule import Schedule  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="work out what is missing in plans.json")
    parser.add_argument("--workers", type=int, help="do runs in so many processes; 0: in this one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--expected", type=float, default=60.0, help="seconds a run takes, until one was done")
    parser.add_argument("--report", action="store_true", help="draw the pictures and fill in README.md")
    parser.add_argument("--list", action="store_true", help="say what is done and what is missing")
    parser.add_argument("--speed", type=int, metavar="STEPS", help="time so many steps of λ = 0.95 on all workers")
    parser.add_argument("--smoke", action="store_true", help="plan, run and report digits in a temporary folder")
    parser.add_argument("--config", type=Path, default=HERE / "config.toml")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of plans.json, results and pictures")
    asked = parser.parse_args()
    if asked.smoke:
        with tempfile.TemporaryDirectory() as folder:
            smoke(Path(folder))
        return
    if not (asked.plan or asked.workers is not None or asked.report or asked.list):
        parser.error("say what to do: --plan, --workers, --list, --report or --smoke")
    if asked.plan:
        plan(asked.config, asked.out)
    schedule, results = prepared(asked.config, asked.out)
    if asked.speed:
        speed(schedule, asked.out, asked.workers or 1, asked.speed)
    elif asked.workers is not None:
        do(schedule, results, asked.out, asked.workers, asked.minutes, asked.expected)
    if asked.list:
        print(report.progress(schedule, results))
    if asked.report:
        report.write(schedule, results, plans.read(asked.out / "plans.json").best, asked.out)


def prepared(config: Path, out: Path) -> tuple[Schedule, Results]:
    schedule = Schedule(config, plans.read(out / "plans.json").plans)
    if not schedule.plans:
        raise SystemExit(f"nothing is planned in {out / 'plans.json'}; run: run.py --plan")
    return schedule, Results(out / "results")


def plan(config: Path, out: Path) -> None:
    from training import cnn

    from sordino.data import load

    schedule = Schedule(config, {})
    data = load(schedule.config["data"])
    assert data is not None
    model = cnn(data.input_shape, len(data.classes), schedule.config["widths"])
    parameters = sum(p.numel() for p in model.parameters())
    wanted = {**schedule.config, "examples": len(data) - schedule.config["validation"]}
    plans.complete(out / "plans.json", wanted, schedule.settings, parameters, say)


def do(schedule: Schedule, results: Results, out: Path, workers: int, minutes: float, expected: float) -> None:
    from training import train

    missing = [m.noise for s in schedule.settings for m in s.methods if schedule.plan(s, m) is None]
    if missing:
        say(f"not planned, so not run: {', '.join(sorted(set(missing)))}")
    function = functools.partial(train, folder=str(out))
    summary = work(schedule.available, function, results, workers=workers, minutes=minutes, expected=expected, say=say)
    say(str(summary))


def speed(schedule: Schedule, out: Path, workers: int, steps: int) -> None:
    """Two rounds on every worker; the second, when all are warm, counts."""
    from training import speed as function

    setting = schedule.settings[0]
    method = next(m for m in setting.methods[::-1] if m.lam is not None and schedule.plan(setting, m) is not None)
    base = schedule.run(setting, method, setting.start, 0)
    runs = [{**base, "seed": n, "steps": steps, "turn": n // workers} for n in range(2 * workers)]
    with tempfile.TemporaryDirectory() as folder:
        found = Results(folder)
        work(lambda _: runs, functools.partial(function, folder=str(out)), found, workers=workers, say=lambda _: None)
        times = [result["milliseconds_per_step"] for run, result in found if run["turn"] == 1]
    if not times:
        raise SystemExit("no run of the second round ended; run one with --workers 0 to see why")
    mean = sum(times) / len(times)
    total = schedule.plan(setting, method)["steps"]  # type: ignore[index]
    say(
        f"{workers} workers: {mean:.2f} ms a step on each, {workers * 1e3 / mean:.0f} steps a second in all; a run of "
        f"{total} steps {mean * total / 1e3:.0f} s, {60 * workers * 1e3 / mean / total:.1f} runs a minute"
    )


def smoke(out: Path) -> None:
    config = HERE / "smoke.toml"
    plan(config, out)
    schedule, results = prepared(config, out)
    do(schedule, results, out, 0, 1.0, 1.0)
    report.write(schedule, results, plans.read(out / "plans.json").best, out)
    print(report.progress(schedule, results))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
