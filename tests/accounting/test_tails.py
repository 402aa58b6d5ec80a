"""What the finite reach of the noise costs, against truncated noise worked out on a grid."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from sordino import Budget
from sordino.accounting import gaussian_delta
from sordino.accounting.tails import R_MAX, first_order, log_kept, lost_mass, pair_loss
from sordino.budget import SordinoWarning
from sordino.plan import plan


def grid(radius: float, shift: float, n: int = 2400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Densities of a pair truncated to the disc, without and with a shift along x (not normalised), and cell area."""
    reach = radius + shift
    x = (np.arange(n) + 0.5) / n * 2 * reach - reach
    xx, yy = np.meshgrid(x, x, indexing="ij")

    def density(cx: float) -> np.ndarray:
        r2 = (xx - cx) ** 2 + yy**2
        return np.where(r2 <= radius**2, np.exp(-r2 / 2) / (2 * math.pi), 0.0)

    return density(0.0), density(shift), np.array((2 * reach / n) ** 2)


@pytest.mark.parametrize("radius", [2.0, 3.0])
@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0, 2.0])
def test_the_mass_a_pair_loses(radius: float, shift: float) -> None:
    here, there, area = grid(radius, shift)
    truth = float(here[(there == 0)].sum() * area)
    assert truth * 0.997 <= pair_loss(shift, radius) <= truth * 1.02
    one_coordinate = float(ndtr(shift - radius) - ndtr(-radius))  # noise cut off coordinate by coordinate loses less
    if shift <= radius - 1.5:
        assert pair_loss(shift, radius) > one_coordinate


def test_first_order_is_the_slope_and_more_than_a_straight_edge() -> None:
    phi = math.exp(-(R_MAX**2) / 2) / math.sqrt(2 * math.pi)
    assert first_order() == pytest.approx(pair_loss(1e-6) / 1e-6, rel=1e-4)
    assert first_order() == pytest.approx(phi * R_MAX * math.sqrt(2 / math.pi))
    assert first_order() / math.sqrt(2) == pytest.approx(4.25 * phi, rel=1e-2)


@pytest.mark.parametrize("radius", [2.0, 3.0, 5.0, R_MAX])
def test_the_quadratic_term_increases_as_far_as_it_is_used(radius: float) -> None:
    a = first_order(radius)
    v = np.linspace(0.05, max(0.1, radius - 1.5), 60)
    c = [(pair_loss(float(s), radius) - a * s) / s**2 for s in v]
    assert min(c) > 0 and all(b >= a * (1 - 1e-9) for a, b in zip(c, c[1:], strict=False))
    # an odd coordinate, alone in its pair, loses at most what a straight edge would: below the pair's bound
    straight = [ndtr(s - radius) - ndtr(-radius) for s in v]
    slope = math.exp(-(radius**2) / 2) / math.sqrt(2 * math.pi)
    assert all(f <= slope * s + k * s * s for f, s, k in zip(straight, v, c, strict=True))


@pytest.mark.parametrize("shares", [[1.0], [1, 1], [3, 1], [1, 1, 1, 1], [10, 1, 1, 1, 1, 1, 1, 1]])
def test_no_way_to_spread_a_shift_loses_more(shares: list[float]) -> None:
    radius, total = 3.0, 1.4
    direction = np.array(shares) / np.linalg.norm(shares)
    lost = sum(pair_loss(float(total * u), radius) for u in direction)
    assert lost <= lost_mass(total, 2 * len(shares), radius) * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("shift", [0.1, 0.5])
def test_truncated_gaussian_is_within_its_stated_delta(epsilon: float, shift: float) -> None:
    radius = 2.0
    here, there, area = grid(radius, shift)
    kept = float(here.sum() * area)
    truth = float(np.maximum(here - math.exp(epsilon) * there, 0).sum() * area) / kept
    assert truth > gaussian_delta(epsilon, shift)  # so the term is needed
    assert truth <= (gaussian_delta(epsilon, shift) + lost_mass(shift, 2, radius)) / kept * 1.003


