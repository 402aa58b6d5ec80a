"""Balls in bins with any Gram matrix G: upper bounds of δ in closed form, with nothing random in them.

With ``r = dP/dQ = mean_i exp(y_i/σ² − G_ii/2σ²)``, y ~ N(0, σ²G) without the example,

    remove:  δ(ε) = E(r − e^ε)₊        add:  δ(ε) = E(1 − e^ε r)₊.

* The bin known (both directions): by joint convexity at most the Gaussian mechanism with the longest mean.
* Remove, any whole s ≥ 1: ``(r − e^ε)₊ ≤ r^{s+1} · e^{−sε} s^s/(s+1)^{s+1}``, and by Hölder's inequality ``E r^{s+1} ≤
  Π_{j=1..s} max_l mean_i exp(j·G_il/σ²)``. The product of the two is also the largest value a sample of the tuple
  sampler can have.
* Add: Jensen's inequality, ``r ≥ exp(Y)``, Y = mean_i log r_i ~ N(−h, v), ``h = mean_i G_ii/2σ²``, ``v = mean_ij
  G_ij/σ²``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from .gaussian import gaussian_delta, gaussian_epsilon
from .search import narrow

LARGEST_ORDER = 64
LARGEST_EXPONENT = 600.0  # of e, in products of s+1 factors exp(G/σ²)


class BinsBounds:
    """The closed forms at one noise multiplier. Satisfies the contract of a `Curve`."""

    def __init__(self, gram: np.ndarray, sigma: float) -> None:
        with np.errstate(over="ignore", divide="ignore"):
            self.scaled = gram / sigma / sigma
        self.shift = math.sqrt(float(gram.max())) / sigma if sigma > 0.0 else math.inf

    @property
    def bins(self) -> int:
        return len(self.scaled)

    @cached_property
    def h(self) -> float:
        return float(np.trace(self.scaled)) / len(self.scaled) / 2.0

    @cached_property
    def v(self) -> float:
        return float(self.scaled.mean())

    @cached_property
    def log_moments(self) -> np.ndarray:
        """``Σ_{j≤s} log max_l mean_i exp(j·G_il/σ²)`` for s = 0, 1, …, as far as floating point goes."""
        largest = float(self.scaled.max())
        orders = LARGEST_ORDER if largest <= 0.0 else int(min(LARGEST_EXPONENT / largest - 1.0, LARGEST_ORDER))
        if orders < 1:
            return np.zeros(1)
        base = np.exp(self.scaled - largest)
        power, terms = np.ones_like(base), [0.0]
        for j in range(1, orders + 1):
            power *= base
            terms.append(j * largest + math.log(float(power.mean(axis=0).max())))
        return np.cumsum(terms)

    @property
    def orders(self) -> int:
        """The largest s."""
        return len(self.log_moments) - 1

    def log_largest(self, order: int, epsilon: float) -> float:
        """log R: of the remove bound of order s, and of the tuple sampler's largest value (s = 0: r/r = 1)."""
        if order == 0:
            return 0.0
        entropy = order * math.log(order) - (order + 1) * math.log(order + 1)
        return float(self.log_moments[order]) - order * epsilon + entropy

    def known(self, epsilon: float) -> float:
        return gaussian_delta(epsilon, self.shift)

    def remove(self, epsilon: float) -> float:
        best = min((self.log_largest(s, epsilon) for s in range(self.orders + 1)), default=0.0)
        return min(self.known(epsilon), math.exp(min(0.0, best)))

    def add(self, epsilon: float) -> float:
        return min(self.known(epsilon), jensen_add(self.h, self.v, epsilon))

    def delta(self, epsilon: float) -> float:
        known = self.known(epsilon)
        return min(known, max(self.remove(epsilon), self.add(epsilon))) if 0.0 < known < 1.0 else known

    def epsilon(self, delta: float) -> float:
        """The smallest ε with δ(ε) ≤ delta, from above."""
        high = gaussian_epsilon(delta, self.shift) if delta < 1.0 else 0.0
        if high in (0.0, math.inf) or self.orders == 0:
            return high

        def excess(epsilon: float) -> float:
            spent = self.delta(epsilon)
            return math.log(spent / delta) if spent > 0.0 else -math.inf

        return least_epsilon(excess, high)


def least_epsilon(excess: Callable[[float], float], high: float, tolerance: float = 1e-6) -> float:
    """The smallest ε ≤ high with excess(ε) ≤ 0, from above in every sense: high is taken to be enough."""
    f_high = excess(high)
    if f_high > 0.0:
        return high
    low = 0.8 * high
    while (f_low := excess(low)) <= 0.0:
        high, f_high = low, f_low
        if low == 0.0:
            return 0.0
        low = 0.8 * low if low > 1e-4 else 0.0
    return narrow(excess, low, high, f_low, f_high, tolerance * high)


def jensen_add(h: float, v: float, epsilon: float) -> float:
    """``E(1 − e^{ε+Y})₊`` for Y ~ N(−h, v): ``Φ((h−ε)/√v) − e^{ε−h+v/2} Φ((h−ε−v)/√v)``."""
    from scipy.special import erfcx, ndtr

    if v <= 0.0:
        return max(0.0, -math.expm1(min(0.0, epsilon - h)))
    if not math.isfinite(h) or not math.isfinite(v):
        return 1.0
    # As in the Gaussian mechanism: a² − b² = 2(ε−h)+v, so both terms carry φ(a).
    root = math.sqrt(v)
    a, b = (h - epsilon) / root, (h - epsilon - v) / root
    weight = 0.5 * math.exp(-a * a / 2)
    second = math.exp(epsilon - h + v / 2) * float(ndtr(b)) if b > 0.0 else weight * float(erfcx(-b / math.sqrt(2)))
    first = float(ndtr(a)) if a > 0.0 else weight * float(erfcx(-a / math.sqrt(2)))
    return min(1.0, max(0.0, first - second))
