"""The small typed statements that every room shares: what is asked, what is public, what holds.

`Budget` is what the user asks for, `Schedule` the public constants of a run,
`Participation` how often and how far apart one example may appear, and
`Guarantee` what holds for what has been released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from .errors import SordinoError


class Adjacency(str, Enum):
    """Which two data sets the guarantee compares."""

    ADD_REMOVE = "add/remove one example"
    ZERO_OUT = "zero out one example"


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) a run may spend. ``epsilon=math.inf`` is the clip-only control: no noise, no guarantee.

    >>> Budget(epsilon=8, delta=1e-5)
    Budget(epsilon=8.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SordinoError(f"{name}={value!r} must be a number")
            object.__setattr__(self, name, float(value))
        if math.isnan(self.epsilon) or self.epsilon <= 0:
            raise SordinoError(f"epsilon={self.epsilon} must be positive (math.inf for no noise at all)")
        if math.isnan(self.delta) or not 0 < self.delta < 1:
            raise SordinoError(f"delta={self.delta} must lie strictly between 0 and 1, and well under 1/N")


@dataclass(frozen=True)
class Participation:
    """T steps; one example takes part at most `epochs` (k) times, at least `separation` (b) steps apart.

    ``fixed`` says more: the steps of an example are i, i+b, i+2b, …, so that only b
    patterns exist, and a sensitivity over them can be enumerated.
    """

    steps: int
    epochs: int
    separation: int
    fixed: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "separation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SordinoError(f"{name}={value!r} must be a whole number of at least 0")
        if self.separation < 1:
            raise SordinoError(f"separation={self.separation} must be at least 1 step")

    def first(self, steps: int) -> Participation:
        """The same participation, cut off after the first `steps` steps: k = ⌈steps/b⌉ at most.

        >>> Participation(steps=80, epochs=20, separation=4).first(9).epochs
        3
        """
        return replace(self, steps=steps, epochs=min(self.epochs, -(-steps // self.separation)))


@dataclass(frozen=True)
class Schedule:
    """The public constants of a run; nothing here is computed from private records.

    >>> Schedule(examples=1797, batch_size=450, epochs=20).steps
    80
    """

    examples: int  # N
    batch_size: int  # B, the expected batch size and the divisor
    epochs: int

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SordinoError(f"{name}={value!r} must be a whole number of at least 1")
        if self.batch_size > self.examples:
            raise SordinoError(
                f"batch_size={self.batch_size} is larger than the {self.examples} examples; use at most {self.examples}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """E = ⌈N/B⌉."""
        return -(-self.examples // self.batch_size)

    @property
    def steps(self) -> int:
        """T = epochs · E."""
        return self.epochs * self.steps_per_epoch
