"""Balls in bins with fresh bins every epoch: in each epoch each example draws one of b = E bins anew.

An example appears once an epoch, at another place every time; two appearances may be one step apart. The
bin of example i in epoch e is a pure function of (key, e, i), so another example moves nobody (add/remove adjacency).
"""

from __future__ import annotations

import numpy as np

from ..budget import Adjacency, Participation
from .base import Sampling, Words, fingerprint
from .bins import draw_bins
from .table import Table


class FreshBins(Sampling):
    """b = E bins, drawn once an epoch."""

    name = "balls-in-bins:fresh"
    adjacency = Adjacency.ADD_REMOVE

    _table: Table | None = None
    _drawn_for: tuple[bytes, int, int] | None = None

    @property
    def bins(self) -> int:
        return self.schedule.steps_per_epoch

    @property
    def participation(self) -> Participation:
        """(T, epochs, 1): the last step of one epoch may be followed by the first of the next."""
        return Participation(steps=self.schedule.steps, epochs=self.schedule.epochs, separation=1)

    def describe(self) -> str:
        return f"balls-in-bins sampling with {self.bins} bins, drawn anew every epoch"

    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        self.check(step, population)
        epoch, turn = divmod(step, self.bins)
        key = (fingerprint(stream, self.name), population, epoch)
        if self._table is None or self._drawn_for != key:
            bins = draw_bins(stream, epoch, self.name, population, self.bins)
            self._table, self._drawn_for = Table(bins, self.bins), key
        return self._table.rows(turn)
