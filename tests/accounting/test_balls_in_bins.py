"""Balls in bins with independent noise: an upper bound, and a tight one."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from sordino import Budget, Unsupported
from sordino.accounting.balls_in_bins import FINE, BinsCurve, bins_delta
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.accounting.lognormals import _spread, jensen_add_delta
from sordino.accounting.lognormals import add_delta as add_delta_on
from sordino.accounting.lognormals import remove_delta as remove_delta_on
from sordino.plan import plan

from .reference import bins_monte_carlo, two_bins_delta


def remove_delta(bins: int, s: float, epsilon: float, spacing: float = FINE) -> float:
    return remove_delta_on(bins, s, epsilon, spacing)


def add_delta(bins: int, s: float, epsilon: float, spacing: float = FINE) -> float:
    return add_delta_on(bins, s, epsilon, spacing)


@pytest.mark.parametrize(("s", "epsilon"), [(1.67, 8.0), (0.3, 1.0), (0.05, 0.1), (3.0, 10.0), (10.0, 50.0)])
def test_one_bin_is_the_gaussian_mechanism(s: float, epsilon: float) -> None:
    truth = gaussian_delta(epsilon, s)
    assert truth * (1 - 1e-9) <= remove_delta(1, s, epsilon) <= truth * 1.0001
    assert add_delta(1, s, epsilon) >= truth * (1 - 1e-9)
    assert jensen_add_delta(1, s, epsilon) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(("s", "epsilon"), [(1.67, 8.0), (0.3, 0.5), (0.05, 0.1), (3.0, 10.0), (1.0, 0.5), (2.0, 1.0)])
def test_two_bins_against_quadrature(s: float, epsilon: float) -> None:
    remove, add = two_bins_delta(s, epsilon)
    assert remove * (1 - 1e-6) <= remove_delta(2, s, epsilon) <= remove * 1.001
    assert add_delta(2, s, epsilon) >= add * (1 - 1e-6)
    assert jensen_add_delta(2, s, epsilon) >= add * (1 - 1e-6)
    if epsilon <= 1:
        assert add_delta(2, s, epsilon) <= add * 1.001


@pytest.mark.parametrize(
    ("bins", "s", "epsilon"), [(10, 1.25, 1.0), (50, 1.0, 0.3), (390, 2.5, 0.5), (390, 1.0, 0.05), (100, 3.0, 1.0)]
)
def test_against_a_plain_average_at_large_delta(bins: int, s: float, epsilon: float) -> None:
    (remove, remove_error), (add, add_error) = bins_monte_carlo(bins, s, epsilon, 4_000_000 // bins, seed=1)
    assert remove_delta(bins, s, epsilon) == pytest.approx(remove, abs=4.5 * remove_error)
    assert add_delta(bins, s, epsilon) == pytest.approx(add, abs=4.5 * add_error)
    assert jensen_add_delta(bins, s, epsilon) >= add - 4.5 * add_error


def lower_remove_delta(bins: int, s: float, epsilon: float, points: int) -> float:
    """Every X rounded down to a grid, what lies above the grid left out: a lower bound, by another formula.

    δ = E_Q(r − e^ε)₊, r increasing in every X.
    """
    from scipy import fft
    from scipy.special import ndtr

    threshold = bins * math.exp(epsilon)
    h = 8 * threshold / points
    with np.errstate(divide="ignore"):
        z = np.log(np.arange(points + 1) * h) / s + s / 2
    p = np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))
    n = fft.next_fast_len(2 * points)
    mass = fft.irfft(fft.rfft(p, n) ** bins, n)
    w = np.arange(n) * h
    keep = (w > threshold) & (w < 8 * threshold)
    # Two large X at once fold over at most once in 16 thresholds, and that mass is far below δ.
    inside = float(mass[keep] @ (w[keep] / bins - math.exp(epsilon)))
    top = 8 * threshold
    z_top = math.log(top) / s + s / 2
    above, above_biased = float(ndtr(-z_top)), float(ndtr(s - z_top))
    return inside + max(0.0, above_biased + (0 - threshold) * above)


@pytest.mark.parametrize(
    ("bins", "k", "sigma", "epsilon", "width"),
    [(10, 1, 0.8, 3.0, 0.01), (4, 1, 0.7, 4.0, 0.01), (50, 10, 1.4, 6.0, 0.03)],
)
def test_the_bracket(bins: int, k: int, sigma: float, epsilon: float, width: float) -> None:
    s = math.sqrt(k) / sigma
    lower, upper = lower_remove_delta(bins, s, epsilon, 2_000_000), bins_delta(bins, s, epsilon)
    assert lower <= upper <= lower * (1 + width)
    if (bins, k) == (10, 1):
        assert upper == pytest.approx(4.1e-5, rel=0.01)  # an equal split of a permutation would be 1.16e-2


@pytest.mark.parametrize("s", [0.05, 1.0, 3.0])
def test_spreading_keeps_the_mean_and_never_lowers_a_convex_expectation(s: float) -> None:
    h, cells = (0.01, 400) if s < 2 else (0.5, 40_000)
    p = _spread(s, h, cells)
    x = np.arange(cells + 1) * h
    fine = _spread(s, h / 50, cells * 50)
    y = np.arange(cells * 50 + 1) * h / 50
    assert p.sum() == pytest.approx(fine.sum(), rel=1e-12) and p @ x == pytest.approx(fine @ y, rel=1e-9)
    for convex in (np.square, lambda v: np.maximum(v - 1.2345, 0), lambda v: np.maximum(0.7654 - v, 0)):
        assert p @ convex(x) >= (fine @ convex(y)) * (1 - 1e-12)


def test_grid_does_not_matter() -> None:
    for bins, s, epsilon in ((390, 2.6, 8.0), (4000, 3.0, 8.0), (391, 0.33, 0.05)):
        fine = bins_delta(bins, s, epsilon, 0.0005) * (1 - 2e-4)  # the allowance for rounding grows with the grid
        assert fine <= bins_delta(bins, s, epsilon) <= fine * 1.001
        assert fine <= bins_delta(bins, s, epsilon, 0.006) <= fine * 1.02


def test_amplification_is_between_none_and_full() -> None:
    run = {"examples": 50_000, "batch_size": 128, "epochs": 10}
    sigma = {s: plan(Budget(8, 1e-6), **run, sampling=s).noise_multiplier for s in ("fixed-order", "balls-in-bins")}
    assert 0.55 * sigma["fixed-order"] < sigma["balls-in-bins"] < 0.7 * sigma["fixed-order"]


def test_delta_falls_with_epsilon_and_noise_and_bins() -> None:
    curve = [bins_delta(100, 1.5, e) for e in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 6.0)]
    assert all(a > b for a, b in zip(curve, curve[1:], strict=False))
    by_noise = [bins_delta(100, s, 1.0) for s in (2.0, 1.5, 1.0)]
    assert all(a > b for a, b in zip(by_noise, by_noise[1:], strict=False))
    by_bins = [bins_delta(b, 1.5, 1.0) for b in (2, 4, 20, 100, 500)]
    assert all(a > b for a, b in zip(by_bins, by_bins[1:], strict=False))


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 1.0, 50.0, 100.0])
def test_every_epsilon_calibrates(epsilon: float) -> None:
    p = plan(Budget(epsilon, 1e-6), examples=20_000, batch_size=200, epochs=5, sampling="balls-in-bins")
    assert epsilon * 0.999 < p.guarantee().epsilon <= epsilon


def test_the_convolution_is_for_independent_noise() -> None:
    run = {"examples": 1000, "batch_size": 10, "epochs": 2, "sampling": "balls-in-bins"}
    with pytest.raises(Unsupported, match="lambda-cgd:0.9.*the convolution is for independent noise"):
        plan(Budget(8, 1e-5), **run, noise="lambda-cgd:0.9", accountant="convolution")  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [1e-200, 1e-30, 1e-3, 0.03, 0.06, 1e4, 1e9])
def test_any_noise_has_an_answer_and_soon(sigma: float) -> None:
    start = time.perf_counter()
    planned = plan(noise_multiplier=sigma, delta=1e-5, examples=20_000, batch_size=100, epochs=2,
                   sampling="balls-in-bins", parameters=1000)  # fmt: skip
    unknown = plan(noise_multiplier=sigma, delta=1e-5, examples=20_000, batch_size=100, epochs=2,
                   sampling="balls-in-bins")  # fmt: skip
    without = gaussian_epsilon(1e-5, math.sqrt(2) / sigma)
    assert 0.0 <= unknown.account().epsilon <= (without if without < 1e18 else math.inf)
    assert unknown.account().epsilon >= 0.9 * without or 0.03 < sigma
    assert planned.account().epsilon >= unknown.account().epsilon
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 300.0, 301.0, 1e5, 1e300])
@pytest.mark.parametrize("s", [1e-9, 1e-4, 1.0, 40.0, 70.0, 1e30, 1e200, math.inf])
def test_delta_is_a_probability_everywhere(epsilon: float, s: float) -> None:
    assert 0.0 <= BinsCurve(7, s).delta(epsilon) <= gaussian_delta(epsilon, s) <= 1.0


@pytest.mark.parametrize("s", [1e-4, 0.003, 0.05])
def test_a_grid_from_where_the_mass_is_changes_nothing(s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import sordino.accounting.lognormals as module

    found = {}
    for bottom in ("its own", "zero"):
        if bottom == "zero":
            monkeypatch.setattr(module, "_bottom", lambda s, top: 0.0)
        found[bottom] = [f(10, s, s / 2, 0.01) for f in (remove_delta, add_delta)]
    assert found["its own"] == pytest.approx(found["zero"], rel=2e-3)
    assert max(found["its own"]) <= gaussian_delta(s / 2, s)


@pytest.mark.parametrize("bins", [2, 30])
@pytest.mark.parametrize("s", [1e-3, 1e-4])
@pytest.mark.parametrize("x", [0.0, 2.0, 4.0])
def test_next_to_no_loss_is_nearly_normal(bins: int, s: float, x: float) -> None:
    """r − 1 is about N(0, s²/b)."""
    deviation = s / math.sqrt(bins)
    epsilon = x * deviation
    truth = deviation * (math.exp(-x * x / 2) / math.sqrt(2 * math.pi) - x * math.erfc(x / math.sqrt(2)) / 2)
    for found in (remove_delta(bins, s, epsilon), add_delta(bins, s, epsilon)):
        assert found == pytest.approx(truth, rel=40 * s + 1e-4, abs=1e-11)
