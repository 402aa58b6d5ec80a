"""Balls in bins with independent noise: a certified upper bound by convolution.

One example is in one of b bins, uniformly, and takes part k times there; each bin's steps are
disjoint. Against the run without it the likelihood ratio is ``r = W/b``, ``W = Σ_i X_i``, where without the
example the X_i are independent lognormals of mean 1 and log-variance ``s² = k/σ²``, and

    remove:  δ(ε) = E(r − e^ε)₊        add:  δ(ε) = E(1 − e^ε r)₊

(adaptively chosen contributions change nothing: both are expectations of convex functions of r, and the
conditional means of r's terms are orthogonal across bins whatever the history).

**Why the number is an upper bound.** Both integrands are convex in every X_i. Moving the mass of each grid cell
to the cell's two ends, mean preserved, is a mean-preserving spread, so it can only increase an expectation of a
convex function, one X_i after another; the error is of second order in the grid. Remove is summed as
``Σ (p̃ * p^{*(b−1)})(w) · (1 − b e^ε/w)₊``, p̃(x) = x·p(x): all terms lie in [0, 1], where summing
``(w/b − e^ε)₊`` would multiply the rounding errors by e^ε. A term for every approximation is added:
the mass above and below the grid (in closed form), what the circular convolution folds over (Chernoff; folded mass only
ever adds), and the rounding of the FFT (``ulp · b · log n · √n · ‖p‖₂``, far above what is observed).
Add is bounded in closed form by Jensen's inequality, ``r ≥ exp(mean_i log X_i)``, or by the same convolution.

With C ≠ I the terms of different bins are not independent; no accountant for that is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..sampling import BallsInBins, Sampling
from ..strategies import Strategy
from .base import Accountant, Curve, Query, Tail
from .gaussian import GaussianCurve, gaussian_delta, gaussian_epsilon
from .search import narrow
from .tails import lost_mass

FINE, COARSE = 0.0015, 0.006  # grid spacing, in units of (threshold − mean)/√b, or of s
LARGEST_GRID = 1 << 22
NEGLIGIBLE = 32.0  # −ln of what is left outside the window
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
            return (
                f"sampling='balls-in-bins' with noise={strategy.name!r}: no accountant yet for balls-in-bins with "
                "correlated noise; use sampling='fixed-order', or noise='identity'"
            )
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


def jensen_add_delta(bins: int, s: float, epsilon: float) -> float:
    """The add direction in closed form: ``r ≥ exp(Y)``, Y = mean_i log X_i ~ N(−s²/2, s²/b)."""
    from scipy.special import log_ndtr, ndtr

    h, v = s * s / 2, s * s / bins
    root = math.sqrt(v)
    second = math.exp(min(700.0, epsilon - h + v / 2 + float(log_ndtr((h - epsilon - v) / root))))
    return min(1.0, max(0.0, float(ndtr((h - epsilon) / root)) - second))


def remove_delta(bins: int, s: float, epsilon: float, spacing: float = FINE) -> float:
    """``E(r − e^ε)₊``, from above."""
    threshold = bins * math.exp(epsilon)
    # Above `top` each X is counted alone: exactly, since the integrand is linear there, but for two large X at once,
    # which are counted twice. So top is where that is rare, or where nothing is left at all.
    top, end = 1.001 * threshold, math.exp(min(700.0, s * s / 2 + 8.0 * s))
    while top < 64.0 * threshold and bins * _above(top, s)[0] > 1e-3:
        top *= 2.0
    top = min(top, end)
    bottom = _bottom(s, top)
    h = _spacing(bins, s, threshold - bins, top - bottom, spacing)
    p = _spread(s, h, math.ceil((top - bottom) / h), bottom)
    p[0] += _below(bottom, s)  # raising X only increases the integrand
    top = bottom + (len(p) - 1) * h
    biased = p * (bottom + np.arange(len(p)) * h)
    above, above_biased = _above(top, s)
    beyond = above_biased + (bins - 1) * above - (threshold * above if top >= threshold else 0.0)
    low, mass, extra = _convolve(p, biased, bins - 1, h)
    w = bins * bottom + (low + np.arange(len(mass))) * h
    gain = np.zeros_like(w)
    np.divide(threshold, w, out=gain, where=w > threshold)
    inside = float(mass @ np.where(w > threshold, 1.0 - gain, 0.0))
    return min(1.0, max(0.0, inside) + max(0.0, beyond) + extra)


def add_delta(bins: int, s: float, epsilon: float, spacing: float = FINE) -> float:
    """``E(1 − e^ε r)₊``, from above; X beyond the threshold contributes nothing."""
    threshold = bins * math.exp(-epsilon)
    top = min(1.001 * threshold, math.exp(min(700.0, -s * s / 2 + 9.0 * s)))
    bottom = _bottom(s, top)
    h = _spacing(bins, s, bins - threshold, top - bottom, spacing)
    p = _spread(s, h, math.ceil((top - bottom) / h), bottom)
    top = bottom + (len(p) - 1) * h
    if top < threshold:
        p[-1] += _above(top, s)[0]  # lowering X only increases the integrand
    low, mass, extra = _convolve(p, p, bins - 1, h)
    extra += bins * _below(bottom, s)  # any X below the grid: the integrand is at most 1
    w = bins * bottom + (low + np.arange(len(mass))) * h
    inside = float(mass @ np.maximum(0.0, 1.0 - w / threshold))
    return min(1.0, max(0.0, inside) + extra)


def _spacing(bins: int, s: float, distance: float, width: float, spacing: float) -> float:
    """h, so that spreading adds little to the variance of W compared with (threshold − mean)², or with its own."""
    return max(spacing * max(distance / math.sqrt(bins), min(1.0, s)), width * 4 / LARGEST_GRID)


def _bottom(s: float, top: float) -> float:
    """Where the grid starts: next to nothing lies below (Φ(−9)), and for small s that is nearly all of [0, 1]."""
    bottom = math.exp(-s * s / 2 - 9.0 * s)
    return bottom if bottom < top else top / 2


def _below(bottom: float, s: float) -> float:
    """P(X < bottom)."""
    from scipy.special import ndtr

    return float(ndtr(math.log(bottom) / s + s / 2)) if bottom > 0.0 else 0.0


def _spread(s: float, h: float, cells: int, bottom: float = 0.0) -> np.ndarray:
    """The lognormal of mean 1 on ``bottom + [0, cells·h]``, each cell's mass moved to its ends, the mean preserved."""
    from scipy.special import ndtr

    with np.errstate(divide="ignore"):
        z = np.log(bottom + np.arange(cells + 1) * h) / s + s / 2

    def masses(z: np.ndarray) -> np.ndarray:  # differences on the side where they do not cancel
        return np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))

    mass, first = masses(z), masses(z - s)  # ∫ dP and ∫ x dP over each cell
    upper = np.clip((first - bottom * mass) / h - np.arange(cells) * mass, 0.0, mass)
    p = np.zeros(cells + 1)
    p[1:] += upper
    p[:-1] += mass - upper
    return p


