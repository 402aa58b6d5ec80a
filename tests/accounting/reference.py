"""Slow, independent answers to compare the accountants with."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr


def panels(low: float, high: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss–Legendre of order 20 on `count` equal panels."""
    x, w = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(low, high, count + 1)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()


def normal_nodes(count: int = 75, reach: float = 14.0) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for E f(Z), Z standard normal."""
    x, w = panels(-reach, reach, count)
    return x, w * np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


def subsampled_delta(q: float, sigma: float, epsilon: float) -> tuple[float, float]:
    """One step of the Poisson-subsampled Gaussian, (remove, add), in closed form."""
    mu = 1.0 / sigma

    def hockey(log_factor: float) -> float:  # E(p_μ − e^x p_0)₊
        return float(ndtr(mu / 2 - log_factor / mu) - math.exp(log_factor) * ndtr(-mu / 2 - log_factor / mu))

    # remove: (1−q)p_0 + q p_μ against p_0
    remove = q * hockey(math.log((math.exp(epsilon) - 1 + q) / q))
    # add: p_0 against the mixture; positive where p_μ/p_0 < c
    c = (math.exp(-epsilon) - 1 + q) / q
    add = 0.0
    if c > 0:
        at = math.log(c) / mu + mu / 2
        add = float((1 - math.exp(epsilon) * (1 - q)) * ndtr(at) - math.exp(epsilon) * q * ndtr(at - mu))
    return remove, add


def two_steps_delta(q: float, sigma: float, epsilon: float) -> tuple[float, float]:
    """Two steps, by two-dimensional quadrature over the run without the example."""
    z, w = normal_nodes()
    ratio = (1 - q) + q * np.exp(z / sigma - 0.5 / sigma**2)
    r = ratio[:, None] * ratio[None, :]
    weights = w[:, None] * w[None, :]
    e = math.exp(epsilon)
    return float((weights * np.maximum(r - e, 0)).sum()), float((weights * np.maximum(1 - e * r, 0)).sum())


def two_bins_delta(s: float, epsilon: float) -> tuple[float, float]:
    """Balls in two bins: the inner expectation in closed form (Black–Scholes), the outer one split at its kink."""

    def expect(strike: float, put: bool) -> float:  # E(±(X1 + X2 − strike))₊ / 2
        kink = math.log(strike) / s + s / 2
        total = 0.0
        for low, high in ((-14.0, kink), (kink, max(14.0 + s, kink + 14.0))):
            # more nodes towards the kink, where the inner expectation changes quickly
            t, w = panels(0.0, 1.0, 200)
            u = 1 - (1 - t) ** 3 if high == kink else t**3
            du = 3 * (1 - t) ** 2 if high == kink else 3 * t**2
            z = low + (high - low) * u
            weight = w * du * (high - low) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
            x2 = np.exp(s * z - s * s / 2)
            left = strike - x2
            safe = np.maximum(left, 1e-300)
            d = np.log(safe) / s + s / 2
            call = np.where(left > 0, ndtr(s - d) - safe * ndtr(-d), 1.0 - left)
            value = np.where(left > 0, call + left - 1.0, 0.0) if put else call  # parity
            total += float(weight @ value)
        return total / 2

    return expect(2 * math.exp(epsilon), False), math.exp(epsilon) * expect(2 * math.exp(-epsilon), True)


def bins_monte_carlo(
    bins: int, s: float, epsilon: float, samples: int, seed: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Plain averages with their standard errors, (remove, add); remove under the run with the example."""
    rng = np.random.default_rng(seed)
    x = np.exp(s * rng.normal(size=(samples, bins)) - s * s / 2)
    without = x.mean(axis=1)
    x[:, 0] *= math.exp(s * s)
    with_it = x.mean(axis=1)
    remove = np.maximum(0, 1 - math.exp(epsilon) / with_it)
    add = np.maximum(0, 1 - math.exp(epsilon) * without)
    root = math.sqrt(samples)
    return (float(remove.mean()), float(remove.std() / root)), (float(add.mean()), float(add.std() / root))


def two_correlated_bins_delta(scaled: np.ndarray, epsilon: float) -> tuple[float, float]:
    """Balls in two bins with G/σ² = `scaled`, (remove, add).

    The outer integral over log r_1; given it, log r_2 is normal, and the inner expectation is Black and Scholes'.
    """
    (a, c), (_, b) = scaled
    a, b, c = float(a), float(b), float(c)
    rest = math.sqrt(max(1e-18, b - c * c / a))  # of log r_2, given log r_1

    def expect(strike: float, put: bool) -> float:  # E(±(r_1 + r_2 − strike))₊ / 2
        kink = (math.log(strike) + a / 2) / math.sqrt(a)
        reach = 14.0 + math.sqrt(max(a, b)) * 2
        total = 0.0
        for low, high in ((-reach, kink), (kink, max(reach, kink + reach))):
            if low >= high:
                continue
            t, w = panels(0.0, 1.0, 300)
            u = 1 - (1 - t) ** 3 if high == kink else t**3
            du = 3 * (1 - t) ** 2 if high == kink else 3 * t**2
            z = low + (high - low) * u
            weight = w * du * (high - low) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
            first = np.exp(math.sqrt(a) * z - a / 2)
            centre = np.exp(c / math.sqrt(a) * z - c * c / a / 2)  # E(r_2 | z)
            left = strike - first
            safe = np.maximum(left, 1e-300)
            d = np.log(np.maximum(safe / centre, 1e-300)) / rest + rest / 2
            call = np.where(left > 0, centre * ndtr(rest - d) - safe * ndtr(-d), centre - left)
            value = np.where(left > 0, safe * ndtr(d) - centre * ndtr(d - rest), 0.0) if put else call
            total += float(weight @ value)
        return total / 2

    return expect(2 * math.exp(epsilon), False), math.exp(epsilon) * expect(2 * math.exp(-epsilon), True)
