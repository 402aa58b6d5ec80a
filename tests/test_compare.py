"""Every noise side by side: what is listed, what it costs, and what is recommended."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sordino import Budget, SordinoError
from sordino.accounting import supported
from sordino.budget import Schedule
from sordino.compare import Compared, all_samplings, candidates, compare, decide, recommend
from sordino.cost import CPU, GPU, StepCost
from sordino.strategies import STRATEGIES

RUN = {"examples": 3000, "batch_size": 100, "epochs": 2}
BUDGET = Budget(8, 1e-6)


def test_candidates_are_capped_and_name_every_family() -> None:
    names = candidates(Schedule(**RUN))  # E = 30, T = 60
    assert {name.partition(":")[0] for name in names} >= {"identity", "lambda-cgd", "bisr", "bsr", "band-mf"}
    assert {n for n in names if n.startswith("bsr")} == {"bsr:4", "bsr:16", "bsr:30"}
    assert {n for n in names if n.startswith("lambda-cgd:")} == {"lambda-cgd:0.8", "lambda-cgd:0.9", "lambda-cgd:0.95"}
    assert "lambda-cgd" in names and len(set(names)) == len(names)
    assert not [n for n in candidates(Schedule(100, 100, 5)) if n.startswith("bsr")]  # one batch an epoch: no room
    full = candidates(Schedule(50_000, 128, 10))
    assert {n for n in full if n.startswith("bsr")} == {"bsr:4", "bsr:16", "bsr:64"}
    assert not [n for n in full if n.startswith("noise-curve")]
    curved = candidates(Schedule(50_000, 128, 10), spectrum=True)
    assert [n for n in curved if n not in full] == [f"noise-curve:{p}" for p in (4, 16, 64)]
    for entry in STRATEGIES:
        assert any(n.partition(":")[0] == entry.name for n in curved) or not entry.argument.replace(".", "").isdigit()


def test_every_sampling_and_noise_is_there_or_has_its_reason() -> None:
    seen: list[tuple[int, int, str]] = []
    noises = ["identity", "lambda-cgd:0.9", "lambda-cgd", "bsr:4", "bisr:4"]
    samplings = ["poisson", "cyclic-poisson", "fixed-order", "balls-in-bins:fresh"]
    rows = compare(BUDGET, **RUN, noises=noises, samplings=samplings, progress=lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == list(range(21)) and {total for _, total, _ in seen} == {20}
    assert {(r.noise, r.sampling) for r in rows} | {("identity", "cyclic-poisson")} == {
        (noise, sampling) for noise in noises for sampling in samplings
    }
    for row in rows:
        assert (row.plan is None) == (row.reason is not None)
        if row.plan is not None:
            assert supported(row.plan.strategy, row.plan.sampling)
            d = json.loads(json.dumps(row.as_dict(), allow_nan=False))
            assert d["reason"] is None and d["delta"] == 1e-6 and d["steps"] == 60
            assert d["noise_vectors_stored"] == (3 if row.noise == "bsr:4" else 0)
            assert {"extra_ms_cpu_per_10M", "noise_bytes_stored_per_10M"} <= d.keys()
        else:
            assert row.noise in str(row.reason) and row.sampling in str(row.reason) and "\n" not in str(row.reason)
            assert row.as_dict() == {"noise": row.noise, "sampling": row.sampling, "reason": row.reason}
    errors = [row.plan.rmse for row in rows if row.plan is not None]
    assert errors == sorted(errors) and all(row.plan is None for row in rows[len(errors) :])
    by_max = compare(BUDGET, **RUN, noises=noises, samplings=["fixed-order"], objective="max-se")
    worst = [row.plan.max_se for row in by_max if row.plan is not None]
    assert worst == sorted(worst) and len(worst) == 5


def test_without_a_choice_every_sampler_is_there() -> None:
    assert all_samplings() == ["poisson", "cyclic-poisson", "fixed-order", "balls-in-bins", "balls-in-bins:fresh"]


def row(noise: str, rmse: float, stored: int = 0, regenerated: int = 0, identity: bool = False) -> Compared:
    strategy = SimpleNamespace(name=noise, vectors_stored=stored, vectors_regenerated=regenerated, is_identity=identity)
    planned: Any = SimpleNamespace(strategy=strategy, sampling=SimpleNamespace(name="s"), rmse=rmse, max_se=2 * rmse)
    return Compared(noise, "s", planned, None)


def test_the_recommendation_weighs_error_against_the_burden_of_a_step_and_says_so() -> None:
    plain = row("identity", 40.0, identity=True)
    heavy, buffers = row("band-mf:64", 10.0, stored=63), row("blt:4", 10.3, stored=4)
    slow, light = row("band-inv-mf:64", 10.2, regenerated=63), row("band-inv-mf:4", 10.4, regenerated=3)
    missing = Compared("x", "s", None, "no")
    found = recommend([heavy, buffers, slow, light, plain, missing])
    assert found is not None and found.noise == "band-inv-mf:4" and found.sampling == "s"
    assert "4.0% above the least (band-mf:64 with s, 10)" in found.reason
    assert "each step draws 3 vectors again where that keeps 63 vectors" in found.reason
    assert found.reason.endswith("independent noise at its best (s) has 40")
    few = recommend([heavy, buffers, slow, plain])
    assert few is not None and few.noise == "blt:4"  # 63 rows drawn again are more of a burden than 4 vectors
    only = recommend([heavy, row("lambda-cgd:0.9", 12.0, regenerated=1), plain])
    assert only is not None and only.noise == "band-mf:64" and "the least of all; each step keeps 63" in only.reason
    assert "lambda-cgd:0.9 with s, the best that keeps none, has 20% more error" in only.reason
    alone = recommend([plain, missing], "max-se")
    assert alone is not None and alone.noise == "identity" and alone.reason == "largest error 80, the least of all"
    assert recommend([missing]) is None


def test_cost_grows_with_what_is_read_and_kept() -> None:
    none, one, many, kept = StepCost(0, 0), StepCost(1, 0), StepCost(15, 0), StepCost(0, 15)
    for device in (CPU, GPU):
        assert none.extra(device) == 0.0 < one.extra(device) < kept.extra(device) < many.extra(device)
    assert none.burden == 0.0 < one.burden < StepCost(0, 4).burden < many.burden < kept.burden < StepCost(63, 0).burden
    assert kept.as_dict(10_000_000)["noise_bytes_stored"] == 600_000_000
    assert many.as_dict(None)["extra_ms_cpu_per_10M"] == pytest.approx(15 * CPU.replay * 10)
    assert many.as_dict(1000)["noise_bytes_stored"] == 0


def test_what_is_recommended_is_never_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guess is far too low: what it would recommend is accounted for before anything is said."""
    import importlib

    module = importlib.import_module("sordino.plan")
    monkeypatch.setattr(module, "estimated_noise", lambda strategy, sampling, budget, parameters=None: 1.0)
    run = {"examples": 64, "batch_size": 16, "epochs": 2, "noises": ["identity", "lambda-cgd:0.5"]}
    rows = compare(Budget(2, 1e-3), **run, samplings=["balls-in-bins"])  # type: ignore[arg-type]
    guessed = [row for row in rows if row.plan is not None and row.plan.estimated]
    assert {row.noise for row in guessed} == {"lambda-cgd:0.5"}
    for row in guessed:
        assert row.plan is not None and row.as_dict()["estimated"] and row.as_dict()["epsilon"] == 2
        with pytest.raises(SordinoError, match="is an estimate"):
            row.plan.guarantee()
    settled, chosen = decide(Budget(2, 1e-3), rows)
    assert chosen is not None
    at = next(row for row in settled if row.is_called(chosen.noise, chosen.sampling))
    assert at.plan is not None and not at.plan.estimated and at.plan.account().epsilon <= 2
    errors = [row.plan.rmse for row in settled if row.plan is not None]
    assert errors == sorted(errors)
