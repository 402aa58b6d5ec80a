"""Fixed order: a permutation drawn once, cut into batches, the same every epoch.

Nothing is random to the accountant: no amplification, but also exact accounting for any
C. Adjacency is zero-out, because removing an example would move all later ones.
"""

from __future__ import annotations

import numpy as np

from ..budget import Adjacency, Participation
from .base import Sampling, Words, fingerprint, uniform64
from .table import Table


class FixedOrder(Sampling):
    """The example at position p of a keyed permutation is in batch ⌊p/B⌋ of every epoch."""

    name = "fixed-order"
    adjacency = Adjacency.ZERO_OUT

    _table: Table | None = None
    _drawn_for: tuple[bytes, int] | None = None

    @property
    def participation(self) -> Participation:
        """(T, epochs, E), at fixed steps i, i+E, …"""
        s = self.schedule
        return Participation(steps=s.steps, epochs=s.epochs, separation=s.steps_per_epoch, fixed=True)

    def describe(self) -> str:
        return "fixed order"

    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        self.check(step, population)
        key = (fingerprint(stream, self.name), population)
        if self._table is None or self._drawn_for != key:
            self._table, self._drawn_for = self._permute(stream, population), key
        return self._table.rows(step % self.schedule.steps_per_epoch)

    def _permute(self, stream: Words, population: int) -> Table:
        """Sort by a 64-bit random number each (ties, of probability N²/2⁶⁵, by index); then cut.

        More examples than the stated N wrap round: batches grow, nobody appears more than once an epoch.
        """
        order = np.argsort(uniform64(stream, 0, self.name, 0, population), kind="stable")
        batch = np.empty(population, dtype=np.int64)
        batch[order] = (np.arange(population) // self.schedule.batch_size) % self.schedule.steps_per_epoch
        return Table(batch, self.schedule.steps_per_epoch)
