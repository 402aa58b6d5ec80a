"""The contract of a strategy: a lower-triangular T×T matrix C whose inverse shapes the noise.

Step t adds ``ζ·σ·(C⁻¹Z)_t`` to the clipped sum. Whoever implements a strategy says
what C is (`dense`), how a row of C⁻¹ is generated (`terms`), and, where there is a
closed form, overrides the generic answers below, which all come from the dense matrix.
Steps and rows count from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np

from ..budget import Participation
from ..errors import SordinoError
from .sensitivity import Sensitivity, sensitivity_of


class Strategy(ABC):
    """The matrix C of one correlated-noise mechanism over `steps` (T) steps."""

    name: str  # as the user spells it, argument included
    steps: int  # T
    is_identity: bool = False  # C = I: independent noise, and samplers that need it may be used
    nonnegative: bool = True  # C ≥ 0 entry by entry
    vectors_regenerated: int = 0  # past rows of Z drawn again at each step
    vectors_stored: int = 0  # past outputs that must be kept, each as large as the model

    def __init__(self, name: str, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise SordinoError(f"steps={steps!r} must be a whole number of at least 1")
        self.name, self.steps = name, steps

    @abstractmethod
    def dense(self) -> np.ndarray:
        """C, float64, T×T."""

    @abstractmethod
    def terms(self, step: int) -> list[tuple[int, float]]:
        """Row `step` of C⁻¹ as (row j of Z, coefficient), j ≤ step; `Unsupported` where it is not sparse."""

    def inverse(self) -> np.ndarray:
        """C⁻¹, float64, T×T."""
        from scipy.linalg import solve_triangular

        return solve_triangular(self.dense(), np.eye(self.steps), lower=True)

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        """The sensitivity of the leading ``participation.steps`` steps, with its route and whether it is attained."""
        self._check(participation)
        return sensitivity_of(self.dense(), participation)

    def sensitivity(self, participation: Participation) -> float:
        """How far one example of norm at most 1 a step can move ``C G``, for any signs and adaptive choices."""
        return self.sensitivity_bound(participation).value

    def row_norm(self, step: int) -> float:
        """``‖(C⁻¹)_t‖₂``: the standard deviation of the noise of step t, in units of ζσ."""
        self.check_step(step)
        return float(np.sqrt(sum(coefficient**2 for _, coefficient in self.terms(step))))

    @cached_property
    def _error_rows(self) -> np.ndarray:
        """Squared norms of the rows of ``A C⁻¹``, A the prefix sum."""
        return np.square(np.cumsum(self.inverse(), axis=0)).sum(axis=1)

    def rmse(self) -> float:
        """``‖A C⁻¹‖_F / √T`` for the prefix sum A: the error of all partial sums, at unit noise."""
        return float(np.sqrt(self._error_rows.mean()))

    def max_se(self) -> float:
        """``‖A C⁻¹‖_{2→∞}``: the error of the worst partial sum, at unit noise."""
        return float(np.sqrt(self._error_rows.max()))

    def check_step(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise SordinoError(
                f"step {step} is outside the {self.steps} planned steps; the mechanism ends there, so plan more"
            )

    def _check(self, participation: Participation) -> None:
        if participation.steps > self.steps:
            raise SordinoError(
                f"{participation.steps} steps asked of {self.name!r}, which was built for {self.steps}; build it longer"
            )

    def __repr__(self) -> str:
        return f"<{self.name}, {self.steps} steps>"
