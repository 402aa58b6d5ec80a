"""BLT: the recurrence, the optimiser's gradient and what it reaches, the sensitivity it may not exploit."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.errors import SordinoError, StateError
from sordino.strategies import BLT, Problem, Workload, make_strategy
from sordino.strategies.blt_optimizing import _loss, coefficients

from .test_strategies import brute_force, participations, streamed

PUBLISHED = Participation(steps=3900, epochs=10, separation=390, fixed=True)


def test_coefficients_are_sums_of_exponentials() -> None:
    decays, weights = np.array([0.9, 0.5, 0.0, 1.0]), np.array([0.3, -0.2, 0.1, 0.01])
    c = coefficients(decays, weights, 6)
    want = [1.0] + [sum(w * d ** (i - 1) for d, w in zip(decays, weights, strict=True)) for i in range(1, 6)]
    np.testing.assert_allclose(c, want, rtol=1e-14)
    assert coefficients(decays, weights, 1).tolist() == [1.0]


@pytest.mark.parametrize("weights", [[0.4, 0.2], [1.5, -1.3], [-0.02, 0.1]])
def test_the_recurrence_is_the_inverse(weights: list[float]) -> None:
    s = BLT(300, np.array([0.97, 0.9]), np.array(weights))
    z = np.random.default_rng(0).normal(size=(300, 2))
    x = streamed(s, z)
    np.testing.assert_allclose(s.multiply(x), z, atol=1e-10)
    np.testing.assert_allclose(s.solve(z), x, atol=1e-9)
    assert (s.vectors_stored, s.vectors_regenerated, s.bands) == (2, 0, None)
    r = s.recurrence(5)
    assert r == s.recurrence(299) and r.fresh == 1.0 and r.put == (1.0, 1.0) and r.keep == (0.97, 0.9)


@pytest.mark.parametrize("objective", ["rmse", "max-se"])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    "workload", [Workload(), Workload(0.9, 0.99), Workload(learning_rates=tuple(np.linspace(1.0, 0.1, 40)))]
)
def test_the_gradient_is_that_of_finite_differences(objective: str, fixed: bool, workload: Workload) -> None:
    problem = Problem(40, Participation(40, 4, 10, fixed), workload, objective)  # type: ignore[arg-type]
    loss = _loss(problem, 1e-4)
    for x in (
        np.array([3.0, 1.0, -1.0, 0.1, 0.2, 0.3]),
        np.array([3.0, 2.5, 0.0, 1.2, -1.1, 0.3]),  # zeros of C that are complex
        np.array([0.5, 0.7]),
    ):
        value, gradient = loss(x)
        differences = [(loss(x + h)[0] - loss(x - h)[0]) / 2e-6 for h in 1e-6 * np.eye(len(x))]
        np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-7)
        half = len(x) // 2
        s = BLT(40, 1.0 / (1.0 + np.exp(-x[:half])), x[half:])
        if objective == "rmse":
            penalty = 1e-4 * float(x[half:] @ x[half:])
            bound = s.sensitivity(problem.participations)
            assert np.exp(value - penalty) >= problem.error(s) * bound * (1 - 1e-9)
            if fixed and s.nonnegative:
                assert np.exp(value - penalty) == pytest.approx(problem.error(s) * bound)


def test_noise_that_grows_is_no_candidate() -> None:
    value, gradient = _loss(Problem(40), 0.0)(np.array([0.0, 3.0]))  # θ̂ = θ − ω = −2.5
    assert value == np.inf and not gradient.any()


def test_the_published_setting_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSE 8.14 at (8, 1e-5), whose noise multiplier is .60023: 13.5615 at unit noise."""
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    problem = Problem(3900, PUBLISHED)
    start = time.process_time()
    s = make_strategy("blt:4", problem)
    assert time.process_time() - start < 5.0
    assert problem.loss(s) <= 13.40 < 8.14 / 0.60023
    assert np.abs(s.weights).max() < 3.0  # type: ignore[attr-defined]
    assert s.certificate["projected_gradient"] < 1e-5
    other = Problem(3900, Participation(3900, 10, 390))
    assert other.loss(make_strategy("blt:4", other)) <= 13.40
    assert problem.loss(make_strategy("blt:3", problem)) <= 13.53


