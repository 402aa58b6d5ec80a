"""The generic bounds, on matrices of any sign, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.strategies import DenseMatrix, Toeplitz, make_strategy
from sordino.strategies.banded import Banded
from sordino.strategies.sensitivity import fixed_order, leftmost, leftmost_applies, sensitivity_of, separated

from .test_strategies import brute_force, participations, patterns


def toeplitz(coefficients: list[float], n: int) -> np.ndarray:
    c = np.zeros((n, n))
    for lag, value in enumerate(coefficients[:n]):
        c += value * np.eye(n, k=-lag)
    return c


def test_correlated_noise_mechanism_keeps_the_cross_terms() -> None:
    """Dropping X_ij, i ≠ j, gives noise up to 1.28 times short (and more)."""
    c = make_strategy("lambda-cgd:0.9", 12).dense()
    p = Participation(steps=12, epochs=4, separation=3)
    without = max(np.sqrt(sum((c.T @ c)[i, i] for i in pattern)) for pattern in patterns(p))
    assert brute_force(c, p) > 1.28 * without
    assert sensitivity_of(c, p).value == pytest.approx(brute_force(c, p))


@pytest.mark.parametrize("seed", range(6))
def test_any_signs_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 8
    c = np.tril(rng.normal(size=(n, n))) * 0.7 ** np.subtract.outer(np.arange(n), np.arange(n)).clip(0)
    if seed % 2:
        c = np.abs(c)
    for p in participations(n):
        bound, truth = sensitivity_of(c, p), brute_force(c, p, rng)
        assert bound.value >= truth * (1 - 1e-12)
        if bound.exact:
            assert bound.value == pytest.approx(truth, rel=1e-9)


def test_the_dynamic_programme_is_close_on_nonnegative_matrices() -> None:
    rng = np.random.default_rng(0)
    worst = 1.0
    for _ in range(20):
        c = np.tril(rng.random((10, 10)))
        for p in (Participation(10, 3, 2), Participation(10, 4, 1), Participation(10, 2, 5)):
            worst = max(worst, separated(c.T @ c, p.epochs, p.separation).value / brute_force(c, p))
    assert 1.0 <= worst < 1.1


def test_the_sum_r_i_equals_an_exhaustive_search_of_the_same_bound() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(7, 7))
    x = x.T @ x
    for k, b in itertools.product((1, 2, 3), (1, 2, 3)):
        admissible = patterns(Participation(7, k, b))
        r = [
            abs(x[i, i]) + max(sum(abs(x[i, j]) for j in pattern if j != i) for pattern in admissible if i in pattern)
            for i in range(7)
        ]
        best = max(sum(r[i] for i in pattern) for pattern in admissible)
        assert separated(x, k, b).value ** 2 == pytest.approx(best)


def test_signs_and_directions_are_not_used_to_lower_the_bound() -> None:
    """Three unit columns with inner products −.49: contributions of the same sign cancel, others need not."""
    x = np.full((3, 3), -0.49) + 1.49 * np.eye(3)
    value = fixed_order(x, 3, 1).value
    assert value == pytest.approx(np.sqrt(3 + 6 * 0.49))
    signed = np.sqrt(x.sum())
    best = max(np.sqrt(np.array(s) @ x @ np.array(s)) for s in itertools.product((-1, 1), repeat=3))
    assert signed < best < value


def test_leftmost_is_not_safe_for_every_banded_inverse() -> None:
    """C⁻¹ = (1, 0, 0, −.9), n = 8, k = 2, b = 2: C ≥ 0, the formula says 2.068, the truth is 2.745."""
    c = np.linalg.inv(toeplitz([1, 0, 0, -0.9], 8))
    p = Participation(steps=8, epochs=2, separation=2)
    assert leftmost(c, 2, 2) == pytest.approx(2.068, abs=1e-3)
    assert brute_force(c, p) == pytest.approx(2.745, abs=1e-3)
    assert not leftmost_applies(c, 2)
    assert sensitivity_of(c, p).value >= brute_force(c, p) - 1e-12


def test_leftmost_applies_beyond_non_increasing_coefficients() -> None:
    """The conditions are on X; rounding of −1e-17 does not fail them."""
    c = make_strategy("lambda-cgd:0.9", 12).dense()
    assert leftmost_applies(c - 1e-17 * np.tril(np.ones((12, 12))), 3)
    assert not leftmost_applies(-c, 3)
    assert not leftmost_applies(np.diag([1.0, 2.0]), 1)


def test_banded_with_unit_columns_is_sqrt_k() -> None:
    rng = np.random.default_rng(3)
    c = np.tril(np.triu(rng.normal(size=(12, 12)), 0).T)
    c *= np.abs(np.subtract.outer(np.arange(12), np.arange(12))) < 3
    c /= np.linalg.norm(c, axis=0)
    for b in (3, 4, 5):
        k = -(-12 // b)
        for fixed in (True, False):
            bound = sensitivity_of(c, Participation(12, k, b, fixed))
            assert bound.value == pytest.approx(np.sqrt(k)) and bound.exact


def test_the_generic_bounds_meet_the_closed_form_on_a_longer_run() -> None:
    c = make_strategy("lambda-cgd:0.95", 500).dense()
    s = make_strategy("lambda-cgd:0.95", 500)
    p = Participation(steps=500, epochs=10, separation=50)
    assert sensitivity_of(c, p).value == pytest.approx(s.sensitivity(p), rel=1e-9)
    assert s.sensitivity(p) <= separated(c.T @ c, 10, 50).value < 1.1 * s.sensitivity(p)


@pytest.mark.parametrize("size", [1e-90, 1e-9, 1e-6, 1.0, 1e6, 1e90])
def test_conditions_are_judged_alike_for_matrices_of_any_size(size: float) -> None:
    """C⁻¹ = (1, 0, 0, −.9), whose leftmost columns give 2.068 and another pattern 2.745, times a factor."""
    c = np.linalg.inv(toeplitz([1.0, 0.0, 0.0, -0.9], 8))
    p = Participation(steps=8, epochs=2, separation=2)
    truth = brute_force(c, p)
    bands = np.array([[1.0] * 12, [0.1, 0.9, 0.2] * 4, [0.1, 0.2, 1.0] * 4])
    q = Participation(steps=12, epochs=6, separation=2)
    banded = Banded("banded", bands * size)
    assert truth > 2.74
    assert not leftmost_applies(c * size, 2)
    assert Toeplitz("toeplitz", 8, coefficients=c[:, 0] * size).sensitivity(p) / size >= truth * (1 - 1e-12)
    assert DenseMatrix(c * size).sensitivity(p) / size >= truth * (1 - 1e-12)
    assert banded.sensitivity(q) / size >= brute_force(banded.dense() / size, q) * (1 - 1e-12)
