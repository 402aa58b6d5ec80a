"""What is sampled from: G of the leading steps through |C|, closed forms above the truth, and why |C|."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sordino.accounting.bins_bounds import BinsBounds, jensen_add
from sordino.accounting.bins_gram import bins_gram
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.errors import Unsupported
from sordino.strategies import Strategy, make_strategy

from .reference import normal_nodes, two_correlated_bins_delta


class Dense(Strategy):
    """Any lower-triangular matrix."""

    def __init__(self, c: np.ndarray) -> None:
        super().__init__("dense", len(c))
        self.c = np.tril(c)

    def dense(self) -> np.ndarray:
        return self.c

    def terms(self, step: int) -> list[tuple[int, float]]:
        raise Unsupported("dense")


def plain_gram(c: np.ndarray, bins: int, steps: int) -> np.ndarray:
    m = np.zeros((steps, bins))
    for step in range(steps):
        m[:, step % bins] += np.abs(c[:steps, step])
    return m.T @ m


@pytest.mark.parametrize("steps", [1, 3, 4, 9, 11, 12])
def test_gram_by_columns_is_the_dense_one_for_every_prefix(steps: int) -> None:
    rng = np.random.default_rng(steps)
    for strategy in (Dense(rng.normal(size=(12, 12))), make_strategy("lambda-cgd:0.9", 12), make_strategy("bsr:3", 12)):
        expected = plain_gram(strategy.dense(), 4, steps)
        found = bins_gram(strategy, 4, steps)
        assert found.gram == pytest.approx(expected, rel=2e-9, abs=2e-10 * expected.max())
        assert (found.gram >= expected - 1e-15).all()  # rounding only adds
        np.linalg.cholesky(found.gram)
        c = np.abs(strategy.dense()[:steps, :steps])
        assert found.totals == pytest.approx([c[:, i::4].sum() for i in range(4)])
        assert found.largest == pytest.approx(max(c[:, i::4].sum(axis=1).max() for i in range(4)))


def test_independent_noise_is_bins_that_do_not_overlap() -> None:
    assert bins_gram(make_strategy("identity", 30), 5, 30).gram == pytest.approx(6 * np.eye(5), abs=1e-8)


def test_delta_grows_with_every_entry_of_g() -> None:
    """Kahane: what makes absolute values, rounding up and longer runs safe."""
    base = np.array([[1.5, 0.4], [0.4, 1.0]])
    for epsilon in (0.3, 2.0, 5.0):
        delta = two_correlated_bins_delta(base, epsilon)
        for more in ([[0.1, 0], [0, 0]], [[0, 0], [0, 0.1]], [[0, 0.1], [0.1, 0]]):
            larger = two_correlated_bins_delta(base + np.array(more), epsilon)
            assert larger[0] > delta[0] * (1 + 1e-6) and larger[1] > delta[1] * (1 + 1e-6)


@pytest.mark.parametrize("sigma", [0.3, 0.7, 2.0, 10.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 2.0, 8.0])
def test_closed_forms_are_above_two_bins_by_quadrature(sigma: float, epsilon: float) -> None:
    gram = np.array([[1.0, 0.5], [0.5, 2.0]])
    remove, add = two_correlated_bins_delta(gram / sigma**2, epsilon)
    bounds = BinsBounds(gram, sigma)
    assert bounds.remove(epsilon) >= remove * (1 - 1e-6)
    assert bounds.add(epsilon) >= add * (1 - 1e-6)
    assert bounds.delta(epsilon) >= max(remove, add) * (1 - 1e-6)
    for order in range(bounds.orders + 1):
        assert math.exp(min(0.0, bounds.log_largest(order, epsilon))) >= remove * (1 - 1e-6)


def test_closed_forms_of_one_bin_are_exact() -> None:
    bounds = BinsBounds(np.array([[2.0]]), 1.3)
    for epsilon in (0.1, 1.0, 5.0):
        truth = gaussian_delta(epsilon, math.sqrt(2) / 1.3)
        assert bounds.delta(epsilon) == pytest.approx(truth, rel=1e-9)
        assert jensen_add(bounds.h, bounds.v, epsilon) == pytest.approx(truth, rel=1e-9)
        assert bounds.epsilon(truth) == pytest.approx(epsilon, rel=2e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 50.0, 1e6, 1e300, math.inf])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 100.0, 1e6])
def test_closed_forms_are_probabilities_everywhere(scale: float, epsilon: float) -> None:
    with np.errstate(all="ignore"):
        bounds = BinsBounds(np.array([[1.0, 0.5], [0.5, 1.0]]) * min(scale, 1e300), 1.0 if scale < 1e301 else 1e-200)
    for value in (bounds.remove(epsilon), bounds.add(epsilon), bounds.delta(epsilon)):
        assert 0.0 <= value <= 1.0
    found = bounds.epsilon(1e-5)
    assert 0.0 <= found <= gaussian_epsilon(1e-5, bounds.shift)


def test_jensen_in_both_tails() -> None:
    z, w = normal_nodes()
    for h, v in ((0.5, 1.0), (3.0, 0.2), (0.1, 0.01), (2.0, 8.0)):
        for epsilon in (0.0, 0.5, 2.0, 4.0):
            truth = float((w * np.maximum(0, -np.expm1(epsilon - h + math.sqrt(v) * z))).sum())
            assert jensen_add(h, v, epsilon) == pytest.approx(truth, rel=1e-3, abs=1e-12)


# Why |C|: an example chooses its contributions, step by step, as it sees the outputs.

SIGNED = np.array([[1.0, 0.0, 0.0], [-0.9, 1.0, 0.0], [0.6, -0.8, 1.0]])
CHOICES = (-1.0, 0.0, 1.0)  # of an example's contribution, one dimension


def best_adversary(c: np.ndarray, sigma: float, value: Callable[[np.ndarray], np.ndarray], strike: float) -> float:
    """``max E F(r)`` over adaptive choices, F = (±(r − strike))₊: three steps, two bins, by backward induction.

    Bin 0 takes part at steps 0 and 2, bin 1 at step 1. The last expectation is over a one-dimensional Gaussian.
    """
    z, w = normal_nodes(10, 9.0)
    z2, w2 = normal_nodes(4, 7.0)

    def ratio(mean: np.ndarray | float, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp((mean * x - np.square(mean) / 2) / sigma**2))

    best = 0.0
    for g0 in CHOICES:
        total = 0.0
        for x0, weight in zip(sigma * z2, w2, strict=True):
            first = ratio(c[0, 0] * g0, x0)  # of bin 0; bin 1 is not there yet
            options = []
            for g1 in CHOICES:
                x1 = sigma * z2
                bin0, bin1 = first * ratio(c[1, 0] * g0, x1), ratio(c[1, 1] * g1, x1)
                last = []
                for g2 in CHOICES:
                    x2 = sigma * z
                    r0 = bin0[:, None] * ratio(c[2, 0] * g0 + c[2, 2] * g2, x2)
                    r1 = bin1[:, None] * ratio(c[2, 1] * g1, x2)
                    last.append(value((r0 + r1) / 2 - strike) @ w)
                options.append(float(np.max(last, axis=0) @ w2))
            total += weight * max(options)
        best = max(best, total)
    return best


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (0.8, 3.0), (2.0, 0.3)])
def test_absolute_values_are_enough_against_an_adaptive_example_and_signs_are_not(sigma: float, epsilon: float) -> None:
    e = math.exp(epsilon)
    through_absolute = two_correlated_bins_delta(plain_gram(SIGNED, 2, 3) / sigma**2, epsilon)
    m = np.stack([SIGNED[:, 0] + SIGNED[:, 2], SIGNED[:, 1]], axis=1)
    through_signs = two_correlated_bins_delta(m.T @ m / sigma**2, epsilon)
    remove = best_adversary(SIGNED, sigma, lambda x: np.maximum(0, x), e)
    add = e * best_adversary(SIGNED, sigma, lambda x: np.maximum(0, -x), 1 / e)
    # Quadrature of a kinked function: a per cent.
    assert remove <= through_absolute[0] * 1.01 and add <= through_absolute[1] * 1.01
    assert remove > through_signs[0] * 1.05 and add > through_signs[1] * 1.05
    positive = best_adversary(np.abs(SIGNED), sigma, lambda x: np.maximum(0, x), e)
    assert positive == pytest.approx(through_absolute[0], rel=0.01)  # and attained where C ≥ 0


def test_signs_can_be_wrong_by_orders_of_magnitude() -> None:
    """One participation, two bins; the second step takes the first one's mean back, or does not."""
    c = np.array([[1.0, 0.0], [-0.95, 0.3]])
    c = np.block([[c, np.zeros((2, 2))], [-0.9 * c, c]])
    sigma, epsilon = 1.0, 6.0
    raw = np.stack([c[:, 0] + c[:, 2], c[:, 1] + c[:, 3]], axis=1)
    signed = two_correlated_bins_delta(raw.T @ raw / sigma**2, epsilon)[0]
    chosen = np.stack([c[:, 0] - c[:, 2], c[:, 1] - c[:, 3]], axis=1)  # contributions +1, then −1: not even adaptive
    attack = two_correlated_bins_delta(chosen.T @ chosen / sigma**2, epsilon)[0]
    absolute = two_correlated_bins_delta(plain_gram(c, 2, 4) / sigma**2, epsilon)[0]
    assert attack > 1e3 * signed and attack <= absolute


def test_quadrature_of_two_bins_is_itself_right() -> None:
    rng = np.random.default_rng(1)
    scaled, epsilon = np.array([[1.0, 0.6], [0.6, 0.8]]), 0.8
    y = rng.multivariate_normal([0, 0], scaled, size=2_000_000)
    r = np.exp(y - np.diag(scaled) / 2).mean(axis=1)
    truth = two_correlated_bins_delta(scaled, epsilon)
    for found, expected in (
        (np.maximum(0, r - math.exp(epsilon)), truth[0]),
        (np.maximum(0, 1 - math.exp(epsilon) * r), truth[1]),
    ):
        assert found.mean() == pytest.approx(expected, abs=4.5 * found.std() / math.sqrt(len(r)))
    alone = two_correlated_bins_delta(np.array([[1.0, 1.0], [1.0, 1.0 + 1e-12]]), epsilon)
    assert alone[0] == pytest.approx(gaussian_delta(epsilon, 1.0), rel=1e-3)
