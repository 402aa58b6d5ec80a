"""From an average of samples to a bound that holds: the empirical Bernstein inequality.

For n independent samples of one law in [0, R] with mean μ, unbiased sample variance V (divisor n − 1), with probability
1 − β

    μ ≤ mean + √(2V ln(2/β)/n) + 7R ln(2/β)/(3(n − 1))          (Maurer & Pontil 2009, Theorem 4)

R has to be a bound that is known, not one that was seen: at too little noise an importance sampler may not see one
sample of those that make up the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Of [0, R], as an error of μ: numbers made from 53 bits, sums of b terms in floating point. Far more than there is.
ROUNDING = 1e-10


@dataclass(frozen=True)
class Moments:
    """Mean and variance of samples divided by their largest possible value, which is ``exp(log_largest)``."""

    mean: float
    variance: float
    log_largest: float
    count: int

    def bound(self, beta: float, count: int | None = None) -> float:
        """The bound at confidence 1 − β, capped at 1; or, to plan with, what it would be with `count` samples."""
        return self._unscaled(self.mean + self._margin(beta, self.count if count is None else count))

    def log_margin(self, beta: float, count: int) -> float:
        """The logarithm of (bound − average), without the cap."""
        return math.log(self._margin(beta, count)) + self.log_largest

    @property
    def estimate(self) -> float:
        """The plain average. Never reported."""
        return self._unscaled(self.mean)

    @property
    def error(self) -> float:
        """The relative standard error of the average."""
        return math.sqrt(self.variance / self.count) / self.mean if self.mean > 0.0 else math.inf

    def _margin(self, beta: float, n: int) -> float:
        level = math.log(2.0 / beta)
        return math.sqrt(2.0 * self.variance * level / n) + 7.0 * level / (3.0 * (n - 1)) + ROUNDING

    def _unscaled(self, value: float) -> float:
        if value <= 0.0:
            return 0.0
        return math.exp(min(0.0, math.log(value) + self.log_largest))


def moments(samples: np.ndarray, log_largest: float) -> Moments:
    """Of samples that are already divided by ``exp(log_largest)``; rounding may have taken one above 1.

    >>> round(moments(np.array([0.0, 1.0] * 50_000), 0.0).bound(1e-9), 3)
    0.511
    """
    count = len(samples)
    mean = float(samples.mean())
    variance = max(0.0, float(np.square(samples).sum()) - count * mean * mean) / (count - 1)
    return Moments(mean, variance, log_largest, count)
