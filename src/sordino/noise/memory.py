"""What kept vectors hold at the moment, and which moves a step needs: past rows of Z, or past outputs.

Both are caches of what follows from the key: what is missing, was drawn under another
generation of the key, or may be half written because something was raised, is made anew.
So a step can be tried again and a run resumed, and no kept vector is ever saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import StateError, Unsupported
from .moves import Move, fill

Subkey = Callable[[int], bytes]  # of a generation
Terms = Sequence[tuple[int, float]]  # (row of Z, coefficient), the newest first


class Step(Protocol):
    """One step of a recurrence, as `strategies` has it."""

    @property
    def fresh(self) -> float: ...

    @property
    def read(self) -> tuple[float, ...]: ...

    @property
    def keep(self) -> tuple[float, ...]: ...

    @property
    def put(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Work:
    """Moves to be carried out (with `anew`, over vectors that begin at zero), and what is known once they are."""

    moves: list[Move]
    anew: bool
    after: Any


def generation(first_steps: Sequence[int], row: int) -> int:
    """Which generation of the key covers row `row` of Z."""
    return max(g for g, first in enumerate(first_steps) if first <= row)


class Rows:
    """The last m rows of Z, row j at j mod m: what `regenerate` would draw again, kept instead."""

    def __init__(self, name: str, terms: Callable[[int], Terms], vectors: int) -> None:
        self._name, self._terms, self._vectors = name, terms, vectors
        self.forget()

    def forget(self) -> None:
        self._held: list[tuple[int, int] | None] = [None] * self._vectors  # row and generation

    def work(self, step: int, first_steps: Sequence[int], subkey: Subkey, scale: float | None) -> Work:
        """With `scale` None, only what the step will read."""
        (newest, fresh), *past = self._terms(step)
        if newest != step or any(step - row > self._vectors for row, _ in past):
            raise Unsupported(f"noise={self._name!r} reads other rows at step {step} than the last {self._vectors}")
        moves, after = [], {}
        for row, _ in past:
            place, label = row % self._vectors, (row, generation(first_steps, row))
            if self._held[place] != label:
                moves.append(fill(subkey(label[1]), row, place))
                after[place] = label
        if scale is not None:
            own, place = generation(first_steps, step), step % self._vectors
            reads = tuple((row % self._vectors, c * scale) for row, c in past)
            writes = ((place, 0.0, 1.0),)
            moves.append(Move(subkey(own), step, fresh * scale, reads, writes, scale=scale, replay=True))
            after[place] = (step, own)
        return Work(moves, False, after)

    def begin(self, work: Work) -> None:
        for place in work.after:
            self._held[place] = None

    def done(self, work: Work) -> None:
        for place, label in work.after.items():
            self._held[place] = label


class Outputs:
    """Vectors that depend on all rows so far; made anew by going through all steps once more."""

    def __init__(self, name: str, recurrence: Callable[[int], Step]) -> None:
        self._name, self._recurrence = name, recurrence
        self._last: int | None = None  # the step asked for last
        self.forget()

    def forget(self) -> None:
        self._ready: int | None = None  # the step that they are ready for
        self._rows: tuple[int, ...] = ()  # the generations' first steps, as its rows were drawn

    def work(self, step: int, first_steps: Sequence[int], subkey: Subkey, scale: float | None) -> Work:
        """With `scale` None, only what the step will read."""
        if self._last is not None and step not in (self._last, self._last + 1):
            raise StateError(
                f"step {step} was asked for after step {self._last}: the noise of {self._name!r} is made step by step; "
                "go on in order, or load a save"
            )
        anew = self._ready != step or not same_rows(self._rows, first_steps, step)
        moves = [self._move(s, first_steps, subkey, None) for s in range(step)] if anew else []
        if scale is not None:
            moves.append(self._move(step, first_steps, subkey, scale))
        return Work(moves, anew, (step + (scale is not None), tuple(first_steps)))

    def _move(self, step: int, first_steps: Sequence[int], subkey: Subkey, scale: float | None) -> Move:
        r = self._recurrence(step)
        reads = tuple((i, c) for i, c in enumerate(r.read) if c != 0.0)
        changes = zip(r.keep, r.put, strict=True)
        writes = tuple((i, keep, put) for i, (keep, put) in enumerate(changes) if (keep, put) != (1.0, 0.0))
        return Move(subkey(generation(first_steps, step)), step, r.fresh, reads, writes, scale)

    def begin(self, work: Work) -> None:
        self.forget()

    def done(self, work: Work) -> None:
        self._ready, self._rows = work.after
        self._last = max(self._ready - 1, 0)


def same_rows(one: Sequence[int], other: Sequence[int], before: int) -> bool:
    """Whether two lists of generations draw rows 0 … before − 1 alike.

    >>> same_rows([0], [0, 5], 5), same_rows([0], [0, 5], 6)
    (True, False)
    """
    if not one:
        return False
    starts = {first for first in (*one, *other) if first < before}
    return all(generation(one, row) == generation(other, row) for row in starts)
