"""Poisson sampling: every example is in every batch independently with probability q = B/N.

Work is O(batch), not O(N): instead of a coin per example, the gaps between those drawn
are drawn. The gap is geometric, ``⌊ln U / ln(1−q)⌋``, U uniform from 64 bits. The
law has no memory, so a gap longer than 1/q is cut there and drawn anew; U then never
gets small, and in float64 the probability of each example, given all the others, is within
``RATE_ERROR`` (2⁻⁵⁰, absolutely) of q. Accountants use q + 2⁻⁵⁰.
"""

from __future__ import annotations

import math

import numpy as np

from ..budget import Adjacency, Participation
from .base import Sampling, Words, uniform64

RATE_ERROR = 2.0**-50


class Poisson(Sampling):
    """Rate B/N, adjacency add/remove."""

    name = "poisson"
    adjacency = Adjacency.ADD_REMOVE

    @property
    def rate(self) -> float:  # type: ignore[override]
        """q = B/N, from the stated N, whatever the size of the data set."""
        return self.schedule.batch_size / self.schedule.examples

    @property
    def participation(self) -> Participation:
        """Anyone may be in every batch: (T, T, 1)."""
        return Participation(steps=self.schedule.steps, epochs=self.schedule.steps, separation=1)

    def describe(self) -> str:
        return f"Poisson sampling at rate {self.rate:.6g}"

    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        self.check(step, population)
        return draw_poisson(stream, step, "poisson", population, self.rate)


def draw_poisson(stream: Words, step: int, name: str, population: int, rate: float) -> np.ndarray:
    """Each of ``range(population)`` independently with probability `rate`."""
    if rate >= 1.0:
        return np.arange(population, dtype=np.int64)
    log_miss = math.log1p(-rate)
    longest = math.ceil(1.0 / rate)
    drawn: list[np.ndarray] = []
    position, used = 0, 0  # everyone before `position` has been decided; gaps used so far
    while position < population:
        # A gap moves on by about .63/q on average: a small surplus, and another round where it was too little.
        expected = (population - position) * rate
        count = int(1.6 * expected + 8.0 * math.sqrt(expected) + 16)
        u = (uniform64(stream, step, name, used, count).astype(np.float64) + 0.5) * 2.0**-64
        gap = np.floor(np.log(u) / log_miss)
        hit = gap < longest
        end = position + np.cumsum(np.where(hit, gap + 1.0, longest).astype(np.int64))
        drawn.append(end[hit] - 1)
        position, used = int(end[-1]), used + count
    chosen = np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)
    return chosen[chosen < population]
