"""Means of b independent lognormals: certified upper bounds of their hockey-stick divergences, by convolution.

``r = W/b``, ``W = Σ_i X_i``, X_i lognormal of mean 1 and log-variance s²:

    remove:  δ(ε) = E(r − e^ε)₊        add:  δ(ε) = E(1 − e^ε r)₊

**Why the numbers are upper bounds.** Both integrands are convex in every X_i. Moving the mass of each grid cell
to the cell's two ends, mean preserved, is a mean-preserving spread, so it can only increase an expectation of a
convex function, one X_i after another; the error is of second order in the grid. Remove is summed as
``Σ (p̃ * p^{*(b−1)})(w) · (1 − b e^ε/w)₊``, p̃(x) = x·p(x): all terms lie in [0, 1], where summing
``(w/b − e^ε)₊`` would multiply the rounding errors by e^ε. A term for every approximation is added:
the mass above and below the grid (in closed form), what the circular convolution folds over (Chernoff; folded mass only
ever adds), and the rounding of the FFT (``ulp · b · log n · √n · ‖p‖₂``, far above what is observed).
Add is bounded in closed form by Jensen's inequality, ``r ≥ exp(mean_i log X_i)``, or by the same convolution.
One convolution serves several ε: nothing but the last sum depends on it.
"""

from __future__ import annotations

import math

import numpy as np

LARGEST_GRID = 1 << 22
NEGLIGIBLE = 32.0  # −ln of what is left outside the window


def jensen_add_delta(bins: int, s: float, epsilon: float) -> float:
    """The add direction in closed form: ``r ≥ exp(Y)``, Y = mean_i log X_i ~ N(−s²/2, s²/b)."""
    from scipy.special import log_ndtr, ndtr

    h, v = s * s / 2, s * s / bins
    root = math.sqrt(v)
    second = math.exp(min(700.0, epsilon - h + v / 2 + float(log_ndtr((h - epsilon - v) / root))))
    return min(1.0, max(0.0, float(ndtr((h - epsilon) / root)) - second))


def remove_delta(bins: int, s: float, epsilon: float, spacing: float) -> float:
    """``E(r − e^ε)₊``, from above; `spacing` in units of (threshold − mean)/√b, or of s."""
    return float(remove_deltas(bins, s, np.array([epsilon]), spacing)[0])


def remove_deltas(bins: int, s: float, epsilons: np.ndarray, spacing: float) -> np.ndarray:
    """The same for several ε (increasing), on the one grid that suits the first of them."""
    thresholds = bins * np.exp(epsilons)
    least, largest = float(thresholds[0]), float(thresholds[-1])
    # Above `top` each X is counted alone: exactly, since the integrand is linear there, but for two large X at once,
    # which are counted twice. So top is where that is rare, or where nothing is left at all.
    top, end = 1.001 * largest, math.exp(min(700.0, s * s / 2 + 8.0 * s))
    while top < 64.0 * largest and bins * _above(top, s)[0] > 1e-3:
        top *= 2.0
    top = min(top, end)
    bottom = _bottom(s, top)
    h = _spacing(bins, s, least - bins, top - bottom, spacing)
    p = _spread(s, h, math.ceil((top - bottom) / h), bottom)
    p[0] += _below(bottom, s)  # raising X only increases the integrand
    top = bottom + (len(p) - 1) * h
    biased = p * (bottom + np.arange(len(p)) * h)
    above, above_biased = _above(top, s)
    beyond = above_biased + (bins - 1) * above - np.where(top >= thresholds, thresholds * above, 0.0)
    low, mass, extra = _convolve(p, biased, bins - 1, h)
    w = bins * bottom + (low + np.arange(len(mass))) * h
    inside = np.zeros(len(thresholds))
    for i, threshold in enumerate(thresholds):
        first = int(np.searchsorted(w, threshold, side="right"))
        inside[i] = _dot(mass[first:], 1.0 - threshold / w[first:])
    return np.minimum(1.0, np.maximum(0.0, inside) + np.maximum(0.0, beyond) + extra)


def add_delta(bins: int, s: float, epsilon: float, spacing: float) -> float:
    """``E(1 − e^ε r)₊``, from above."""
    return float(add_deltas(bins, s, np.array([epsilon]), spacing)[0])


def add_deltas(bins: int, s: float, epsilons: np.ndarray, spacing: float) -> np.ndarray:
    """The same for several ε (increasing), on one grid; X beyond the largest threshold contributes nothing."""
    thresholds = bins * np.exp(-epsilons)
    largest = float(thresholds[0])
    top = min(1.001 * largest, math.exp(min(700.0, -s * s / 2 + 9.0 * s)))
    bottom = _bottom(s, top)
    h = _spacing(bins, s, bins - largest, top - bottom, spacing)
    p = _spread(s, h, math.ceil((top - bottom) / h), bottom)
    top = bottom + (len(p) - 1) * h
    if top < largest:
        p[-1] += _above(top, s)[0]  # lowering X only increases the integrand
    low, mass, extra = _convolve(p, p, bins - 1, h)
    extra += bins * _below(bottom, s)  # any X below the grid: the integrand is at most 1
    w = bins * bottom + (low + np.arange(len(mass))) * h
    inside = np.zeros(len(thresholds))
    for i, threshold in enumerate(thresholds):
        last = int(np.searchsorted(w, threshold))
        inside[i] = _dot(mass[:last], 1.0 - w[:last] / threshold)
    return np.minimum(1.0, np.maximum(0.0, inside) + extra)


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


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """a·b without BLAS, whose threads wait for each other where other work has the cores."""
    return float((a * b).sum())


def _convolve(p: np.ndarray, first: np.ndarray, times: int, h: float) -> tuple[int, np.ndarray, float]:
    """``first * p^{*times}`` by index on a window (its first, the masses), and a bound on what this leaves out."""
    from scipy import fft

    x = np.arange(len(p)) * h
    top = x[-1]
    deviation = math.sqrt(max(_dot(p, np.square(x)), h * h) * max(times, 1))
    thetas = np.concatenate([np.geomspace(0.3, 100.0, 12) / top, np.geomspace(0.3, 20.0, 12) / deviation])
    thetas = thetas[thetas * top < 600.0]

    def log_moment(theta: float) -> float:
        weight = np.exp(theta * x)
        return math.log(max(_dot(first, weight), 1e-300)) + times * math.log(_dot(p, weight))

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
