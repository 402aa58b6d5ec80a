"""Balls in fresh bins, independent noise: k epochs compose, each one a draw of balls in bins.

In one epoch an example takes part once, in a bin that is uniform and that nothing released before tells about. So,
whatever the history, the epoch is dominated by the pair of `balls_in_bins` with one participation (s = 1/σ), in
each direction, and the run by the k-fold composition of that pair (adaptive composition of dominating pairs: Zhu
et al. 2022).

**Composing an upper bound.** Of one epoch only upper bounds U_i ≥ δ(ε_i) are known, on a grid of ε from −L to U
(``δ_remove(−ε) = 1 − e^{−ε} + e^{−ε} δ_add(ε)``, and the other way round). δ is convex in e^ε, so it lies below the
greatest convex function below the U_i: the lower hull of the points (e^{ε_i}, U_i). The masses that connect the hull's
corners (Doroshenko et al. 2022) are a privacy loss distribution with just that curve, beyond the grid included: what
lies below the first corner is counted there, what is left at the last one as an infinite loss. A curve above another
at every ε stays above it under composition with anything, as ``δ(ε) = E δ_1(ε − ℓ_2)``, so the composition bounds
the run. Rounding: as in `subsampled`, ``FFT_ERROR`` of δ is given away.

A run counts in whole epochs: a bin that comes later in the epoch is counted as if its turn had come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..sampling import FreshBins, Sampling
from ..strategies import Strategy
from .balls_in_bins import LARGEST_S, LEAST_S, BinsCurve
from .base import Accountant, Curve, Query, Tail
from .gaussian import GaussianCurve, gaussian_delta, gaussian_epsilon
from .lognormals import add_deltas, jensen_add_delta, remove_deltas
from .subsampled import FFT_ERROR, first_answer
from .tails import lost_mass

# Of the grid of one epoch's sums, and points of ε to a standard deviation of its loss.
FINE, COARSE = (0.006, 40), (0.02, 8)
LARGEST_EPSILON_GRID = 20_000
NEGLIGIBLE = 1e-12  # where the grid of ε may end
SMALLEST_DELTA = 1e-10  # below, rounding decides: answer without amplification


class FreshBinsPLD(Accountant):
    """Balls in fresh bins × C = I."""

    name = "bins-pld"
    title = "PLD of one epoch's certified curve, composed"
    tolerance = 2e-6

    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        if not isinstance(sampling, FreshBins):
            return f"the 'bins-pld' accountant needs sampling='balls-in-bins:fresh', not {sampling.name!r}"
        if not strategy.is_identity:
            return (
                f"sampling='balls-in-bins:fresh' with noise={strategy.name!r}: with bins drawn anew the steps of an "
                "example are no longer b apart, and correlated noise has no accountant"
            )
        return None

    def released(self, query: Query) -> Query:
        epoch = query.sampling.schedule.steps_per_epoch
        return replace(query, steps=-(-query.steps // epoch) * epoch)

    def curve(self, query: Query) -> Curve:
        bins, epochs = self._parameters(query)
        s = 1.0 / query.sigma
        return GaussianCurve(math.sqrt(epochs) * s) if bins == 1 else FreshCurve(bins, s, epochs, query.coarse)

    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail:
        """What finite tails add: as for bins that stay, k participations if the example is there.

        Without it an output in the strip of one of the k·b steps stays possible through the epoch's other b−1 bins,
        and costs at most δ of epochs of b−1 bins at ``ε + ln(1 − 1/b)``; two strips at once (k·b·strip)²/2. (A mean of
        b is the mean of its b means of b−1, so fewer bins cost no less.)
        """
        bins, k = self._parameters(query)
        strip = lost_mass(1.0 / query.sigma, parameters)
        every = k * bins * strip

        def holds(epsilon: float) -> bool:
            if bins == 1:
                return True
            shifted = epsilon + math.log1p(-1.0 / bins)
            if shifted < 0.0:
                return False
            without = gaussian_delta(shifted, math.sqrt(k) / query.sigma)
            if bins * (without + every / 2) <= 1.0 or bins == 2:
                return bins * (without + every / 2) <= 1.0
            fewer = FreshCurve(bins - 1, 1.0 / query.sigma, k, coarse=True).delta(shifted)
            return bins * (fewer + every / 2) <= 1.0

        return Tail(min(1.0, k * strip), min(1.0, every), holds)

    @staticmethod
    def _parameters(query: Query) -> tuple[int, int]:
        """b, and the number of epochs begun."""
        epoch = query.sampling.schedule.steps_per_epoch
        return epoch, -(-query.steps // epoch)


@dataclass(frozen=True)
class FreshCurve:
    """`epochs` compositions of b bins with log-standard deviation s = 1/σ."""

    bins: int
    s: float
    epochs: int
    coarse: bool = False

    def delta(self, epsilon: float) -> float:
        """At most what the bins known would cost."""
        without = gaussian_delta(epsilon, self._shift)
        if self.epochs == 1:
            return min(without, BinsCurve(self.bins, self.s).delta(epsilon))
        if without <= SMALLEST_DELTA or not LEAST_S < self.s < LARGEST_S:
            return without
        found = first_answer(lambda: FFT_ERROR + self._composed().get_delta_for_epsilon(epsilon), lambda: without)
        return min(without, max(SMALLEST_DELTA, found))

    def epsilon(self, delta: float) -> float:
        without = gaussian_epsilon(delta, self._shift)
        if self.epochs == 1:
            return min(without, BinsCurve(self.bins, self.s).epsilon(delta))
        if delta <= SMALLEST_DELTA or without in (0.0, math.inf) or not LEAST_S < self.s < LARGEST_S:
            return without
        found = first_answer(lambda: self._composed().get_epsilon_for_delta(delta - FFT_ERROR), lambda: without)
        return min(without, max(0.0, found))

    @property
    def _shift(self) -> float:
        return math.sqrt(self.epochs) * self.s

    def _composed(self) -> Any:
        return _compose(self.bins, self.s, self.epochs, self.coarse)


@lru_cache(maxsize=64)
def _compose(bins: int, s: float, epochs: int, coarse: bool) -> Any:
    return one_epoch(bins, s, coarse).self_compose(epochs)


@lru_cache(maxsize=16)
def one_epoch(bins: int, s: float, coarse: bool = False) -> Any:
    """The privacy loss distribution of one epoch, from above, in both directions."""
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots

    spacing, points = COARSE if coarse else FINE
    deviation, high, low = _spread_of_loss(bins, s)
    h = max(deviation / points, (high + low) / LARGEST_EPSILON_GRID)
    epsilons = h * np.arange(math.ceil(max(high, low) / h) + 1)
    remove = _curve(remove_deltas, bins, s, epsilons, spacing)
    add = np.minimum(
        _curve(add_deltas, bins, s, epsilons, spacing), [jensen_add_delta(bins, s, float(e)) for e in epsilons]
    )
    pmfs = []
    for forward, backward in ((remove, add), (add, remove)):
        below = np.exp(-epsilons[:0:-1])
        deltas = np.concatenate([1.0 - below + below * backward[:0:-1], forward])
        rounded = np.arange(-len(epsilons) + 1, len(epsilons))
        corners = _lower_hull(np.exp(rounded * h), np.minimum.accumulate(deltas))
        pmfs.append(create_pmf_pessimistic_connect_dots(h, rounded[corners], deltas[corners]))
    return privacy_loss_distribution.PrivacyLossDistribution(*pmfs)


def _curve(deltas: Any, bins: int, s: float, epsilons: np.ndarray, spacing: float) -> np.ndarray:
    """`deltas` on all of a grid, in groups within which the threshold's distance to the mean less than doubles."""
    distance = np.abs(np.expm1(epsilons if deltas is remove_deltas else -epsilons)) * math.sqrt(bins)
    group = np.floor(np.log2(np.maximum(distance, min(1.0, s)) / min(1.0, s))).astype(int)
    group += np.floor(epsilons).astype(int) * 64  # and the threshold itself stays within a factor e
    out = np.empty(len(epsilons))
    for g in np.unique(group):
        mine = group == g
        out[mine] = deltas(bins, s, epsilons[mine], spacing)
    without = np.array([gaussian_delta(float(e), s) for e in epsilons])  # the bin known: an upper bound too
    return np.minimum(out, without)


