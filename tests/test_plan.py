"""From a budget to a plan: one code path, the numbers a script relies on, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from sordino import Budget, Plan, SordinoError, Unsupported, plan
from sordino.accounting import account, calibrate, gaussian_sigma
from sordino.budget import Adjacency, Schedule, SordinoWarning
from sordino.sampling import SAMPLERS, make_sampling
from sordino.strategies import Workload, make_strategy

RUN = {"examples": 10_000, "batch_size": 100, "epochs": 4}
KEYS = {
    "noise_multiplier",
    "sensitivity",
    "rmse",
    "max_se",
    "epsilon",
    "delta",
    "steps",
    "separation",
    "noise_vectors_stored",
    "noise_vectors_regenerated",
    "failure_probability",
}


@pytest.mark.parametrize("sampling", ["poisson", "fixed-order", "balls-in-bins"])
@pytest.mark.parametrize("parameters", [None, 100_000])
def test_calibrating_and_reporting_are_one_code_path(sampling: str, parameters: int | None) -> None:
    p = plan(Budget(3, 1e-6), **RUN, sampling=sampling, parameters=parameters)
    assert 3 * (1 - 1e-4) < p.guarantee().epsilon <= 3
    found = account(p.strategy, p.sampling, p.noise_multiplier, delta=1e-6, parameters=parameters)
    assert found.epsilon == p.guarantee().epsilon
    back = account(p.strategy, p.sampling, p.noise_multiplier, epsilon=3.0, parameters=parameters)
    assert back.delta <= 1e-6 * (1 + 1e-6)
    less = account(p.strategy, p.sampling, p.noise_multiplier * 0.999, delta=1e-6, parameters=parameters)
    assert less.epsilon > 3


@pytest.mark.parametrize("noise", ["identity", "lambda-cgd:0.9", "lambda-cgd-normalized:0.9", "lambda-cgd:1"])
def test_fixed_order_is_the_analytic_gaussian_times_the_sensitivity(noise: str) -> None:
    p = plan(Budget(2, 1e-6), **RUN, noise=noise, sampling="fixed-order")
    sensitivity = p.strategy.sensitivity(p.sampling.participation)
    assert p.noise_multiplier == pytest.approx(gaussian_sigma(2, 1e-6) * sensitivity, rel=1e-9)
    d = p.as_dict()
    assert d["sensitivity"] == sensitivity
    assert d["rmse"] == pytest.approx(p.strategy.rmse() * p.noise_multiplier)
    assert d["max_se"] == pytest.approx(p.strategy.max_se() * p.noise_multiplier)


def test_epsilon_of_what_was_released_so_far_only_grows() -> None:
    for sampling in SAMPLERS.names():
        p = plan(Budget(8, 1e-6), examples=1000, batch_size=50, epochs=3, sampling=sampling)
        spent = [p.guarantee(t).epsilon for t in range(p.steps + 1)]
        assert spent[0] == 0.0 and spent[-1] == p.guarantee().epsilon == p.guarantee().planned_epsilon
        assert all(a <= b + 1e-6 for a, b in zip(spent, spent[1:], strict=False))
        assert spent[1] > 0
        assert all(p.epsilon_progress(t) >= spent[t] - 1e-9 for t in range(p.steps + 1))
        with pytest.raises(SordinoError, match="61"):
            p.guarantee(61)


def test_a_prefix_with_correlated_noise_uses_the_leading_block_and_the_ceiling() -> None:
    p = plan(Budget(8, 1e-6), **RUN, noise="lambda-cgd:0.9", sampling="fixed-order")
    for t in (1, 99, 100, 101, 250, 399):
        shorter = make_strategy("lambda-cgd:0.9", t)
        sensitivity = shorter.sensitivity(p.sampling.participation.first(t))
        sigma = gaussian_sigma(p.guarantee(t).epsilon, 1e-6)
        assert sigma == pytest.approx(p.noise_multiplier / sensitivity, rel=1e-6)


def test_the_curve() -> None:
    p = plan(Budget(8, 2e-6), **RUN)
    curve = dict(p.epsilon_curve())
    assert curve[2e-6] == p.guarantee().epsilon
    ordered = [curve[d] for d in sorted(curve, reverse=True)]
    assert all(a < b for a, b in zip(ordered, ordered[1:], strict=False))
    assert p.epsilon_curve([1e-3]) == [(1e-3, curve[1e-3])]


def test_clip_only_is_no_noise_and_no_guarantee() -> None:
    for sampling, noise in (("poisson", "identity"), ("poisson", "lambda-cgd:0.9"), ("balls-in-bins", "identity")):
        p = plan(Budget(math.inf, 1e-6), **RUN, sampling=sampling, noise=noise)
        assert p.noise_multiplier == 0.0
        assert p.guarantee().void == "no noise" and str(p.guarantee(3)).startswith("none: no noise")
        assert p.as_dict()["epsilon"] is None
        json.dumps(p.as_dict(), allow_nan=False)


def test_a_noise_multiplier_may_stand_in_for_the_budget() -> None:
    p = plan(noise_multiplier=1.5, **RUN)
    assert p.noise_multiplier == 1.5 and p.delta == pytest.approx(1e-5)
    assert plan(noise_multiplier=1.5, delta=1e-7, **RUN).guarantee().delta == 1e-7
    assert plan(noise_multiplier=0, **RUN).guarantee().void == "no noise"


def test_the_error_is_that_of_the_workload() -> None:
    """Momentum .5 and a falling learning rate, against the dense product."""
    workload = Workload(momentum=0.5, learning_rates=tuple(1 - t / 400 for t in range(400)))
    p = plan(Budget(8, 1e-6), **RUN, noise="lambda-cgd:0.9", sampling="fixed-order", workload=workload)
    squares = np.square(workload.dense(400) @ np.linalg.inv(p.strategy.dense())).sum(axis=1)
    d = p.as_dict()
    assert d["rmse"] == pytest.approx(math.sqrt(squares.mean()) * p.noise_multiplier)
    assert d["max_se"] == pytest.approx(math.sqrt(squares.max()) * p.noise_multiplier)
    assert d["workload"] == {
        "momentum": 0.5,
        "shrink": 1.0,
        "learning_rates": {"first": 1.0, "largest": 1.0, "last": pytest.approx(1 / 400)},
    }
    plain = plan(Budget(8, 1e-6), **RUN, noise="lambda-cgd:0.9", sampling="fixed-order").as_dict()
    assert plain["noise_multiplier"] == d["noise_multiplier"] and plain["rmse"] != d["rmse"]
    assert plain["workload"]["learning_rates"] is None and plain["objective"] == "rmse"


def test_lambda_without_a_value_is_the_best_for_the_objective() -> None:
    found = {
        objective: plan(Budget(8, 1e-6), **RUN, noise="lambda-cgd", sampling="fixed-order", objective=objective)
        for objective in ("rmse", "max-se")
    }
    rmse, max_se = found["rmse"].as_dict(), found["max-se"].as_dict()
    assert rmse["lambda"] == rmse["lambda_rmse"] == max_se["lambda_rmse"]
    assert max_se["lambda"] == max_se["lambda_max_se"] == rmse["lambda_max_se"] >= rmse["lambda"]
    assert rmse["noise"] == f"lambda-cgd:{rmse['lambda']}" and rmse["rmse"] < max_se["rmse"]
    assert max_se["max_se"] < rmse["max_se"] and max_se["objective"] == "max-se"
    for lam in (0.5, 0.9, 0.99):
        other = plan(Budget(8, 1e-6), **RUN, noise=f"lambda-cgd:{lam}", sampling="fixed-order").as_dict()
        assert other["rmse"] >= rmse["rmse"] and "lambda_rmse" not in other and other["lambda"] == lam


def test_cyclic_poisson_has_as_many_parts_as_the_noise_has_bands() -> None:
    p = plan(Budget(8, 1e-6), **RUN, noise="bsr:16", sampling="cyclic-poisson")
    d = p.as_dict()
    assert d["sampling"] == "cyclic-poisson:16" and d["separation"] == 16 and d["participations"] == 25
    assert d["rate"] == 0.16 and d["accountant"] == "pld"
    more = plan(Budget(8, 1e-6), **RUN, noise="bsr:16", sampling="cyclic-poisson:40").as_dict()
    assert more["sampling"] == "cyclic-poisson:40" and more["noise_multiplier"] > d["noise_multiplier"]
    one = plan(Budget(8, 1e-6), **RUN, sampling="cyclic-poisson")
    assert one.sampling.name == "cyclic-poisson:1"
    assert one.noise_multiplier == plan(Budget(8, 1e-6), **RUN).noise_multiplier
    zero = plan(Budget(8, 1e-6), **RUN, noise="lambda-cgd:0.0", sampling="cyclic-poisson")
    assert zero.noise_multiplier == one.noise_multiplier


def test_a_strategy_may_be_handed_in() -> None:
    strategy = make_strategy("bsr:4", 400)
    for sampling in ("fixed-order", "cyclic-poisson"):
        given = plan(Budget(8, 1e-6), **RUN, noise=strategy, sampling=sampling)
        assert given.strategy is strategy
        named = plan(Budget(8, 1e-6), **RUN, noise="bsr:4", sampling=sampling)
        assert given.as_dict() == named.as_dict()
    with pytest.raises(SordinoError, match="built for 300 steps, the run has 400"):
        plan(Budget(8, 1e-6), **RUN, noise=make_strategy("bsr:4", 300), sampling="fixed-order")


def test_a_matrix_from_a_file_tells_its_bands(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", np.eye(400) + 0.5 * np.eye(400, k=-1))
    noise = f"dense:{tmp_path / 'c.npy'}"
    p = plan(Budget(8, 1e-6), **RUN, noise=noise, sampling="cyclic-poisson")
    assert p.sampling.name == "cyclic-poisson:2" and p.strategy.name == noise
    one = plan(Budget(8, 1e-6), **RUN, sampling="cyclic-poisson:2")
    assert p.noise_multiplier == pytest.approx(math.sqrt(1.25) * one.noise_multiplier, rel=1e-5)
    with pytest.raises(Unsupported, match="correlated noise"):
        plan(Budget(8, 1e-6), **RUN, noise=noise)


@pytest.mark.slow
def test_the_best_lambda_under_balls_in_bins_is_smaller() -> None:
    run = {"examples": 160, "batch_size": 20, "epochs": 3, "noise": "lambda-cgd"}
    amplified = plan(Budget(2, 1e-4), **run, sampling="balls-in-bins").as_dict()  # type: ignore[arg-type]
    plain = plan(Budget(2, 1e-4), **run, sampling="fixed-order").as_dict()  # type: ignore[arg-type]
    assert 0 <= amplified["lambda"] < plain["lambda"]
    assert amplified["samples"] > 0 and amplified["failure_probability"] > 0
    assert amplified["rmse"] < plain["rmse"]


def test_optimised_noise_answers_the_samplers_question() -> None:
    """p = 16 ≤ b: the least error of 16 bands for this run's participation, not for a single one."""
    run = {**RUN, "sampling": "fixed-order"}
    band = plan(Budget(8, 1e-6), **run, noise="band-inv-mf:4").as_dict()  # type: ignore[arg-type]
    single = make_strategy("band-inv-mf:4", 400)
    other = plan(Budget(8, 1e-6), **run, noise=single).as_dict()  # type: ignore[arg-type]
    assert band["rmse"] < other["rmse"] and band["certificate"]


