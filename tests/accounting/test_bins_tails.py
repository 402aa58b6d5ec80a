"""What the finite reach of the noise costs under balls in bins with any C, against truncated noise worked out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sordino.accounting import gaussian_delta
from sordino.accounting.bins_gram import bins_gram, from_means
from sordino.accounting.bins_tails import bins_tail
from sordino.accounting.tails import R_MAX, lost_mass
from sordino.strategies import make_strategy


@pytest.mark.parametrize("angle", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.5, 0.1), (0.9, 0.4)])
def test_two_bins_in_one_pair_on_a_grid(first: float, second: float, angle: float) -> None:
    """One row, one pair, two bins that shift it by vectors at angle·π: both directions, total and in parts."""
    radius = 2.5
    n = 800
    reach = radius + 1.0
    x = (np.arange(n) + 0.5) / n * 2 * reach - reach
    xx, yy = np.meshgrid(x, x, indexing="ij")
    area = (2 * reach / n) ** 2

    def density(cx: float, cy: float) -> tuple[np.ndarray, np.ndarray]:
        r2 = (xx - cx) ** 2 + (yy - cy) ** 2
        free = np.exp(-r2 / 2) / (2 * math.pi)
        return free, np.where(r2 <= radius**2, free, 0.0)

    q, cut_q = density(0.0, 0.0)
    a, cut_a = density(first, 0.0)
    b, cut_b = density(second * math.cos(math.pi * angle), second * math.sin(math.pi * angle))
    kept = float(cut_q.sum() * area)
    p, cut_p = (a + b) / 2, (cut_a + cut_b) / 2
    needed = 0
    tail = bins_tail(from_means(np.array([[first, second]])), 1.0, 2, radius)
    for epsilon in (0.05, 0.3, 0.8, 1.5, 2.5):
        e = math.exp(epsilon)
        for here, there, cut_here, cut_there, term in (
            (p, q, cut_p, cut_q, tail.remove),
            (q, p, cut_q, cut_p, tail.add(epsilon)),
            (q, p, cut_q, cut_p, e * tail.linear),  # the two routes, each by itself
            (q, p, cut_q, cut_p, tail.remove + tail._strips(epsilon)),
        ):
            core = float(np.maximum(here - e * there, 0).sum() * area)
            core += 2 * math.exp(-(reach**2) / 2)  # what the grid leaves out
            total = float(np.maximum(cut_here - e * cut_there, 0).sum() * area) / kept
            assert total <= (core + term) / kept * 1.003 + 1e-9
            needed += total > core / kept
    assert needed > 0


def test_two_rows_and_a_choice_in_between() -> None:
    """The second row's shifts are chosen from the first row's outcome; both bins are there. By simulation."""
    radius, count, rng = 2.2, 250_000, np.random.default_rng(5)
    m = np.array([[0.6, 0.3], [0.4, 0.6]])
    tail = bins_tail(from_means(m), 1.0, 2, radius)

    def shifts(x: np.ndarray) -> np.ndarray:
        """rows × bins × 2, for outcomes of row 0."""
        v = np.zeros((len(x), 2, 2, 2))
        v[:, 0, 0], v[:, 0, 1] = (0.6, 0.0), (0.3, 0.0)
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        v[:, 1, 0], v[:, 1, 1] = 0.4 * unit, -0.6 * unit
        return v

    def truncated(size: int) -> np.ndarray:
        z = rng.normal(size=(int(size * 1.2), 2))
        return z[(z**2).sum(axis=1) <= radius**2][:size]

    def ratio(x: np.ndarray, y: np.ndarray, cut: bool) -> tuple[np.ndarray, np.ndarray]:
        """Densities of the run with the example and without it, over the Gaussian's without it."""
        v, out = shifts(x), np.stack([x, y], axis=1)
        moved = out[:, :, None, :] - v  # n × rows × bins × 2
        r = np.exp(((out**2).sum(axis=-1)[:, :, None] - (moved**2).sum(axis=-1)).sum(axis=1) / 2)
        if not cut:
            return r.mean(axis=1), np.ones(len(x))
        inside = ((moved**2).sum(axis=-1) <= radius**2).all(axis=1)
        return (r * inside).mean(axis=1), ((out**2).sum(axis=-1) <= radius**2).all(axis=1).astype(float)

    def outcomes(cut: bool, with_it: bool) -> tuple[np.ndarray, np.ndarray]:
        z = (truncated(count), truncated(count)) if cut else (rng.normal(size=(count, 2)), rng.normal(size=(count, 2)))
        if not with_it:
            return z
        bins, every = rng.integers(2, size=count), np.arange(count)
        x = z[0] + shifts(z[0])[every, 0, bins]  # row 0 is not adaptive
        return x, z[1] + shifts(x)[every, 1, bins]

    kept = (1 - math.exp(-(radius**2) / 2)) ** 2
    for epsilon in (0.3, 1.0):
        e = math.exp(epsilon)
        found = {}
        for cut in (False, True):
            p, q = ratio(*outcomes(cut, True), cut)
            found["remove", cut] = float(np.maximum(0, 1 - e * q / p).mean())
            p, q = ratio(*outcomes(cut, False), cut)
            found["add", cut] = float(np.maximum(0, 1 - e * p / q).mean())
        noise = 3 / math.sqrt(count)  # of the sum of two averages in [0, 1], each at most half that uncertain
        for direction, term in (("remove", tail.remove), ("add", tail.add(epsilon))):
            assert found[direction, True] <= (found[direction, False] + term) / kept + noise
            assert found[direction, True] > found[direction, False] / kept + noise  # so a term is needed


