"""The typed statements: what is refused, and how a guarantee reads."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from sordino import Adjacency, Budget, Guarantee, Participation, Schedule, SordinoError
from sordino.budget import round_up, significant_up


def guarantee(**changes: object) -> Guarantee:
    fields: dict[str, object] = {
        "epsilon": 7.9912,
        "delta": 1e-5,
        "adjacency": Adjacency.ADD_REMOVE,
        "sampling": "Poisson sampling at rate 0.01",
        "noise": "identity",
        "accountant": "PLD",
        "noise_multiplier": 0.64,
        "steps_released": 2000,
        "steps_planned": 2000,
        "planned_epsilon": 7.9912,
        "examples": 100_000,
        "batch_size": 1000,
        "epochs": 20,
        "tails_included": True,
    }
    return Guarantee(**{**fields, **changes})  # type: ignore[arg-type]


def test_it_prints_as_a_sentence_with_epsilon_rounded_up() -> None:
    text = str(guarantee())
    assert text.startswith("(8.00, 1e-05)-DP, add/remove one example, Poisson sampling at rate 0.01")
    assert text.endswith(".") and "\n" not in text
    assert str(guarantee(adjacency=Adjacency.ZERO_OUT)).startswith("(8.00, 1e-05)-DP, zero out one example")


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [
        (0.0, "0.00"),
        (0.001, "0.01"),
        (7.99, "7.99"),
        (7.9900001, "8.00"),
        (8.0, "8.00"),
        (0.29, "0.29"),
        (1e-12, "0.01"),
    ],
)
def test_epsilon_is_never_printed_smaller_than_it_is(epsilon: float, printed: str) -> None:
    assert round_up(epsilon) == printed


@pytest.mark.parametrize("delta", [1e-5, 1.0000001e-5, 9.999e-7, 0.5, 1 / 3, 1e-300])
def test_delta_is_never_printed_smaller_than_it_is(delta: float) -> None:
    assert delta <= float(significant_up(delta)) <= delta * 1.01


def test_part_of_a_run_names_the_planned_total() -> None:
    text = str(guarantee(epsilon=1.234, steps_released=10))
    assert text.startswith("(1.24, 1e-05)-DP") and "10 of 2000 steps (ε 8.00 when all are done)" in text


def test_no_guarantee_says_none_and_why() -> None:
    assert str(guarantee(noise_multiplier=0.0, epsilon=math.inf)).startswith("none: no noise, ")
    assert str(guarantee(noise_multiplier=0.0, epsilon=0.0, steps_released=0)).startswith("none: no noise, ")
    assert str(guarantee(epsilon=math.inf)).startswith("none: too little noise for this δ")
    seeded = guarantee(seeded=True)
    assert seeded.void == "seeded" and str(seeded).startswith("none: seeded")
    assert guarantee().void is None


def test_what_is_assumed_and_what_is_not_covered_is_stated() -> None:
    g = guarantee(examples_stated=False, remarks=("step 7 was redone",), clip_norm=1.5)
    text = str(g)
    assert "100000, is treated as public" in text and "step 7 was redone" in text and "clip norm 1.5" in text
    assert "treated as public" not in str(guarantee())
    small_print = " ".join(g.not_covered)
    for word in ("tuning", "early stopping", "best checkpoint", "training loss", "rounding", "Mironov", "Casacuberta"):
        assert word in small_print
    assert "failure probability" in str(guarantee(failure_probability=1e-9))


def test_it_is_immutable_and_survives_json() -> None:
    g = guarantee(epsilon=math.inf, remarks=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        g.epsilon = 1.0  # type: ignore[misc]
    back = json.loads(json.dumps(g.as_dict(), allow_nan=False))
    assert back["epsilon"] is None and back["adjacency"] == "add/remove one example" and back["divisor"] == 1000
    assert back["statement"] == str(g)


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (math.nan, 1e-5),
        (0, 1e-5),
        (-1, 1e-5),
        (True, 1e-5),
        ("8", 1e-5),
        (None, 1e-5),
        (8, 0),
        (8, 1),
        (8, -1e-5),
        (8, math.nan),
        (8, math.inf),
        (8, "1e-5"),
    ],
)
def test_bad_budgets(epsilon: object, delta: object) -> None:
    with pytest.raises(SordinoError) as caught:
        Budget(epsilon, delta)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_participation_of_a_prefix() -> None:
    p = Participation(steps=100, epochs=3, separation=40, fixed=True)
    assert [p.first(t).epochs for t in (0, 1, 40, 41, 80, 81, 100)] == [0, 1, 1, 2, 2, 3, 3]  # ⌈t/b⌉, not ⌊t/b⌋
    assert p.first(41) == Participation(steps=41, epochs=2, separation=40, fixed=True)
    for bad in ({"steps": -1}, {"epochs": 1.5}, {"separation": 0}, {"steps": True}):
        with pytest.raises(SordinoError):
            Participation(**{"steps": 10, "epochs": 1, "separation": 1, **bad})  # type: ignore[arg-type]


def test_steps_and_batch_are_never_rounded_silently() -> None:
    """300 stays 300; the last, short batch of an epoch is a step."""
    s = Schedule(examples=1000, batch_size=300, epochs=2)
    assert (s.batch_size, s.steps_per_epoch, s.steps) == (300, 4, 8)


def test_an_epsilon_beyond_decimals_prints_and_is_not_lower() -> None:
    assert float(round_up(1e30)) >= 1e30
