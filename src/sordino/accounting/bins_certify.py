"""Balls in bins, certified: the bound that is reported, from samples nobody has seen before.

The pilot says where to look; here n and s are fixed, fresh samples are drawn whose random numbers are a hash of the
whole question, and what comes out is the empirical Bernstein bound, or nothing. Both directions are bounded at the same
level β: δ is the larger of two fixed numbers, and only the bound of the larger one has to hold.

**ε from one set of samples.** The candidates for ε are fixed beforehand and tested from the largest down; the first
that fails ends it, and the last that passed is the answer. An error needs the first candidate whose true δ is too large
to pass, and that is one fixed candidate: no correction for having tested many (a fixed sequence of tests).

**Failures counted.** `calibrate` may try several noise multipliers, each by such a certification, until one answers
with the budget's ε. So each certification has the level β/`ATTEMPTS`, and what was tried and failed is paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .bins_allowance import Allowance
from .bins_bounds import BinsBounds
from .bins_pilot import REFINEMENT, Choice, whole_chunks
from .bins_sampler import Sampler, Samples
from .counted import seed


@dataclass(frozen=True)
class Certificate:
    """Fresh samples for both directions (the second only where the closed form is too loose)."""

    bounds: BinsBounds
    level: float
    remove_samples: Samples
    add_samples: Samples | None

    @property
    def samples(self) -> int:
        return len(self.remove_samples) + (len(self.add_samples) if self.add_samples else 0)

    def remove(self, epsilon: float) -> float:
        return min(self.bounds.remove(epsilon), self.remove_samples.moments(epsilon).bound(self.level))

    def add(self, epsilon: float) -> float:
        closed = self.bounds.add(epsilon)
        return min(closed, self.add_samples.moments(epsilon).bound(self.level)) if self.add_samples else closed


def draw(
    sampler: Sampler, sigma: float, bounds: BinsBounds, level: float, remove: Choice, add: Choice | None, *asked: float
) -> Certificate:
    """Samples whose random numbers are a hash of everything: G, σ, what was asked, s or t, n, and the level."""

    def fresh(purpose: str, choice: Choice, *chosen: float) -> bytes:
        return seed(purpose, sampler.gram, sigma, *asked, level, choice.count, *chosen)

    draws = sampler.draws(fresh("remove", remove, remove.order), remove.count, remove.order + 1)
    remove_samples = sampler.remove(bounds, sigma, [remove.order], draws)[0]
    add_samples = None
    if add is not None:
        assert add.tilt is not None
        draws = sampler.draws(fresh("add", add, add.tilt), add.count)
        add_samples = sampler.add(bounds, sigma, add.tilt, draws)
    return Certificate(bounds, level, remove_samples, add_samples)


def refined(sampler: Sampler, sigma: float, bounds: BinsBounds, choice: Choice) -> Samples:
    """A second, larger pilot of one sampler: where the fresh samples' bound is going to be, to a per cent or two."""
    count = whole_chunks(choice.count / REFINEMENT, sampler.bins)
    if choice.tilt is not None:
        return sampler.add(bounds, sigma, choice.tilt, sampler.draws(seed("refine add", sampler.gram), count))
    draws = sampler.draws(seed("refine", sampler.gram), count, choice.order + 1)
    return sampler.remove(bounds, sigma, [choice.order], draws)[0]


def smallest(certificate: Certificate, allowance: Allowance, candidates: Sequence[float]) -> float:
    """The last of the candidates that passes, tested from the largest down; inf if the largest fails."""
    answer = math.inf
    for epsilon in sorted(candidates, reverse=True):
        if certificate.remove(epsilon) > allowance.remove() or certificate.add(epsilon) > allowance.add(epsilon):
            break
        answer = epsilon
    return answer


def candidates(expected: float, slope: float, enough: float) -> list[float]:
    """Round numbers around the ε to expect, and sparse ones up to one that is known to be enough.

    `slope` is −d ln δ/dε: the steps are a hundredth of δ, the window 8 % below and 30 % above. Round, so that a
    budget's own ε is among them and rounding errors never decide.
    """
    step = round_step(0.01 / slope)
    first, last = math.floor((expected - 0.08 / slope) / step), math.ceil((expected + 0.3 / slope) / step)
    digits = max(0, -math.floor(math.log10(step)))
    found = [round(i * step, digits) for i in range(max(0, first), last + 1)]
    ahead = 0.5 / slope
    while expected + ahead < enough:
        found.append(round(math.ceil((expected + ahead) / step) * step, digits))
        ahead *= 2.0
    return [epsilon for epsilon in found if epsilon < enough]


def round_step(step: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is at most `step`.

    >>> round_step(0.0031), round_step(0.07)
    (0.002, 0.05)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return max((m * power for m in (1.0, 2.0, 5.0) if m * power <= step * (1 + 1e-9)), default=power)


def slope_of(bound: Callable[[float], float], epsilon: float) -> float:
    """−d ln bound/dε, from a difference."""
    width = max(1e-4, 0.01 * epsilon)
    here, ahead = bound(epsilon), bound(epsilon + width)
    return max(0.1, math.log(here / ahead) / width) if 0.0 < ahead < here else 1.0