def _spread_of_loss(bins: int, s: float) -> tuple[float, float, float]:
    """A standard deviation of one epoch's loss ln r, and how far above and below 0 it reaches: only for the grid."""
    rng = np.random.default_rng(0)
    batches, rows = 16, max(4, min(256, 250_000 // bins))
    deviation = float(np.concatenate([_losses(rng, bins, s, rows) for _ in range(batches)]).std())
    low = high = 0.0
    while gaussian_delta(high, s) > NEGLIGIBLE:
        high += max(s, 1e-3)
    # Above, no more than one large X decides; below, r is at least the geometric mean of the X.
    high = min(high, max(s * s / 2 + 8.0 * s - math.log(bins), 0.0) + 10.0 * deviation + s)
    low = min(s * s / 2 + 8.0 * s / math.sqrt(bins), high + 8.0 * s)
    return min(deviation, 1.0), max(high, deviation), max(low, deviation)


def _losses(rng: np.random.Generator, bins: int, s: float, rows: int) -> np.ndarray:
    """ln r with the example."""
    x = s * rng.normal(size=(rows, bins)) - s * s / 2
    x[:, 0] += s * s
    top = x.max(axis=1)
    return np.asarray(top + np.log(np.exp(x - top[:, None]).mean(axis=1)))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the corners of the greatest convex function at or below the points; the first and last included."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return np.array(kept)
