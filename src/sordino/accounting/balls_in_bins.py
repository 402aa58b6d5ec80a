"""Balls in bins with independent noise: a certified upper bound by convolution.

One example is in one of b bins, uniformly, and takes part k times there; each bin's steps are
disjoint. Against the run without it the likelihood ratio is ``r = W/b``, ``W = Σ_i X_i``, where without the
example the X_i are independent lognormals of mean 1 and log-variance ``s² = k/σ²``, and

    remove:  δ(ε) = E(r − e^ε)₊        add:  δ(ε) = E(1 − e^ε r)₊

(adaptively chosen contributions change nothing: both are expectations of convex functions of r, and the
conditional means of r's terms are orthogonal across bins whatever the history).

`lognormals` bounds both from above. With C ≠ I the terms of different bins are not independent, and another accountant
is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ..sampling import BallsInBins, Sampling
from ..strategies import Strategy
from .base import Accountant, Curve, Query, Tail
from .gaussian import GaussianCurve, gaussian_delta, gaussian_epsilon
from .lognormals import add_delta, jensen_add_delta, remove_delta
from .search import narrow
from .tails import lost_mass

FINE, COARSE = 0.0015, 0.006  # grid spacing, in units of (threshold − mean)/√b, or of s
SMALLEST_DELTA = 1e-9  # below, rounding decides: answer without amplification
# Outside, floating point ends (e^ε) or cannot tell lognormals from 1: answer without amplification. At large s and
# ε the difference is ln b of an ε in the hundreds; at small s, of an ε below 1e-4.
LARGEST_EPSILON, LEAST_S, LARGEST_S = 300.0, 1e-5, 60.0


class BallsInBinsConvolution(Accountant):
    """Balls in bins × C = I."""

    name = "convolution"
    title = "convolution of lognormals (certified upper bound)"
    tolerance = 2e-6

    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        if not isinstance(sampling, BallsInBins):
            return f"the 'convolution' accountant needs sampling='balls-in-bins', not {sampling.name!r}"
        if not strategy.is_identity:
            return f"sampling='balls-in-bins' with noise={strategy.name!r}: the convolution is for independent noise"
        return None

    def released(self, query: Query) -> Query:
        """Whole epochs: a bin that comes later in the epoch is counted as if its turn had come."""
        epoch = query.sampling.schedule.steps_per_epoch
        return replace(query, steps=-(-query.steps // epoch) * epoch)

    def curve(self, query: Query) -> Curve:
        bins, s = self._parameters(query)
        return GaussianCurve(s) if bins == 1 else BinsCurve(bins, s, COARSE if query.coarse else FINE)

    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail:
        """What finite tails add: k participations if the example is there, a strip of any of the t steps if not.

        In the second case the output stays possible through the other b−1 bins, so it costs no more than δ of
        b−1 bins at ``ε + ln(1 − 1/b)`` (and two strips at once, (t·strip)²/2).
        """
        bins, s = self._parameters(query)
        k = query.sampling.participation.first(query.steps).epochs
        strip = lost_mass(1.0 / query.sigma, parameters)
        every = k * bins * strip

        def holds(epsilon: float) -> bool:
            if bins == 1:
                return True
            shifted = epsilon + math.log1p(-1.0 / bins)
            if shifted < 0.0:
                return False
            fewer = gaussian_delta(shifted, s) if bins == 2 else BinsCurve(bins - 1, s, COARSE).delta(shifted)
            return bins * (fewer + every / 2) <= 1.0

        return Tail(min(1.0, k * strip), min(1.0, every), holds)

    @staticmethod
    def _parameters(query: Query) -> tuple[int, float]:
        """Number of bins, and s: every bin counted with ⌈t/b⌉ participations, which is at least what it has."""
        participation = query.sampling.participation.first(query.steps)
        return participation.separation, math.sqrt(participation.epochs) / query.sigma


@dataclass(frozen=True)
class BinsCurve:
    """b bins, log-standard deviation s = √k/σ."""

    bins: int
    s: float
    spacing: float = FINE

    def delta(self, epsilon: float) -> float:
        without = gaussian_delta(epsilon, self.s)  # the bin known: an upper bound too (joint convexity)
        if without <= SMALLEST_DELTA or epsilon > LARGEST_EPSILON or not LEAST_S < self.s < LARGEST_S:
            return without
        return min(without, max(SMALLEST_DELTA, bins_delta(self.bins, self.s, epsilon, self.spacing)))

    def epsilon(self, delta: float) -> float:
        """The smallest ε with δ(ε) ≤ delta, to 1e-6 and from above."""
        return bins_epsilon(self, delta)

    def search(self, delta: float) -> float:
        high = gaussian_epsilon(delta, self.s)
        if delta <= SMALLEST_DELTA or high == 0.0 or high == math.inf or not LEAST_S < self.s < LARGEST_S:
            return high

        def excess(epsilon: float) -> float:
            spent = self.delta(epsilon)
            return math.log(spent / delta) if spent > 0.0 else -math.inf

        low, f_high = high * 0.75, excess(high)
        while (f_low := excess(low)) <= 0.0:
            high, f_high = low, f_low
            if high < 1e-4:
                return high
            low *= 0.5
        return narrow(excess, low, high, f_low, f_high, 1e-6 * high)


@lru_cache(maxsize=256)
def bins_epsilon(curve: BinsCurve, delta: float) -> float:
    """Kept, because every step of one epoch asks for the same."""
    return curve.search(delta)


@lru_cache(maxsize=1024)
def bins_delta(bins: int, s: float, epsilon: float, spacing: float = FINE) -> float:
    """An upper bound on max(remove, add)."""
    remove = remove_delta(bins, s, epsilon, spacing)
    add = jensen_add_delta(bins, s, epsilon)
    if add > remove:
        add = min(add, add_delta(bins, s, epsilon, spacing))
    return min(1.0, max(remove, add))