def test_remove_is_the_mean_over_bins_and_independent_noise_is_what_it_was() -> None:
    gram = bins_gram(make_strategy("identity", 60), 6, 60)
    for d in (10, 10_000, 10**8):
        tail = bins_tail(gram, 0.8, d)
        assert tail.remove == pytest.approx(10 * lost_mass(1 / 0.8, d), rel=1e-6)
        assert tail.worst == pytest.approx(min(1.0, 60 * lost_mass(1 / 0.8, d)), rel=1e-6)


def test_add_is_never_below_remove_and_never_above_excluding_any_bin() -> None:
    for name, sigma in (("lambda-cgd:0.95", 4.2), ("bsr:390", 2.0)):
        tail = bins_tail(bins_gram(make_strategy(name, 3900), 390, 3900), sigma, 10**6)
        for epsilon in (0.0, 0.1, 1.0, 3.0, 8.0, 20.0, 300.0):
            assert tail.linear <= tail.add(epsilon) <= tail.worst
        assert tail.add(300.0) == pytest.approx(tail.remove)
        assert tail.add(8.0) < tail.worst / 5
    assert tail.add(0.0) == pytest.approx(tail.linear)


def test_a_shift_beyond_the_reach_leaves_nothing() -> None:
    tail = bins_tail(from_means(np.array([[7.0, 1.0], [0.0, 1.0]])), 1.0, 100)
    assert tail.remove == tail.worst == 1.0 and tail.add(3.0) == 1.0
    with_noise = bins_tail(from_means(np.array([[7.0, 1.0], [0.0, 1.0]])), 10.0, 100)
    assert with_noise.remove < 1e-9


def test_strips_use_the_gaussian_mechanism_at_a_lower_epsilon() -> None:
    """A bin that x does not exclude has at least e^{−R·v} of its density where x is excluded by a shift of v."""
    rng = np.random.default_rng(0)
    radius = R_MAX
    for _ in range(200):
        v = rng.uniform(0, 0.5)
        depth = rng.uniform(0, v)
        x = np.array([radius - depth, 0.0])  # in the disc, and outside the disc moved by (−v, 0)
        assert np.linalg.norm(x - [-v, 0.0]) >= radius
        other = rng.normal(size=2)
        other *= rng.uniform(0, 1.0) / np.linalg.norm(other)
        if np.linalg.norm(x - other) <= radius:
            assert x @ other - other @ other / 2 >= -radius * v
    tail = bins_tail(bins_gram(make_strategy("lambda-cgd:0.9", 100), 20, 100), 1.0, 10_000)
    best = tail.bins * (tail.linear + tail.quadratic) * gaussian_delta(8.0, tail.longest)
    assert tail.add(8.0) >= min(best, tail.linear * math.exp(8.0), tail.worst) * 0.99
