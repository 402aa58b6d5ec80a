"""The contract of a strategy: a lower-triangular T×T matrix C whose inverse shapes the noise.

Step t adds ``ζ·σ·(C⁻¹Z)_t`` to the clipped sum. Whoever implements a strategy says
what C is (`dense`), how a row of C⁻¹ is generated (`terms`), and, where there is a
closed form, overrides the generic answers below, which all come from the dense matrix.
Steps and rows count from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..budget import Participation
from ..errors import SordinoError, Unsupported
from .sensitivity import Sensitivity, sensitivity_of
from .workload import PREFIX_SUM, Workload


@dataclass(frozen=True)
class Recurrence:
    """One step of ``x_t = (C⁻¹Z)_t`` from fresh noise z and m kept vectors v_i, each as large as the model:

        x = fresh·z + Σ_i read[i]·v_i,      then      v_i ← keep[i]·v_i + put[i]·x.

    All kept vectors start at zero. Banded C: a ring of the last p−1 outputs (one slot has keep 0, put 1, the others
    keep 1, put 0). A BLT: keep its decays, put 1.
    """

    fresh: float
    read: tuple[float, ...]
    keep: tuple[float, ...]
    put: tuple[float, ...]


class Strategy(ABC):
    """The matrix C of one correlated-noise mechanism over `steps` (T) steps."""

    name: str  # as the user spells it, argument included
    steps: int  # T
    is_identity: bool = False  # C = I: independent noise, and samplers that need it may be used
    nonnegative: bool = True  # C ≥ 0 entry by entry
    vectors_regenerated: int = 0  # past rows of Z drawn again at each step
    vectors_stored: int = 0  # vectors that must be kept, each as large as the model; 0 if `terms` is sparse
    bands: int | None = None  # p, where C_tj = 0 for t − j ≥ p; None: not banded
    certificate: Mapping[
        str, float
    ] = {}  # of an optimised strategy: how far from optimal it may be, and what was solved

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

    def recurrence(self, step: int) -> Recurrence:
        """How step `step` comes from kept vectors; `Unsupported` where nothing is kept because `terms` is sparse."""
        self.check_step(step)
        raise Unsupported(f"noise={self.name!r} keeps no vectors; its past noise is drawn again from `terms`")

    def definition(self) -> dict[str, np.ndarray]:
        """The arrays an optimised strategy was found to be, so that a run can be resumed with the very same matrix.

        Empty where the name says it all. `make_strategy(text, problem, definition)` rebuilds it without optimising.
        """
        return {}

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """``C x`` along the first axis (T, or T × m)."""
        return self.dense() @ x

    def solve(self, z: np.ndarray) -> np.ndarray:
        """``C⁻¹ z`` along the first axis (T, or T × m)."""
        from scipy.linalg import solve_triangular

        return np.asarray(solve_triangular(self.dense(), z, lower=True))

    def solve_transposed(self, z: np.ndarray) -> np.ndarray:
        """``C⁻ᵀ z`` along the first axis (T, or T × m)."""
        from scipy.linalg import solve_triangular

        return np.asarray(solve_triangular(self.dense(), z, lower=True, trans="T"))

    def columns(self, first: int, last: int) -> np.ndarray:
        """``C[:, first:last]``, T × (last − first)."""
        basis = np.zeros((self.steps, last - first))
        basis[np.arange(first, last), np.arange(last - first)] = 1.0
        return self.multiply(basis)

    def column_norm(self) -> float:
        """``max_j ‖C[:, j]‖₂``: how far one participation can move ``C G``."""
        chunks = (self.columns(j, min(j + 256, self.steps)) for j in range(0, self.steps, 256))
        return max(float(np.linalg.norm(chunk, axis=0).max()) for chunk in chunks)

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

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        """Squared norms of the rows of ``A C⁻¹``: the variance of each partial result at unit noise."""
        return np.asarray(np.square(workload.apply(self.inverse())).sum(axis=1))

    def rmse(self, workload: Workload = PREFIX_SUM) -> float:
        """``‖A C⁻¹‖_F / √T``: the error of all partial results, at unit noise."""
        return float(np.sqrt(self.error_rows(workload).mean()))

    def max_se(self, workload: Workload = PREFIX_SUM) -> float:
        """``‖A C⁻¹‖_{2→∞}``: the error of the worst partial result, at unit noise."""
        return float(np.sqrt(self.error_rows(workload).max()))

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