def _above(top: float, s: float) -> tuple[float, float]:
    """P(X > top) and E(X; X > top)."""
    from scipy.special import ndtr

    z = math.log(top) / s + s / 2
    return float(ndtr(-z)), float(ndtr(s - z))


def _convolve(p: np.ndarray, first: np.ndarray, times: int, h: float) -> tuple[int, np.ndarray, float]:
    """``first * p^{*times}`` by index on a window (its first, the masses), and a bound on what this leaves out."""
    from scipy import fft

    x = np.arange(len(p)) * h
    top = x[-1]
    deviation = math.sqrt(max(float(p @ np.square(x)), h * h) * max(times, 1))
    thetas = np.concatenate([np.geomspace(0.3, 100.0, 12) / top, np.geomspace(0.3, 20.0, 12) / deviation])
    thetas = thetas[thetas * top < 600.0]

    def log_moment(theta: float) -> float:
        weight = np.exp(theta * x)
        return math.log(max(float(first @ weight), 1e-300)) + times * math.log(float(p @ weight))

    # Chernoff: ln P(W > w) ≤ log_moment(θ) − θw, and the same below with −θ.
    end = min((log_moment(theta) + NEGLIGIBLE) / theta for theta in thetas)
    start = max(-(log_moment(-theta) + NEGLIGIBLE) / theta for theta in thetas)
    low = max(0, math.floor(start / h))
    wanted = min(math.ceil(end / h), (len(p) - 1) * (times + 1)) - low + 2
    n = fft.next_fast_len(max(wanted, len(p), 16), real=True)
    spectrum = fft.rfft(p, n)
    total = fft.rfft(first, n) * spectrum**times
    mass = np.roll(fft.irfft(total, n), -(low % n))
    rounding = np.finfo(float).eps * (times + 1) * math.log2(n) * math.sqrt(n)
    rounding *= min(float(np.linalg.norm(p)), float(np.linalg.norm(first)))
    return low, mass, 2 * math.exp(-NEGLIGIBLE) + float(rounding)
