"""What a strategy may be optimised for: the run's length, its participation, and the error that matters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..budget import Participation
from ..errors import SordinoError
from .workload import PREFIX_SUM, Workload

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload
    from .base import Strategy

Objective = Literal["rmse", "max-se", "curvature"]
OBJECTIVES: tuple[Objective, ...] = ("rmse", "max-se", "curvature")


@dataclass(frozen=True)
class Problem:
    """The question an optimised strategy answers; strategies with a closed form only read `steps`.

    `noise_needed` says how much noise a candidate needs in units that are the same for all candidates: its
    sensitivity, or, with an amplifying sampler, the noise multiplier an accountant finds (an estimate will do:
    what is chosen here is accounted for afterwards).
    """

    steps: int  # T
    participation: Participation | None = None  # None: every example takes part once
    workload: Workload = PREFIX_SUM
    objective: Objective = "rmse"
    noise_needed: Callable[[Strategy], float] | None = None
    curvature: CurvatureWorkload | None = None  # what public data says about the loss

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise SordinoError(f"steps={self.steps!r} must be a whole number of at least 1")
        if self.objective not in OBJECTIVES:
            raise SordinoError(f"objective={self.objective!r} is not known; choose 'rmse', 'max-se' or 'curvature'")
        if self.objective == "curvature" and self.curvature is None:
            raise SordinoError(
                "objective='curvature' needs the spectrum of a Hessian and the learning rate; pass spectrum= and "
                "learning_rate= (--spectrum FILE --learning-rate η), or choose 'rmse' or 'max-se'"
            )

    @property
    def participations(self) -> Participation:
        """k, b over all steps."""
        if self.participation is None:
            return Participation(steps=self.steps, epochs=1, separation=self.steps)
        return self.participation

    def error(self, strategy: Strategy) -> float:
        """The error of the workload at unit noise, or the root of the curvature score."""
        if self.objective == "curvature":
            assert self.curvature is not None
            return math.sqrt(self.curvature.score(strategy))
        return strategy.rmse(self.workload) if self.objective == "rmse" else strategy.max_se(self.workload)

    def noise(self, strategy: Strategy) -> float:
        """How much noise the strategy needs: see `noise_needed`."""
        if self.noise_needed is None:
            return strategy.sensitivity(self.participations)
        return self.noise_needed(strategy)

    def loss(self, strategy: Strategy) -> float:
        """Error times the noise that the strategy needs: what is minimised."""
        return self.error(strategy) * self.noise(strategy)