def test_more_buffers_are_not_worse() -> None:
    for problem in (Problem(60, Participation(60, 4, 15)), Problem(200)):
        losses = [problem.loss(make_strategy(f"blt:{m}", problem)) for m in (1, 2, 3, 4, 5)]
        assert all(b <= a * (1 + 1e-4) for a, b in zip(losses, losses[1:], strict=False)), losses
        assert losses[1] < problem.loss(make_strategy("lambda-cgd", problem))


def test_it_cannot_be_better_than_the_best_matrix_of_all() -> None:
    """One participation: the optimum without any restriction, from band-mf-general with all bands."""
    least = Problem(60).loss(make_strategy("band-mf-general:60", 60))
    assert least < Problem(60).loss(make_strategy("blt:4", 60)) < 1.05 * least


def test_full_batches_want_no_correlation() -> None:
    problem = Problem(30, Participation(30, 30, 1))
    assert problem.loss(make_strategy("blt:3", problem)) == pytest.approx(np.sqrt(30 * 31 / 2), rel=1e-4)


@pytest.mark.parametrize(("k", "b"), [(6, 2), (4, 3), (3, 4), (2, 6)])
def test_the_optimum_does_not_exploit_its_sensitivity(k: int, b: int) -> None:
    for fixed in (True, False):
        p = Participation(12, k, b, fixed)
        s = make_strategy("blt:3", Problem(12, p))
        bound, truth = s.sensitivity_bound(p), brute_force(s.dense(), p)
        assert truth * (1 - 1e-12) <= bound.value <= 1.05 * truth


def test_sensitivity_with_weights_of_any_sign() -> None:
    s = BLT(10, np.array([0.9, 0.6, 0.2]), np.array([0.3, -0.9, 0.5]))
    assert not s.nonnegative
    for p in participations(10):
        assert s.sensitivity(p) >= brute_force(s.dense(), p) * (1 - 1e-12)


def test_a_finished_search_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    first = make_strategy("blt:2", 70)

    def fail(*arguments: object) -> None:
        raise AssertionError("optimised again")

    monkeypatch.setattr(sys.modules["sordino.strategies.blt"], "_optimised", fail)
    again = make_strategy("blt:2", 70)
    assert np.array_equal(again.dense(), first.dense()) and again.certificate == first.certificate
    with pytest.raises(AssertionError, match="optimised again"):
        make_strategy("blt:2", Problem(70, Participation(70, 2, 35)))


def test_long_runs() -> None:
    start = time.process_time()
    problem = Problem(64_000, Participation(64_000, 10, 6_400))
    s = make_strategy("blt:2", problem)
    assert s.sensitivity_bound(problem.participations).exact and problem.loss(s) < 17.5
    assert time.process_time() - start < 20.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blt", "needs a number of buffers"),
        ("blt:0", "from 1 to 64"),
        ("blt:65", "from 1 to 64"),
        ("blt:2.5", "from 1 to 64"),
        ("blt:many", "from 1 to 64"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(SordinoError, match=message):
        make_strategy(text, 10)


def test_a_definition_is_checked() -> None:
    good = make_strategy("blt:2", 9).definition()
    for bad in (
        {},
        {"decays": good["decays"]},
        good | {"decays": np.array([0.5])},
        good | {"decays": np.array([0.5, 1.5])},
        good | {"decays": np.array([0.5, np.nan])},
        good | {"weights": np.array([0.5, np.inf])},
    ):
        with pytest.raises(StateError, match="2 decays"):
            make_strategy("blt:2", 9, bad)