@pytest.mark.parametrize("q", [0.05, 0.3])
@pytest.mark.parametrize("epsilon", [0.2, 0.6, 1.5])
def test_subsampled_truncated_gaussian_in_both_directions(q: float, epsilon: float) -> None:
    """One Poisson step: q·strip with the example; without it strip·δ(ε + ln(1−q)), δ of no steps left being 0."""
    radius, shift = 2.0, 0.5
    here, there, area = grid(radius, shift)
    kept = float(here.sum() * area)
    mixed = (1 - q) * here + q * there
    factor = math.exp(epsilon)
    remove = float(np.maximum(mixed - factor * here, 0).sum() * area) / kept
    add = float(np.maximum(here - factor * mixed, 0).sum() * area) / kept
    x = np.linspace(-12, 12 + shift, 400_001)
    p0 = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    pm = (1 - q) * p0 + q * np.exp(-((x - shift) ** 2) / 2) / math.sqrt(2 * math.pi)
    dx = x[1] - x[0]
    core_remove = np.maximum(pm - factor * p0, 0).sum() * dx
    core_add = np.maximum(p0 - factor * pm, 0).sum() * dx
    strip = lost_mass(shift, 2, radius)
    assert remove <= (core_remove + q * strip) / kept * 1.003 + 1e-9
    alone = 1.0 if epsilon + math.log1p(-q) < 0 else 0.0
    assert add <= (core_add + strip * alone + strip**2 / 2) / kept * 1.003 + 1e-9


def test_the_published_first_order_term_is_covered() -> None:
    """d = 1e8, k = 20, σ = .6, C = I: 6e-8 to first order if cut coordinate by coordinate; a disc 4.25 times that."""
    phi = math.exp(-(R_MAX**2) / 2) / math.sqrt(2 * math.pi)
    straight = 20 * phi * math.sqrt(1e8) / 0.6
    assert straight == pytest.approx(6e-8, rel=0.1)
    assert 4.25 * straight < 20 * lost_mass(1 / 0.6, 1e8) < 6.0 * straight


def test_kept_mass() -> None:
    assert log_kept(1, 0) == 0.0
    assert -log_kept(2000, 10**8) == pytest.approx(2000 * 0.505e8 * 2**-41, rel=1e-2)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-order", "balls-in-bins"])
def test_the_tail_is_inside_delta(sampling: str) -> None:
    run = {"examples": 50_000, "batch_size": 500, "epochs": 20, "sampling": sampling}
    bare = plan(Budget(8, 1e-6), **run)
    small = plan(Budget(8, 1e-6), **run, parameters=10**4)
    large = plan(Budget(8, 1e-6), **run, parameters=10**8)
    assert bare.noise_multiplier < small.noise_multiplier < large.noise_multiplier < bare.noise_multiplier * 1.03
    assert not bare.guarantee().tails_included and large.guarantee().tails_included
    assert "finite reach" in str(bare.guarantee()) and "finite reach" not in str(large.guarantee())
    assert large.guarantee().epsilon <= 8
    # the same noise, accounted with the tails, costs more
    costs = plan(noise_multiplier=bare.noise_multiplier, delta=1e-6, **run, parameters=10**8).guarantee()
    assert costs.epsilon > bare.guarantee().epsilon


def test_a_huge_epsilon_still_calibrates_but_to_noise_wide_enough_for_one_entry() -> None:
    """Noise that ends at 7.5 σ cannot be (100, 1e-6)-DP at σ = .1, whatever the unbounded formula says."""
    with pytest.warns(SordinoWarning, match="finite reach.*a larger delta"):
        p = plan(Budget(100, 1e-6), examples=100, batch_size=100, epochs=1, sampling="fixed-order", parameters=1000)
    bare = plan(Budget(100, 1e-6), examples=100, batch_size=100, epochs=1, sampling="fixed-order")
    assert p.noise_multiplier > 2 * bare.noise_multiplier
    assert 15 < p.guarantee().epsilon < 100
    assert pair_loss(1 / bare.noise_multiplier) > 1e-6


def test_the_pages_state_the_term_that_is_added() -> None:
    docs = Path(__file__).parents[2] / "docs"
    n, s = 10_000, 1.3
    a = math.exp(-(R_MAX**2) / 2) / math.sqrt(2 * math.pi) * R_MAX * math.sqrt(2 / math.pi)
    assert lost_mass(s, n) == pytest.approx(a * s * (math.sqrt(n / 2) - 1) + pair_loss(s))
    for page in ("noise.md", "accounting.md"):
        text = (docs / page).read_text(encoding="utf-8").replace(" ", "")
        assert "a·s·(√(n/2)−1)+H(s)" in text and "a=φ(R_MAX)·R_MAX·√(2/π)" in text
