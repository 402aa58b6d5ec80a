"""Cyclic Poisson with a p-banded C, p ≤ b: ⌈t/b⌉ compositions of the subsampled Gaussian.

**Why the rounds compose.** Let example x be in part i. It may be in the batches of steps ``j_r = i + rb``,
r = 0, 1, …, with independent coins β_r of probability q, and contributes ``β_r g_r``, ‖g_r‖ ≤ 1, to row j_r of G.
What is released is ``G + σC⁻¹Z``, or, C being known and invertible, the rows of ``Y = CG + σZ`` (its first t rows are
a function of the first t releases, and the other way round). Fix the coins and parts of all other examples: they have
the same law with and without x, and δ is jointly convex.

Cut the rows from j_0 on into rounds ``R_r = [j_r, j_r + b)``; no row before j_0 knows x. Column j_r of C lives on rows
``j_r, …, j_r + p − 1``, all inside R_r because p ≤ b, and no other ``j_s`` reaches into R_r: the columns of x are
orthogonal because their supports are disjoint. So, given the rows before R_r,

* β_r is a fresh coin: nothing released before depends on it, and nothing of β_s, s < r, enters R_r but through what
  was released;
* g_r is fixed: it is computed from the weights at step j_r, a function of those rows;
* the other examples' contributions to a row of R_r are functions of the rows before it, the same with and without x.

With ``c = C[R_r, j_r]``, the likelihood ratio of the rows of R_r with x against without is therefore
``(1 − q) + q·exp(⟨w, v⟩/σ − ‖v‖²/2σ²)``, ``v = c ⊗ g_r``, w standard normal without x: row by row the
other contributions cancel in y − (their sum), whatever they adapt to. That is one subsampled Gaussian with noise
multiplier ``σ/‖v‖ ≥ σ/max_j‖C[:, j]‖``, whatever the rows before were; adaptive composition over the rounds finishes
the argument. Part i has ``⌈(t − i)/b⌉ ≤ ⌈t/b⌉`` rounds in the first t steps. ⌊t/b⌋ would be wrong: the last round
counts though it is cut short. With p > b neighbouring columns overlap, β_s then enters R_{s+1}, and none of this holds.

The same argument with one part and C = I (p = b = 1) is Poisson sampling; both are accounted here as one thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..sampling import CyclicPoisson, Poisson, Sampling
from ..sampling.poisson import RATE_ERROR
from ..strategies import Strategy
from .base import Query


@dataclass(frozen=True)
class Rounds:
    """`count` compositions of the Gaussian with `multiplier`, subsampled at `rate`; each touches `rows` rows of Z."""

    rate: float
    multiplier: float
    count: int
    rows: int


def rounds(query: Query) -> Rounds:
    """What a run with Poisson or cyclic Poisson sampling is composed of, the sampler's rounding included."""
    sampling, strategy = query.sampling, query.strategy
    assert sampling.rate is not None
    rate = min(1.0, sampling.rate + RATE_ERROR)
    if isinstance(sampling, CyclicPoisson):
        bands = bands_of(strategy)
        assert bands is not None and bands <= sampling.parts
        count = -(-query.steps // sampling.parts)
        return Rounds(rate, query.sigma / _column_norm(strategy), count, min(bands, query.steps))
    return Rounds(rate, query.sigma, query.steps, 1)


def bands_of(strategy: Strategy) -> int | None:
    """p; 1 for whatever is the identity."""
    return 1 if strategy.is_identity else strategy.bands


@lru_cache(maxsize=16)
def _column_norm(strategy: Strategy) -> float:
    return 1.0 if strategy.is_identity else strategy.column_norm()


def reason(strategy: Strategy, sampling: Sampling, accountant: str) -> str | None:
    """Why the combination has no accountant of subsampled Gaussians, naming the part; None if it has."""
    choice = f"sampling={sampling.name!r} with noise={strategy.name!r}"
    if isinstance(sampling, Poisson):
        if strategy.is_identity:
            return None
        return f"{choice}: no accountant is known for Poisson sampling with correlated noise"
    if not isinstance(sampling, CyclicPoisson):
        return f"the {accountant!r} accountant needs sampling='poisson' or 'cyclic-poisson', not {sampling.name!r}"
    bands = bands_of(strategy)
    if bands is None:
        return f"{choice}: cyclic Poisson sampling is accounted for a banded C, and this one has no bands"
    if bands > sampling.parts:
        return (
            f"{choice}: {bands} bands are more than the {sampling.parts} parts; use at least {bands} parts or at most "
            f"{sampling.parts} bands"
        )
    return None
