"""The part of a spectrum that is not computed: a power law on the log-log scale, fitted to the top (NoiseCurve Eq. 4).

``log μ_i = c·[log(p₊/i)]^α + log μ_{p₊}`` for i ≤ p₊, and 0 beyond. p₊ is the number of eigenvalues of at least
μ_{p₊}; c and α are fitted to the k computed ones by least squares in log μ. The fit should bound the tail from above;
whether it bounds the tail of what was computed (i > k/2) is checked, and `upper=True` makes it so: c is then the
smallest that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SordinoError

FEWEST = 8  # eigenvalues for two parameters


@dataclass(frozen=True)
class Tail:
    """Eq. 4 with its numbers.

    >>> tail = Tail(c=2.0, alpha=1.0, last=100, smallest=1e-6)
    >>> float(tail(100)), round(float(tail(10)), 12)
    (1e-06, 0.0001)
    """

    c: float
    alpha: float
    last: int  # p₊
    smallest: float  # μ_{p₊}
    fitted: int = 0  # k
    violation: float = 0.0  # by how much, relative, a computed eigenvalue beyond k/2 exceeds the curve
    error: float = 0.0  # root mean square of log μ_i against the curve

    def __call__(self, i: Any) -> np.ndarray:
        i = np.asarray(i, dtype=np.float64)
        inside = np.maximum(np.log(self.last / i), 0.0)
        return np.where(i <= self.last, self.smallest * np.exp(self.c * inside**self.alpha), 0.0)

    def after(self, computed: np.ndarray) -> np.ndarray:
        """The eigenvalues from k+1 to p₊, none above the last one computed."""
        return np.minimum(self(np.arange(len(computed) + 1, self.last + 1)), computed[-1])

    def bounds(self) -> bool:
        """Whether the curve bounds the computed part of the tail from above."""
        return self.violation <= 1e-12


def fit_tail(values: np.ndarray, last: int, smallest: float = 1e-6, upper: bool = False) -> Tail:
    """Fit c and α to the k largest eigenvalues `values`, largest first."""
    from scipy.optimize import minimize_scalar

    values = np.asarray(values, dtype=np.float64)
    k = len(values)
    if not 0 < smallest < math.inf:
        raise SordinoError(
            f"smallest={smallest!r}, the tail's last eigenvalue, must be a positive number; 1e-6 is usual"
        )
    if k < FEWEST:
        raise SordinoError(f"a tail is fitted to at least {FEWEST} eigenvalues, and {k} were computed; ask for more")
    if last <= k:
        raise SordinoError(
            f"p₊={last} is not beyond the {k} eigenvalues that were computed: there is no tail to fit; pass tail='none'"
        )
    if values[-1] <= smallest:
        raise SordinoError(
            f"the smallest computed eigenvalue, {values[-1]:.3g}, is not above the tail's last, {smallest:g}; compute "
            "fewer (top=...), or choose smallest= below it"
        )
    heights = np.log(values / smallest)  # positive
    inside = np.log(last / np.arange(1, k + 1))  # positive
    held = np.arange(1, k + 1) > k / 2

    def best(alpha: float) -> float:
        powers = inside**alpha
        c = float(powers @ heights / (powers @ powers))
        return max(c, float((heights[held] / powers[held]).max())) if upper else c

    def loss(log_alpha: float) -> float:
        alpha = math.exp(log_alpha)
        return float(np.square(best(alpha) * inside**alpha - heights).mean())

    starts = np.linspace(math.log(0.02), math.log(20), 41)
    middle = int(np.argmin([loss(a) for a in starts]))
    around = (starts[max(0, middle - 1)], starts[min(len(starts) - 1, middle + 1)])
    found = minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-10})
    alpha = math.exp(float(found.x))
    c = best(alpha)
    excess = float((heights - c * inside**alpha)[held].max())
    return Tail(c, alpha, int(last), smallest, k, math.expm1(max(0.0, excess)), math.sqrt(loss(float(found.x))))
