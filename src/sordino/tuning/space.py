"""What may be chosen: ranges of numbers and lists of choices, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..asked import shown
from ..errors import SordinoError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; `log`: each ratio as likely as any other; `whole`: whole numbers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        for value in (self.low, self.high):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise SordinoError(f"Range({shown(self.low)}, {shown(self.high)}): both ends must be finite numbers")
            if self.whole and value != int(value):
                raise SordinoError(f"{self}: the ends of a range of whole numbers must be whole")
        if self.low >= self.high:
            raise SordinoError(f"{self}: the lower end must be below the upper one")
        if self.log and self.low <= 0:
            raise SordinoError(f"{self}: a logarithmic range must be positive")
        kind = int if self.whole else float
        object.__setattr__(self, "low", kind(self.low))
        object.__setattr__(self, "high", kind(self.high))

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Choice:
    """One of a few names or numbers, in no order.

    >>> str(Choice("identity", "lambda-cgd:0.9"))
    '{identity, lambda-cgd:0.9}'
    """

    values: tuple[Any, ...]

    def __init__(self, *values: str | float) -> None:
        for value in values:
            if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
                raise SordinoError(f"Choice: {shown(value)} must be a name or a finite number")
        if len(set(values)) < max(2, len(values)):
            raise SordinoError(f"Choice{shown(values)} must be given at least two values, each once")
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        return "{" + ", ".join(str(value) for value in self.values) + "}"


Space = Mapping[str, Range | Choice]

SPACE: Space = MappingProxyType(
    {
        "learning_rate": Range(0.1, 1.0, log=True),
        "clip_norm": Range(0.1, 10.0, log=True),
        "bands": Range(1, 20, log=True, whole=True),
    }
)
"""The paper's ranges (NoiseCurve, A.1). DP-SGD has no bands."""


def checked(space: Any) -> dict[str, Range | Choice]:
    if not isinstance(space, Mapping) or not space:
        raise SordinoError(
            f"space={shown(space)} must name what is tuned: {{'learning_rate': Range(0.1, 1, log=True)}}"
        )
    for name, values in space.items():
        if not isinstance(name, str) or not isinstance(values, (Range, Choice)):
            raise SordinoError(f"space[{shown(name)}] is {shown(values)}; it must be a Range or a Choice")
    return dict(space)


def as_data(space: Space) -> dict[str, Any]:
    """For the file: equal if and only if the spaces are."""
    found: dict[str, Any] = {}
    for name, values in space.items():
        found[name] = list(values.values) if isinstance(values, Choice) else vars(values).copy()
    return found
