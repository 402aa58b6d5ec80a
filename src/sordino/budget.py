"""The small typed statements that every room shares: what is asked, what is public, what holds.

`Budget` is what the user asks for, `Schedule` the public constants of a run,
`Participation` how often and how far apart one example may appear, and
`Guarantee` what holds for what has been released.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Decimal
from enum import Enum
from typing import Any

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


class SordinoWarning(UserWarning):
    """Something that is allowed and probably not what was meant."""


NOT_COVERED = (
    "choices made by looking at private data: tuning, early stopping, picking the best checkpoint",
    "training loss, accuracy, gradient norms, clip fractions and batch sizes, wherever they are logged",
    "floating-point rounding of sums and outputs (Mironov 2012; Casacuberta et al. 2022)",
)


@dataclass(frozen=True)
class Guarantee:
    """What holds for everything released so far. Immutable; prints as a sentence.

    `epsilon` is what `steps_released` steps cost at `delta`, `planned_epsilon` what all will. Both are upper bounds;
    the accountant's failure probability and, where `tails_included`, the finite reach of the noise are inside `delta`.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    sampling: str  # in words
    noise: str  # as the user spells it
    accountant: str  # in words
    noise_multiplier: float
    steps_released: int
    steps_planned: int
    planned_epsilon: float
    examples: int  # N
    batch_size: int  # B, also the divisor
    epochs: int
    examples_stated: bool = True  # False: N is len(dataset), and treated as public
    clip_norm: float | None = None
    failure_probability: float = 0.0
    tails_included: bool = False
    seeded: bool = False
    unit: str = "one example"
    remarks: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = NOT_COVERED

    @property
    def void(self) -> str | None:
        """Why there is no guarantee, if there is none.

        Clip-only has none from the start, before any step.
        """
        if self.seeded:
            return "seeded"
        if self.noise_multiplier == 0.0:
            return "no noise"
        if self.epsilon == math.inf:
            return "too little noise for this δ"
        return None

    @property
    def all_remarks(self) -> tuple[str, ...]:
        """`remarks`, after those that follow from the other fields."""
        derived = []
        if not self.examples_stated:
            derived.append(f"the number of examples, {self.examples}, is treated as public")
        if self.noise_multiplier > 0.0 and not self.tails_included:
            derived.append("without a model the finite reach of the noise is left out of δ")
        return (*derived, *self.remarks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; an infinite ε is None."""
        out: dict[str, Any] = asdict(self)
        for name in ("epsilon", "planned_epsilon"):
            out[name] = out[name] if math.isfinite(out[name]) else None
        out["adjacency"] = self.adjacency.value
        out["divisor"] = self.batch_size
        out["void"] = self.void
        out["remarks"] = list(self.all_remarks)
        out["not_covered"] = list(self.not_covered)
        out["statement"] = str(self)
        return out

    def __str__(self) -> str:
        held = f"({round_up(self.epsilon)}, {significant_up(self.delta)})-DP"
        if self.void == "seeded":
            head = "none: seeded, so the noise is public"
            if self.noise_multiplier > 0.0 and math.isfinite(self.epsilon):
                head += f" (with a secret key it would be {held})"
        else:
            head = f"none: {self.void}" if self.void else held
        done = f"{self.steps_released} of {self.steps_planned} steps"
        if self.void is None and self.steps_released < self.steps_planned:
            done += f" (ε {round_up(self.planned_epsilon)} when all are done)"
        clip = "" if self.clip_norm is None else f", clip norm {self.clip_norm:g}"
        parts = [
            head,
            self.adjacency.value.replace("one example", self.unit),
            self.sampling,
            f"noise {self.noise} with multiplier {self.noise_multiplier:.6g}",
            f"{done}: {self.examples} examples, batch {self.batch_size}, {self.epochs} epochs{clip}",
        ]
        if self.void is None:
            parts.append(f"accounted by {self.accountant}")
            if self.failure_probability > 0.0:
                parts.append(f"failure probability {self.failure_probability:.1g} inside δ")
        return "; ".join([", ".join(parts), *self.all_remarks]) + "."


def round_up(epsilon: float) -> str:
    """ε with two decimals, never below its value.

    >>> round_up(7.9901), round_up(8.0), round_up(0.07), round_up(0.0)
    ('8.00', '8.00', '0.07', '0.00')
    """
    if not math.isfinite(epsilon):
        return str(epsilon)
    if epsilon >= 1e15:  # no decimals left to round
        return f"{math.nextafter(epsilon, math.inf):.17g}"
    return str(Decimal(repr(float(epsilon))).quantize(Decimal("0.01"), rounding=ROUND_CEILING))


def significant_up(delta: float) -> str:
    """δ with three significant digits, never below its value.

    >>> significant_up(1e-5), significant_up(1.00001e-5), significant_up(0.0)
    ('1e-05', '1.01e-05', '0')
    """
    if delta <= 0.0:
        return "0"
    value = Decimal(repr(float(delta)))
    unit = Decimal(1).scaleb(value.adjusted() - 2)
    return f"{float(value.quantize(unit, rounding=ROUND_CEILING)):.3g}"
