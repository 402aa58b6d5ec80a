"""C = I: independent noise at every step, DP-SGD (Abadi et al. 2016)."""

from __future__ import annotations

import math

import numpy as np

from ..budget import Participation
from .base import Strategy
from .sensitivity import Sensitivity
from .workload import PREFIX_SUM, Workload


class Identity(Strategy):
    """Independent noise.

    >>> Identity(100).sensitivity(Participation(steps=100, epochs=4, separation=25))
    2.0
    """

    is_identity = True
    bands = 1

    def __init__(self, steps: int, name: str = "identity") -> None:
        super().__init__(name, steps)

    def dense(self) -> np.ndarray:
        return np.eye(self.steps)

    def inverse(self) -> np.ndarray:
        return np.eye(self.steps)

    def terms(self, step: int) -> list[tuple[int, float]]:
        self.check_step(step)
        return [(step, 1.0)]

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        """√k: the steps are orthogonal."""
        self._check(participation)
        k = min(participation.epochs, -(-participation.steps // participation.separation))
        return Sensitivity(math.sqrt(k), True, "orthogonal steps")

    def multiply(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, dtype=np.float64)

    def solve(self, z: np.ndarray) -> np.ndarray:
        return self.multiply(z)

    def solve_transposed(self, z: np.ndarray) -> np.ndarray:
        return self.multiply(z)

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        if workload.is_prefix_sum:
            return np.arange(1.0, self.steps + 1)
        if workload.is_toeplitz:
            return np.asarray(workload.rates(1)[0] ** 2 * np.cumsum(np.square(workload.coefficients(self.steps))))
        return super().error_rows(workload)
