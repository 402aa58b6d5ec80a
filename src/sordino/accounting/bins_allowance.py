"""How δ is divided under balls in bins: the noise's finite reach, the failure probability, and what is left for bounds.

β = min(1e-9, δ/1000) is inside δ: the bounds get δ − β. Closed forms do not fail and get all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .bins_gram import BinsGram
from .bins_tails import BinsTail, bins_tail
from .tails import log_kept

ATTEMPTS = 4  # certifications that a calibration may need; each has the level β/ATTEMPTS
FAILURE, SHARE = 1e-9, 1e-3


def failure_probability(delta: float) -> float:
    """β."""
    return min(FAILURE, SHARE * delta)


@dataclass(frozen=True)
class Allowance:
    """What of δ is left for the bounds: δ·P(A) − β − the direction's tail term."""

    delta: float
    beta: float
    kept: float = 1.0  # P(A)
    tail: BinsTail | None = None

    @property
    def level(self) -> float:
        return self.beta / ATTEMPTS

    @property
    def exact(self) -> Allowance:
        """For closed forms."""
        return replace(self, beta=0.0)

    def remove(self) -> float:
        return self.delta * self.kept - self.beta - (self.tail.remove if self.tail else 0.0)

    def add(self, epsilon: float) -> float:
        return self.delta * self.kept - self.beta - (self.tail.add(epsilon) if self.tail else 0.0)

    def total(self, epsilon: float, remove: float, add: float) -> float:
        """δ with everything in it, of these two bounds."""
        if self.tail:
            remove, add = remove + self.tail.remove, add + self.tail.add(epsilon)
        return min(1.0, (max(remove, add) + self.beta) / self.kept) if self.kept > 0.0 else 1.0


def allowance_of(gram: BinsGram, sigma: float, delta: float, parameters: int | None) -> Allowance:
    beta = failure_probability(delta)
    if not parameters:
        return Allowance(delta, beta)
    kept = math.exp(log_kept(gram.steps, parameters))
    return Allowance(delta, beta, kept, bins_tail(gram, sigma, parameters))
