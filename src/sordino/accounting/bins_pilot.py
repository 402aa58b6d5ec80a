"""Planning the samples of balls in bins: which sampler, and how many samples, before any that count are drawn.

A pilot draws a few thousand samples with random numbers of its own, the same normals and uniforms for every noise
multiplier, so what it expects changes smoothly with σ and ε. Nothing it says is ever reported: where it is wrong, the
bound of the fresh samples fails, or is loose.

*Which s.* R is known before a sample is drawn; the best s is at or a little above the one of least R (above it R grows,
but the variance still falls). Those are tried. All of them have the same mean, so the one with the smallest bound is
the one with the smallest distance from average to bound.

*How many.* So many that the distance, in units of δ, and the work are small together. Work is counted in operations and
not in seconds: the answer must not depend on the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .bernstein import Moments
from .bins_bounds import LARGEST_ORDER, BinsBounds
from .bins_sampler import Sampler, Samples
from .counted import rows

FEWEST, MOST = 1 << 14, 1 << 22
LARGEST_WORK = 3e10  # in units of about a nanosecond on one core
WORTH = 2e11  # of work for all of δ: 2e9 for a hundredth
REFINEMENT = 8  # the second pilot has an eighth of the samples that count


@dataclass(frozen=True)
class Choice:
    """A sampler, a number of samples, and the bound to expect of them."""

    expected: float
    cost: float  # what was minimised
    count: int
    order: int = 0
    tilt: float | None = None
    error: float = 0.0  # relative, of the average over the pilot's samples
    seen: int = 0  # how many those were

    @property
    def error_of_all(self) -> float:
        """The same for all samples."""
        return self.error * math.sqrt(self.seen / self.count)


def work(bins: int, order: int) -> float:
    """Of one sample: a product with G's factor, normals, exponentials, s draws of a bin."""
    return bins * bins / 15.0 + bins * (24.0 + 2.0 * order) + 500.0


def whole_chunks(count: float, bins: int) -> int:
    return max(1, round(count / rows(bins))) * rows(bins)


def expect(
    moments: Moments,
    beta: float,
    bins: int,
    order: int = 0,
    tilt: float | None = None,
    delta: float | None = None,
    clear: float = 0.0,
) -> Choice:
    """The number of samples that minimises (bound − average)/δ + work, or the first whose bound is below `clear`."""
    each = work(bins, order)
    most = max(FEWEST, min(MOST, int(LARGEST_WORK / each)))
    log_unit = math.log(max(moments.estimate if delta is None else delta, 1e-300))
    best, count = (math.inf, math.inf, FEWEST), float(FEWEST)
    while count <= most:
        bound = moments.bound(beta, int(count))
        margin = math.exp(min(700.0, moments.log_margin(beta, int(count)) - log_unit))
        best = min(best, (margin + count * each / WORTH, bound, int(count)))
        if bound <= clear:
            best = (best[0], bound, int(count))
            break
        count *= 2.0**0.25
    cost, bound, chosen = best
    return Choice(bound, cost, whole_chunks(chosen, bins), order, tilt, moments.error, moments.count)


class Look:
    """What the pilot expects at one noise multiplier."""

    def __init__(self, pilot: Pilot, sigma: float) -> None:
        self.pilot, self.sigma = pilot, sigma
        self.bounds = BinsBounds(pilot.sampler.gram, sigma)
        self._remove: dict[int, Samples] = {}
        self._add: dict[float, Samples] = {}

    def remove(self, epsilon: float, beta: float) -> Choice:
        """The best order for ε."""
        orders = self._candidates(epsilon)
        missing = [order for order in orders if order not in self._remove]
        if missing:
            new = self.pilot.sampler.remove(self.bounds, self.sigma, missing, self.pilot.draws)
            self._remove.update(zip(missing, new, strict=True))
        seen = {s: self._remove[s].moments(epsilon) for s in orders}
        surest = min(seen.values(), key=lambda found: found.error).estimate
        choices = [expect(found, beta, self.pilot.bins, s, delta=surest) for s, found in seen.items()]
        return min(choices, key=lambda choice: choice.cost)

    def add(self, epsilon: float, beta: float, tilt: float, target: float) -> Choice:
        """The fewest samples whose bound stays clear of `target`, and so does not decide; or the best number."""
        if tilt not in self._add:
            self._add[tilt] = self.pilot.sampler.add(self.bounds, self.sigma, tilt, self.pilot.draws)
        return expect(self._add[tilt].moments(epsilon), beta, self.pilot.bins, tilt=tilt, clear=0.95 * target)

    def _candidates(self, epsilon: float) -> list[int]:
        """Orders from the one of least R up (s = 0, no importance sampling, is right for a large δ)."""
        top = self.bounds.orders
        best = min(range(top + 1), key=lambda s: self.bounds.log_largest(s, epsilon))
        wanted = {best, best + 1, round(best * 1.25), round(best * 1.5)}
        return sorted(s for s in wanted if s <= top)


class Pilot:
    """A few thousand draws that are kept (fewer where b is large, to save memory)."""

    def __init__(self, sampler: Sampler, seed: bytes, count: int) -> None:
        self.sampler, self.bins, self._seed = sampler, sampler.bins, seed
        self.count = whole_chunks(min(count, max(1 << 10, (1 << 23) // self.bins)), self.bins)

    @cached_property
    def draws(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(self.sampler.draws(self._seed, self.count, LARGEST_ORDER + 1))

    def look(self, sigma: float) -> Look:
        return Look(self, sigma)
