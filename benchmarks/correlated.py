"""Correlated noise: what it costs to make, wherever its past lives, and what that is of a training step.

    python benchmarks/correlated.py                      # both parts, on the GPU if there is one
    python benchmarks/correlated.py --quick              # a smaller list
    python benchmarks/correlated.py --part noise --count 1000000 --count 10000000
    python benchmarks/correlated.py --part steps --case bert --noise bisr:16
    python benchmarks/correlated.py --sweep              # ways to compile the kernel that draws many rows

The questions of Tables 1, 2 and 5 of DP-λCGD, in one run: (`noise`) milliseconds to generate and correlate the noise of
one step for so many entries, and the bytes kept for it; (`steps`) a whole private step against the one with independent
noise, the two taking turns. The result is written to benchmarks/results/correlated-DEVICE.json (`--out`) after every
row, so that a run cut short keeps what it measured. Times are of several steps in a row, until the device is idle
again: copies to the host are in them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import step as steps_of  # noqa: E402

import sordino  # noqa: E402
from sordino.budget import Participation  # noqa: E402
from sordino.noise import CorrelatedNoise, Keys  # noqa: E402
from sordino.strategies import Problem, Strategy, make_strategy  # noqa: E402

T, EPOCHS = 200, 20  # long enough for every ring to be full, short enough for strategies to be found at once
# (noise, where its past lives); "band" strategies with C⁻¹ banded can do either, those with C banded only keep
NOISES = [
    ("identity", "regenerate"),
    ("lambda-cgd:0.9", "regenerate"), ("bisr:4", "regenerate"), ("bisr:16", "regenerate"),
    ("lambda-cgd:0.9", "device"), ("bisr:4", "device"), ("bisr:16", "device"),
    ("bsr:2", "device"), ("bsr:4", "device"), ("bsr:16", "device"), ("blt:4", "device"),
    ("lambda-cgd:0.9", "host"), ("bisr:4", "host"), ("bisr:16", "host"),
    ("bsr:4", "host"), ("bsr:16", "host"), ("blt:4", "host"),
]  # fmt: skip
STEPS = [
    ("lambda-cgd:0.9", "regenerate"), ("bisr:4", "regenerate"), ("bisr:16", "regenerate"), ("bisr:16", "device"),
    ("band-mf:16", "device"), ("blt:4", "device"),
    ("lambda-cgd:0.9", "host"), ("bisr:4", "host"), ("bisr:16", "host"),
]  # fmt: skip
MORE = [  # for the small models
    ("band-inv-mf:2", "regenerate"), ("band-inv-mf:4", "regenerate"), ("band-inv-mf:16", "regenerate"),
    ("bsr:4", "device"), ("bsr:16", "device"), ("band-mf:4", "device"),
]  # fmt: skip
PATIENCE = 2.0  # seconds for one row, once it was timed three times
LARGE = {"bert", "vit"}
QUICK = {"lambda-cgd:0.9", "bisr:16", "bsr:16", "blt:4", "identity"}


class Result:
    """The JSON file, rewritten after every row; parts that are not measured now stay as they were on this machine."""

    def __init__(self, path: Path, device: str, anew: tuple[str, ...] = ("noise", "steps", "sweep")) -> None:
        self.path = path
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        self.content: dict[str, Any] = {"device": name, "torch": torch.__version__, "sordino": sordino.__version__}
        if device == "cuda":
            import triton

            self.content["triton"] = triton.__version__
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if all(before.get(key) == value for key, value in self.content.items()):
                self.content |= {part: before[part] for part in ("noise", "steps", "sweep") if part in before}
        for part in anew:
            self.content.pop(part, None)
        self.began = time.monotonic()

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.content.setdefault(part, []).append(row)
        self.content["seconds"] = round(time.monotonic() - self.began, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
        )
        print(f"{self.content['seconds']:7.1f} s  {part}: {shown}", file=sys.stderr, flush=True)


def idle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, in_a_row: int) -> float:
    """Of one of several in a row, until the device is idle again."""
    idle(device)
    start = time.perf_counter()
    for _ in range(in_a_row):
        work()
    idle(device)
    return (time.perf_counter() - start) / in_a_row


def several(work: Callable[[], object], device: str, in_a_row: int, repeats: int) -> list[float]:
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) * in_a_row < PATIENCE):
        times.append(seconds(work, device, in_a_row))
    return times


def spread(times: list[float], key: str = "ms", factor: float = 1e3) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {key: factor * middle, f"{key}_quartiles": [factor * low, factor * high], "repeats": len(times)}


def found(noise: str) -> Strategy:
    return make_strategy(noise, Problem(T, Participation(steps=T, epochs=EPOCHS, separation=T // EPOCHS, fixed=True)))


# -- one step's noise ----------------------------------------------------------------------------------------


def noise_rows(device: str, counts: list[int], noises: list[tuple[str, str]], repeats: int, result: Result) -> None:
    for count in counts:
        out = torch.zeros(count, device=device)
        in_a_row = 5 if device == "cuda" else 1

        def baseline(name: str, work: Callable[[], object], out: Tensor = out, k: int = in_a_row) -> float:
            work()
            times = several(work, device, k, repeats)
            row = {"noise": name, "storage": "", "count": out.numel(), "kept_bytes": 0}
            result.add("noise", row | spread(times))
            return statistics.median(times)

        plain = baseline("torch.randn", lambda out=out: torch.randn(out.numel(), device=device))  # type: ignore[misc]
        for noise, storage in noises:
            if device == "cpu" and storage == "host":
                continue  # the same place
            row: dict[str, Any] = {"noise": noise, "storage": storage, "count": count}
            try:
                row |= one_noise(found(noise), storage, out, repeats, in_a_row, device)
                row["times_randn"] = row["ms"] / (1e3 * plain)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            result.add("noise", row)
            clear(device)


def one_noise(
    strategy: Strategy, storage: str, out: Tensor, repeats: int, in_a_row: int, device: str
) -> dict[str, Any]:
    noise = CorrelatedNoise(Keys.from_seed(0), strategy, storage=storage)
    begin = max(strategy.vectors_stored, strategy.vectors_regenerated) + 1  # the first step that reads all there is
    step = iter(range(begin, T))
    noise.catch_up(begin, {"w": out})

    def one() -> None:
        noise.add_({"w": out}, next(step), 1.0)

    one()
    times = several(one, device, in_a_row, repeats)
    assert noise.storage is not None
    about = {"kept_vectors": noise.storage.vectors, "kept_bytes": noise.storage.bytes, "redrawn": noise.storage.redrawn}
    noise.wipe()
    return about | spread(times)


def sweep(count: int, repeats: int, result: Result) -> None:
    """The kernel for many rows, compiled in several ways; 16 rows."""
    from sordino.noise.triton_kernel import add_normals_ as pairs
    from sordino.noise.triton_moves import add_terms_

    out, terms = torch.zeros(count, device="cuda"), [(bytes(32), 100 - k, 0.9**k) for k in range(16)]
    ways: dict[str, Callable[[], object]] = {"two rows a launch": lambda: pairs([("w", out, 0)], terms)}
    for unroll in (False, True):
        for warps in (4, 2):
            for registers in (None, 96, 80, 64):
                options = {"UNROLL": unroll, "num_warps": warps} | ({"maxnreg": registers} if registers else {})
                label = ", ".join(f"{key} {value}" for key, value in options.items())
                ways[label] = lambda options=options: add_terms_([("w", out, 0)], terms, **options)  # type: ignore[misc]
    for label, work in ways.items():
        row: dict[str, Any] = {"way": label, "count": count, "rows": 16}
        try:
            row["compile_s"] = seconds(work, "cuda", 1)
            row |= spread([seconds(work, "cuda", 2) for _ in range(repeats)])
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        result.add("sweep", row)


# -- a whole step --------------------------------------------------------------------------------------------


class Case:
    """A model, a logical batch, and how much of it is done at once."""

    def __init__(
        self, name: str, model: Callable[[], nn.Module], data: Callable[[], tuple[Tensor, ...]], losses: Any,
        at_once: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.model, self.data, self.losses, self.at_once = name, model, data, losses, at_once


def cases(device: str) -> dict[str, Case]:
    images, tokens, classify = steps_of.images, steps_of.tokens, steps_of.classify
    if device == "cpu":
        known = [
            Case("cnn", steps_of.built("small-cnn"), images(256), classify),
            Case("mlp", steps_of.mlp, lambda: (torch.randn(512, 784), torch.randint(10, (512,))), classify),
            Case("transformer", steps_of.Transformer, tokens(32, 128, 8000), classify),
        ]
    else:  # the batch sizes of Tables 1 and 2, but for ViT's: there it is 512
        known = [
            Case("cnn", steps_of.built("small-cnn"), images(512), classify),
            Case("wrn", steps_of.built("wrn-16-4"), images(512), classify),
            Case("bert", steps_of.bert, tokens(128, 128, 30000), steps_of.classify_text, 64),
            Case("vit", steps_of.vit, images(128, 224), classify, 64),
        ]
    return {case.name: case for case in known}


class Contestant:
    """A private run that takes the same batch again and again."""

    def __init__(self, case: Case, model: nn.Module, data: tuple[Tensor, ...], noise: str, storage: str) -> None:
        self.case, self.model, self.data, n = case, copy.deepcopy(model), data, len(data[0])
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.private = sordino.make_private(
            self.model, self.optimizer, TensorDataset(*data), noise_multiplier=1.0, delta=1e-6, batch_size=n,
            examples=T // EPOCHS * n, epochs=EPOCHS, noise=noise, noise_storage=storage, sampling="fixed-order",
            physical_batch_size=case.at_once, check=False, seed=0,
        )  # fmt: skip

    def skip(self) -> None:
        """To a step that reads all there is of the past."""
        strategy = self.private.plan.strategy
        self.private._step = max(strategy.vectors_stored, strategy.vectors_regenerated) + 1
        self.private.noise.catch_up(self.private.step, self.private.parameters)

    def __call__(self) -> None:
        n = len(self.data[0])
        batch = self.private._batch(self.private.step, np.arange(n))
        batch._fetch = lambda positions, place: (
            self.data if len(positions) == n else tuple(t[positions[0] : positions[-1] + 1] for t in self.data)
        )
        self.private.backward(lambda *inputs: self.case.losses(self.model, inputs), batch)
        self.optimizer.step()

    def about(self) -> dict[str, Any]:
        storage = self.private.noise.storage
        assert storage is not None
        return {"kept_vectors": storage.vectors, "kept_bytes": storage.bytes, "redrawn": storage.redrawn}

    def close(self) -> None:
        self.private.close()


def step_rows(
    device: str,
    names: list[str],
    noises: list[tuple[str, str]],
    rounds: int,
    result: Result,
    more: list[tuple[str, str]],
) -> None:
    known = cases(device)
    for name in names or known:
        rows = noises if name in LARGE else [*noises, *more]
        case = known[name]
        torch.manual_seed(0)
        model = case.model().to(device).train()
        data = tuple(t.to(device) for t in case.data())
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        base = Contestant(case, model, data, "identity", "regenerate")
        warm(base, 3, device)
        level = peak(base, device)
        times = [seconds(base, device, 1) for _ in range(rounds)]
        about = {"case": name, "parameters": count, "batch": len(data[0]), "at_once": case.at_once or len(data[0])}
        row = {"noise": "identity", "storage": "", "kept_bytes": 0, "added_bytes": 0}
        result.add("steps", about | row | spread(times))
        for noise, storage in rows:
            if device == "cpu" and storage == "host":
                continue
            if base.private.steps - base.private.step < rounds + 2:
                base.close()
                base = Contestant(case, model, data, "identity", "regenerate")
                warm(base, 3, device)
            row = {"noise": noise, "storage": storage}
            try:
                row |= against(base, Contestant(case, model, data, noise, storage), rounds, device, level)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            result.add("steps", about | row)
            clear(device)
        base.close()
        del base, model, data
        clear(device)


def warm(contestant: Contestant, steps: int, device: str) -> None:
    for _ in range(steps):
        contestant()
    idle(device)


def against(base: Contestant, other: Contestant, rounds: int, device: str, level: int) -> dict[str, Any]:
    """Rounds in which the two take turns."""
    other.skip()
    warm(other, 2, device)
    memory = peak(other, device)
    pairs = [(seconds(base, device, 1), seconds(other, device, 1)) for _ in range(rounds)]
    row = other.about() | {"added_bytes": max(0, memory - level)}
    other.close()
    return row | spread([b for _, b in pairs]) | spread([b / a for a, b in pairs], "ratio", 1.0)


def peak(contestant: Contestant, device: str) -> int:
    """Bytes that a step adds at its peak to what lies there before it: 0 on a CPU, where torch does not count them."""
    if device != "cuda":
        return 0
    for p in contestant.model.parameters():
        p.grad = None
    idle(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contestant()
    idle(device)
    return torch.cuda.max_memory_allocated() - before


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# -- the program ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", choices=["noise", "steps"], action="append", help="only this part")
    parser.add_argument("--count", type=int, action="append", help="entries, for the first part")
    parser.add_argument("--case", action="append", help="only these models")
    parser.add_argument("--noise", action="append", help="only these strategies")
    parser.add_argument("--rounds", type=int, help="how often each row is timed")
    parser.add_argument("--quick", action="store_true", help="fewer strategies, counts and rounds")
    parser.add_argument("--sweep", action="store_true", help="only the ways to compile the kernel for many rows")
    parser.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/results/correlated-DEVICE.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = options.device
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        kind = torch.cuda.get_device_name().split()[-1].lower()
    else:
        kind = "cpu"
    parts = ["sweep"] if options.sweep else options.part or ["noise", "steps"]
    result = Result(options.out or HERE / "results" / f"correlated-{kind}.json", device, tuple(parts))
    wanted = set(options.noise or []) or (QUICK if options.quick else None)
    rounds = options.rounds or (3 if options.quick else 5)

    def chosen(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [row for row in rows if wanted is None or row[0] in wanted]

    if "sweep" in parts:
        sweep(10**8, rounds, result)
    if "noise" in parts:
        usual = [10**6, 10**7, 10**8] if device == "cuda" else [10**6, 10**7]
        counts = options.count or (usual[1:2] if options.quick else usual)
        noise_rows(device, counts, chosen(NOISES), rounds if device == "cuda" else 2 * rounds + 1, result)
    if "steps" in parts:
        names = options.case or (list(cases(device))[:1] if options.quick else [])
        step_rows(device, names, chosen(STEPS), rounds, result, chosen(MORE))
    print(options.out or result.path)


if __name__ == "__main__":
    main()
