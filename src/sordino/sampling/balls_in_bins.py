"""Balls in bins: each example draws one of b = E bins, independently and uniformly, once for the whole run.

Step t uses bin t mod b, so an example appears once an epoch, always at the same place; bin
sizes vary (Binomial(N, 1/b)). A permutation cut into equal batches is a *different*
mechanism, hundreds of times worse in δ. Adjacency is add/remove: the bin of example i
is a pure function of (key, i), so another example moves nobody.
"""

from __future__ import annotations

import numpy as np

from ..budget import Adjacency, Participation
from .base import Sampling, Words, fingerprint
from .bins import draw_bins
from .table import Table


class BallsInBins(Sampling):
    """b = E bins, drawn once."""

    name = "balls-in-bins"
    adjacency = Adjacency.ADD_REMOVE

    _table: Table | None = None
    _drawn_for: tuple[bytes, int] | None = None

    @property
    def bins(self) -> int:
        return self.schedule.steps_per_epoch

    @property
    def participation(self) -> Participation:
        """(T, epochs, E), at fixed steps i, i+E, …"""
        s = self.schedule
        return Participation(steps=s.steps, epochs=s.epochs, separation=s.steps_per_epoch, fixed=True)

    def describe(self) -> str:
        return f"balls-in-bins sampling with {self.bins} bins"

    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        self.check(step, population)
        key = (fingerprint(stream, self.name), population)
        if self._table is None or self._drawn_for != key:
            self._table, self._drawn_for = Table(draw_bins(stream, 0, self.name, population, self.bins), self.bins), key
        return self._table.rows(step % self.bins)