def test_plans_are_immutable_and_pure() -> None:
    p = plan(Budget(8, 1e-6), **RUN)
    assert KEYS <= p.as_dict().keys()
    assert isinstance(p, Plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.noise_multiplier = 0.0  # type: ignore[misc]
    assert plan(Budget(8, 1e-6), **RUN).noise_multiplier == p.noise_multiplier


def test_the_guarantee_carries_what_the_run_says() -> None:
    p = plan(Budget(8, 1e-6), **RUN, sampling="fixed-order")
    g = p.guarantee(7, clip_norm=0.5, examples_stated=False, seeded=True, remarks=("x",))
    assert g.clip_norm == 0.5 and g.seeded and not g.examples_stated and g.remarks == ("x",)
    assert g.steps_released == 7 and g.steps_planned == 400 and g.adjacency is Adjacency.ZERO_OUT


def test_delta_of_one_in_n_or_more_is_a_warning() -> None:
    with pytest.warns(SordinoWarning, match="delta=0.0001 is not below 1/N"):
        plan(Budget(8, 1e-4), **RUN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(Budget(8, 9e-5), **RUN)


def test_batch_size_is_not_rounded() -> None:
    p = plan(Budget(8, 1e-6), examples=1000, batch_size=300, epochs=2)
    assert p.schedule == Schedule(1000, 300, 2) and p.steps == 8 and p.as_dict()["batch_size"] == 300


BUDGET = Budget(8, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": None}, "neither was given"),
        ({"noise_multiplier": 1.0}, "both were given"),
        ({"budget": (8, 1e-5)}, "must be a Budget"),
        ({"budget": 8}, "must be a Budget"),
        ({"delta": 1e-5}, "given twice"),
        ({"examples": 0}, "examples=0"),
        ({"examples": 1e4}, "examples=10000.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 10_001}, "batch_size=10001 is larger"),
        ({"epochs": -1}, "epochs=-1"),
        ({"epochs": 2.5}, "epochs=2.5"),
        ({"epochs": "3"}, "epochs='3'"),
        ({"noise": "lambda-cgd:1.5", "sampling": "fixed-order"}, "from 0 to 1"),
        ({"noise": "identiy"}, "did you mean 'identity'"),
        ({"noise": None}, "must be a name"),
        ({"sampling": "poissson"}, "did you mean 'poisson'"),
        ({"sampling": 1}, "must be a name"),
        ({"parameters": -1}, "parameters=-1"),
        ({"parameters": 1.5}, "parameters=1.5"),
        ({"parameters": True}, "parameters=True"),
        ({"accountant": "pdl"}, "did you mean 'pld'"),
        ({"budget": None, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"budget": None, "noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"budget": None, "noise_multiplier": math.inf}, "noise_multiplier=inf"),
        ({"budget": None, "noise_multiplier": "1"}, "noise_multiplier='1'"),
        ({"budget": None, "noise_multiplier": True}, "noise_multiplier=True"),
        ({"budget": None, "noise_multiplier": 1.0, "delta": 0.0}, "delta=0.0"),
        ({"budget": None, "noise_multiplier": 1.0, "delta": math.nan}, "delta=nan"),
        ({"budget": None, "noise_multiplier": 1.0, "noise": "lambda-cgd:0.5"}, "correlated noise"),
        ({"accountant": "gaussian"}, "fixed-order"),
        ({"accountant": "convolution"}, "balls-in-bins"),
        ({"separation": 100}, r"separation=100, but sampling='poisson' keeps 1 steps"),
        ({"workload": 0.9}, "workload=0.9 must be a Workload"),
        ({"workload": Workload(learning_rates=(1.0, 0.5))}, "2 entries for 400 steps"),
        ({"objective": "mean"}, "objective='mean' is not known"),
        ({"noise": "bsr:401", "sampling": "fixed-order"}, "401"),
        ({"noise": "bsr:0", "sampling": "fixed-order"}, "bsr:0"),
        ({"noise": "bsr:101", "sampling": "cyclic-poisson"}, "bsr:101.*bB > N"),
        ({"noise": "bsr:16", "sampling": "cyclic-poisson:8"}, "16 bands are more than the 8 parts"),
    ],
)
def test_bad_input_is_one_line_with_the_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        plan(**{"budget": BUDGET, **RUN, **changes})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bad_questions_to_the_accountant() -> None:
    schedule = Schedule(100, 10, 1)
    strategy, sampling = make_strategy("identity", 10), make_sampling("poisson", schedule)
    for options in (
        {},
        {"delta": 1e-5, "epsilon": 1.0},
        {"delta": 2.0},
        {"delta": math.nan},
        {"epsilon": -1.0},
        {"delta": 1e-5, "steps": 11},
        {"delta": 1e-5, "steps": -1},
        {"delta": 1e-5, "steps": 1.5},
    ):
        with pytest.raises(SordinoError):
            account(strategy, sampling, 1.0, **options)  # type: ignore[arg-type]
    with pytest.raises(SordinoError, match="built for 9 steps"):
        account(make_strategy("identity", 9), sampling, 1.0, delta=1e-5)
    with pytest.raises(Unsupported):
        calibrate(make_strategy("lambda-cgd:0.5", 10), sampling, BUDGET)


def test_importing_costs_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys, sordino.plan, sordino.accounting, sordino.sampling, sordino.strategies\n"
        "print([m for m in ('scipy', 'dp_accounting', 'torch', 'pydantic', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
