"""What happened in one step. Private: for the console, never to be published."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .gradients.engine import Clipped


class StepNumbers:
    """Worked out when asked for: on a GPU a number read is a wait for everything before it."""

    def __init__(self, parts: Sequence[Clipped], batch_size: int) -> None:
        self._parts, self.batch_size = list(parts), batch_size

    @property
    def loss(self) -> float:
        """The mean loss, NaN for an empty batch; losses that are NaN are left out."""
        return float(torch.cat([p.losses for p in self._parts]).nanmean()) if self._parts else math.nan

    @property
    def clip_fraction(self) -> float:
        return float(torch.cat([p.clipped for p in self._parts]).float().mean()) if self._parts else math.nan

    @property
    def norms(self) -> Tensor:
        """‖ĝ_i‖ before clipping."""
        return torch.cat([p.norms for p in self._parts]).detach() if self._parts else torch.zeros(0)

    @property
    def non_finite(self) -> int:
        return sum(p.bad for p in self._parts)

    def __repr__(self) -> str:
        return f"<private: loss {self.loss:.4g}, {self.clip_fraction:.0%} of {self.batch_size} clipped>"
