"""DP-λCGD's experiment: its page is what its script writes, its plans keep their budgets, all of it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from experiments.harness import Results, work

FOLDER = Path(__file__).parents[2] / "experiments" / "lambda-cgd"
CONFIG = FOLDER / "config.toml"
sys.path.insert(0, str(FOLDER))

import plans  # noqa: E402
import report  # noqa: E402
from schedule import Schedule  # noqa: E402


def made_up(path: Path = CONFIG) -> Schedule:
    """With every method planned."""
    empty = Schedule(path, {})
    numbers = {"noise_multiplier": 1.0, "rmse": 2.0}
    return Schedule(path, {(m.noise, m.sampling, s.epsilon): numbers for s in empty.settings for m in s.methods})


def accuracy(run: Any) -> dict[str, float]:
    """Best at a rate of 0.4, and a little better with correlated noise."""
    found = 0.5 - 0.1 * abs(run["learning_rate"] - 0.4) + 0.05 * (run["noise"] != "identity") + 0.001 * run["seed"]
    return {"validation": found, "test": found, "milliseconds_per_step": 1.0}


def test_the_page_is_what_the_script_writes() -> None:
    planned = plans.read(FOLDER / "plans.json")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    written = report.parts(Schedule(CONFIG, planned.plans), Results(FOLDER / "results"), planned.best)
    assert report.filled(page, written) == page


def test_every_plan_keeps_its_budget_and_is_rebuilt_as_it_was() -> None:
    from sordino.plan import plan

    for key, found in plans.read(FOLDER / "plans.json").plans.items():
        assert found["accounted_epsilon"] <= key[2] and found["steps"] == 3520, key
        if found["sampling"] != "fixed-order":
            continue
        run = {name: found[name] for name in ("examples", "batch_size", "epochs", "sampling", "parameters", "delta")}
        made = plan(noise=plans.strategy(found), noise_multiplier=found["noise_multiplier"], **run)
        plans.same(found, made)
        assert made.account().epsilon == pytest.approx(found["accounted_epsilon"], rel=1e-9)


def test_tuning_comes_first_then_seeds_setting_by_setting(tmp_path: Path) -> None:
    schedule, done = made_up(), []

    def noted(run: Any) -> dict[str, float]:
        done.append((run["epsilon"], run["sampling"] == "fixed-order", run["seed"], run["noise"], run["sampling"]))
        return accuracy(run)

    assert not work(schedule.available, noted, Results(tmp_path), say=lambda text: None).failed
    stages = [((8.0, False), 0), ((8.0, False), 1), ((8.0, True), 0), ((8.0, True), 1), ((1.0, False), 0)]
    first = [next(i for i, d in enumerate(done) if (d[:2], d[2]) == stage) for stage in stages]
    assert first == sorted(first)
    assert [d[2] for d in done].index(4) == max(i for i, d in enumerate(done) if d[2] < 4) + 1  # extra seeds come last
    results = Results(tmp_path)
    for setting in schedule.settings:
        for method in setting.methods:
            assert schedule.tuning(setting, method, results) == ([], 0.4)
            assert len(schedule.trials(setting, method, results)) <= 8
            assert len(schedule.finals(setting, method, results)) == 5
    text = report.claims(schedule, results, {s.name: {"rmse": 0.9} for s in schedule.settings})
    assert "λCGD beats DP-SGD, Poisson held (λ = 0.5: +5.0 ± 0.1 points)" in text
    assert "complete" in report.progress(schedule, results)


def test_a_run_that_is_not_the_planned_one_is_refused() -> None:
    from sordino.budget import Budget
    from sordino.errors import SordinoError
    from sordino.plan import plan

    run: dict[str, Any] = {"examples": 1000, "batch_size": 100, "epochs": 2, "sampling": "fixed-order"}
    found = plans._entry("lambda-cgd:0.5", 8.0, plan(Budget(8, 1e-5), noise="lambda-cgd:0.5", **run))
    sigma = {"noise_multiplier": found["noise_multiplier"], "delta": 1e-5}
    plans.same(found, plan(noise="lambda-cgd:0.5", **run, **sigma))
    for noise, changed in (
        ("lambda-cgd:0.6", {}),
        ("lambda-cgd:0.5", {"epochs": 3}),
        ("lambda-cgd:0.5", {"delta": 1e-6}),
    ):
        with pytest.raises(SordinoError, match="not what was planned"):
            plans.same(found, plan(noise=noise, **{**run, **sigma, **changed}))


def test_the_least_rmse_without_amplification_is_where_it_is() -> None:
    schedule = Schedule(CONFIG, {})
    setting = next(s for s in schedule.settings if s.sampling == "fixed-order")
    config = {**schedule.config, "examples": 390 * 128}
    best = plans.best_lambda(plans.Planned(), setting, config)
    assert best["rmse"] == pytest.approx(0.977, abs=1e-3)  # Table 3's BandInvMF(2)
    assert best["max_se"] > best["rmse"]  # Lemma 3


@pytest.mark.slow
def test_all_of_it_runs_on_digits() -> None:
    command = [sys.executable, FOLDER / "run.py", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "10 runs done" in done.stdout and "complete" in done.stdout
