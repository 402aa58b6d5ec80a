"""Cyclic Poisson: b fixed parts take turns; step t samples part ``t mod b`` at rate q = bB/N.

The part of example i is a pure function of (key, i), uniform and drawn once, so another example moves nobody
(add/remove adjacency), and part sizes are Binomial(N, 1/b). The rate comes from public constants
alone, never from the size a part turned out to have; the expected batch is B. An example of part i may
be in the batches of steps i, i+b, i+2b, …, in each independently with probability q: between two chances lie exactly b
steps, the room in which a banded C finishes with the first before the second begins (Choquette-Choo et al. 2023).

Drawing is the geometric skipping of `poisson`, over a part instead of the data: O(batch) once the parts are known.
"""

from __future__ import annotations

import numpy as np

from ..budget import Adjacency, Participation, Schedule
from ..errors import SordinoError, Unsupported
from .base import Sampling, Words, fingerprint
from .bins import draw_bins
from .poisson import draw_poisson
from .table import Table


class CyclicPoisson(Sampling):
    """b parts in turn, each at rate bB/N."""

    adjacency = Adjacency.ADD_REMOVE

    _table: Table | None = None
    _drawn_for: tuple[bytes, int] | None = None

    def __init__(self, schedule: Schedule, parts: int) -> None:
        super().__init__(schedule)
        s, most = schedule, schedule.examples // schedule.batch_size
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise SordinoError(f"sampling='cyclic-poisson:{parts}': the number of parts must be at least 1")
        if parts > most:
            raise Unsupported(
                f"sampling='cyclic-poisson:{parts}': {parts} parts of about {s.examples / parts:.4g} examples are "
                f"smaller than the batch of {s.batch_size} (bB > N); use at most {most} parts"
            )
        self.parts = parts
        self.name = f"cyclic-poisson:{parts}"

    @property
    def rate(self) -> float:  # type: ignore[override]
        """q = bB/N, of an example at the steps of its part."""
        return self.parts * self.schedule.batch_size / self.schedule.examples

    @property
    def rounds(self) -> int:
        """⌈T/b⌉: how often the first part has its turn, and no part more often."""
        return -(-self.schedule.steps // self.parts)

    @property
    def participation(self) -> Participation:
        """(T, ⌈T/b⌉, b): some of the steps i, i+b, …"""
        return Participation(steps=self.schedule.steps, epochs=self.rounds, separation=self.parts, fixed=True)

    def describe(self) -> str:
        return f"cyclic Poisson sampling from {self.parts} parts at rate {self.rate:.6g}"

    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        self.check(step, population)
        key = (fingerprint(stream, "cyclic-poisson"), population)
        if self._table is None or self._drawn_for != key:
            part_of = draw_bins(stream, 0, "cyclic-poisson/parts", population, self.parts)
            self._table, self._drawn_for = Table(part_of, self.parts), key
        part = step % self.parts
        return self._table.pick(part, draw_poisson(stream, step, "cyclic-poisson", self._table.size(part), self.rate))


def parse_parts(argument: str, bands: int | None) -> int:
    """b from the text after the colon; without one, the strategy's number of bands.

    >>> parse_parts("", 16), parse_parts("40", 16)
    (16, 40)
    """
    if argument == "":
        if bands is None:
            raise Unsupported("cyclic Poisson sampling has as many parts as C has bands, and this C has none")
        return bands
    try:
        return int(argument)
    except ValueError:
        raise SordinoError(
            f"sampling='cyclic-poisson:{argument}': the number of parts must be a whole number; write for example "
            "'cyclic-poisson:16'"
        ) from None
