"""Correlated noise by regeneration: row t of C⁻¹Z from the keystream, nothing stored.

Z has independent standard normal rows; row j is drawn under the sub-key of the
*generation* that covers it. A step that has to be redone differently, with nothing
of the first attempt released, takes a new generation from that row on; rows before
it are still replayed under the old key, so (C⁻¹Z)_t keeps its law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ..errors import SordinoError, StateError
from .cipher import STEPS, check_step
from .keys import PURPOSES, Keys
from .stream import add_many_normals_, check_names


class RowSource(Protocol):
    """What is needed of a strategy (strategies/ has them)."""

    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> int: ...

    def terms(self, step: int) -> list[tuple[int, float]]:
        """Row `step` of C⁻¹ as (row of Z, coefficient)."""
        ...


class CorrelatedNoise:
    """Adds ``scale * (C⁻¹Z)_step`` to sums, by name.

    `first_steps[g]` is the first row that generation g covers: row j belongs to the
    *latest* generation g with ``first_steps[g] <= j``.
    """

    def __init__(self, keys: Keys, strategy: RowSource, purpose: str = "noise") -> None:
        if not PURPOSES.get(purpose, False):
            raise SordinoError(f"purpose={purpose!r} is not one for noise; use 'noise' or another that may be re-keyed")
        if not 0 < strategy.steps <= STEPS:
            raise SordinoError(f"steps={strategy.steps} must be from 1 to {STEPS}")
        self._keys, self._strategy, self._purpose = keys, strategy, purpose
        self._checked: frozenset[str] = frozenset()
        self.first_steps: list[int] = [0]

    def generation(self, row: int) -> int:
        """Which generation of the key covers row `row` of Z."""
        return max(g for g, first in enumerate(self.first_steps) if first <= row)

    def rekey(self, step: int) -> None:
        """Rows from `step` on get a fresh key. Only sound if nothing computed from their first attempt was released."""
        check_step(step)
        if step >= self._strategy.steps:
            raise SordinoError(f"step={step} is past the last of {self._strategy.steps} steps; nothing to draw anew")
        self.first_steps.append(int(step))

    def add_(self, sums: Mapping[str, Tensor], step: int, scale: float) -> None:
        """``sums[name] += scale * (C⁻¹Z)_step[name]`` for every name, in place, without a temporary of their size."""
        check_step(step)
        if step >= self._strategy.steps:
            raise StateError(
                f"step={step}: the noise was planned for {self._strategy.steps} steps (0 to "
                f"{self._strategy.steps - 1}); plan a longer run"
            )
        if isinstance(scale, bool) or not math.isfinite(scale) or scale < 0:
            raise SordinoError(f"scale={scale!r} must be a finite number from 0 on: clip norm times noise multiplier")
        if self._checked != sums.keys():
            check_names(sums)
            self._checked = frozenset(sums)
        if scale == 0:
            return
        rows = self._strategy.terms(step)
        subkeys = {g: self._keys.subkey(self._purpose, g) for g in {self.generation(row) for row, _ in rows}}
        add_many_normals_(sums, [(subkeys[self.generation(row)], row, c * scale) for row, c in rows])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: no secrets, only which rows go with which generation."""
        return {
            "purpose": self._purpose,
            "strategy": self._strategy.name,
            "steps": self._strategy.steps,
            "first_steps": list(self.first_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for field in ("purpose", "strategy", "steps"):
            if state.get(field) != mine[field]:
                raise StateError(
                    f"the saved noise has {field}={state.get(field)!r}, this run {mine[field]!r}; "
                    "resume with the configuration that was saved"
                )
        first = state.get("first_steps")
        whole = isinstance(first, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in first)
        if not whole or not first or first[0] != 0 or not all(0 <= s < mine["steps"] for s in first):
            raise StateError(f"the saved noise has first_steps={first!r}; the checkpoint is damaged, use an older one")
        self.first_steps = list(first)
