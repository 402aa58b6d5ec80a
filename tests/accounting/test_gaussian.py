"""The analytic Gaussian, against high precision and published values."""

from __future__ import annotations

import math

import pytest
from mpmath import mp

from sordino.accounting import gaussian_delta, gaussian_epsilon, gaussian_sigma

GRID = [(e, d) for e in (0.05, 0.1, 0.5, 1.0, 8.0, 20.0, 50.0, 100.0) for d in (1e-2, 1e-5, 1e-9, 1e-15)]


def exact_delta(epsilon: float, mu: float) -> float:
    with mp.workdps(60):
        m, e = mp.mpf(mu), mp.mpf(epsilon)
        return float(mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0, 8.0, 50.0, 100.0])
@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.5, 1 / 0.60023, 5.0, 12.0, 40.0])
def test_delta_against_sixty_digits(epsilon: float, mu: float) -> None:
    assert gaussian_delta(epsilon, mu) == pytest.approx(exact_delta(epsilon, mu), rel=1e-9, abs=1e-290)


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_the_three_directions_agree(epsilon: float, delta: float) -> None:
    sigma = gaussian_sigma(epsilon, delta)
    assert exact_delta(epsilon, 1 / sigma) <= delta * (1 + 1e-9)
    assert exact_delta(epsilon, 1 / (sigma * (1 - 1e-6))) > delta
    assert gaussian_epsilon(delta, 1 / sigma) == pytest.approx(epsilon, rel=1e-7)
    assert gaussian_delta(gaussian_epsilon(delta, 1 / sigma), 1 / sigma) <= delta


def test_published_sigma() -> None:
    """Balle & Wang 2018 at (8, 1e-5)."""
    assert gaussian_sigma(8.0, 1e-5) == pytest.approx(0.60023, abs=5e-6)


def test_the_ends() -> None:
    assert gaussian_delta(1.0, 0.0) == 0.0 and gaussian_delta(1.0, math.inf) == 1.0
    assert gaussian_epsilon(1e-5, 1e-9) == 0.0 and gaussian_epsilon(1e-5, math.inf) == math.inf
    assert gaussian_delta(0.0, 1e3) == pytest.approx(1.0)
    assert 0 < gaussian_epsilon(1e-5, 1e3) < 1e6


@pytest.mark.parametrize("mu", [math.inf, math.nan])
def test_a_shift_that_is_no_number_has_no_guarantee(mu: float) -> None:
    assert gaussian_delta(1.0, mu) == 1.0
    assert gaussian_epsilon(1e-5, mu) == math.inf
