"""The Gaussian mechanism, exactly (Balle & Wang 2018, Theorem 8), and fixed order through it.

A sum that one example moves by at most μ standard deviations is (ε, δ)-DP exactly for

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).

Adaptive steps compose into one such mechanism with μ = sens(C)/σ, whatever C, because the
sensitivity bounds ‖C(G − G')‖ for adaptively chosen contributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..sampling import FixedOrder, Sampling
from ..strategies import Strategy
from .base import Accountant, Curve, Query, Tail
from .tails import lost_mass

ROUNDING = 1e-12  # relative; added so that rounding errors never make an answer too small


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε) of a shift of μ standard deviations.

    >>> f"{gaussian_delta(8.0, 1 / 0.60023):.3e}"
    '1.000e-05'
    """
    from scipy.special import erfcx, ndtr

    if mu <= 0.0:
        return 0.0
    if not mu < math.inf:  # what is not a number bounds nothing
        return 1.0
    # With a² − b² = −2ε both terms carry φ(a); erfcx keeps them apart from underflow and cancellation.
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    weight = 0.5 * math.exp(-a * a / 2)
    second = weight * float(erfcx(-b / math.sqrt(2)))
    first = float(ndtr(a)) if a > 0 else weight * float(erfcx(-a / math.sqrt(2)))
    return min(1.0, max(0.0, first - second))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ delta (rounded up).

    >>> round(gaussian_epsilon(1e-5, 1 / 0.60023), 3)
    8.0
    """
    if not mu < math.inf:
        return math.inf
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the classical bound: enough
    while high - low > ROUNDING * max(1e-3, high) / 4:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if gaussian_delta(middle, mu) <= delta else (middle, high)
    return high


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The analytic Gaussian noise multiplier σ(ε, δ) at sensitivity 1 (rounded up).

    >>> round(gaussian_sigma(8.0, 1e-5), 5)
    0.60023
    """
    low, high = 1e-12, 1.0
    while gaussian_delta(epsilon, high) <= delta:
        low, high = high, high * 2  # in μ: low is enough noise, high is not
    while high - low > ROUNDING * low / 4:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if gaussian_delta(epsilon, middle) <= delta else (low, middle)
    return 1.0 / low


@dataclass(frozen=True)
class GaussianCurve:
    """δ(ε) of a shift of `mu` standard deviations."""

    mu: float

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(epsilon, self.mu)

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(delta, self.mu)


class FixedOrderGaussian(Accountant):
    """Fixed order × any C: exact, no amplification, zero-out adjacency."""

    name = "gaussian"
    title = "analytic Gaussian (exact)"

    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        if isinstance(sampling, FixedOrder):
            return None
        return f"the 'gaussian' accountant needs sampling='fixed-order', not {sampling.name!r}"

    def curve(self, query: Query) -> Curve:
        return GaussianCurve(self._shift(query))

    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail:
        if query.strategy.is_identity:  # no step moves by more than 1/σ, and at most k move
            k = query.sampling.participation.first(query.steps).epochs
            term = k * lost_mass(1.0 / query.sigma, parameters)
        else:
            term = lost_mass(self._shift(query), query.steps * parameters)
        return Tail(term, term, lambda epsilon: True)

    @staticmethod
    def _shift(query: Query) -> float:
        return query.strategy.sensitivity(query.sampling.participation.first(query.steps)) / query.sigma
