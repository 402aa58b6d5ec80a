"""Balls in bins with any lower-triangular C: Monte Carlo, and never anything but an upper confidence bound.

The dominating pair (docs/balls-in-bins.md says why, and why |C|) is ``mean_i N(m_i, σ²I)`` against ``N(0, σ²I)``. An
answer takes these steps:

1. G of the query's steps (`bins_gram`), and bounds in closed form (`bins_bounds`).
2. A pilot chooses the sampler and the number of samples (`bins_pilot`).
3. Fresh samples, and their empirical Bernstein bound (`bins_certify`). With probability at most β they mislead; β is
   inside δ (`bins_allowance`).

A query has one answer: random numbers come from a hash of it, and answers are round numbers. `calibrate` asks for the
same answers as `account`, so the report of a run is the plan's. They are kept on disk (`bins_kept`).

Coarse queries (progress) are answered by the closed forms, for whole epochs: nothing random, a fraction of a second.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from ..budget import Budget
from ..sampling import BallsInBins, Sampling
from ..strategies import Strategy
from .base import LARGEST_EPSILON, Answer, AnyAccountant, Query
from .bins_allowance import allowance_of
from .bins_bounds import BinsBounds
from .bins_closed import closed_delta, closed_epsilon
from .bins_gram import BinsGram, bins_gram

if TYPE_CHECKING:  # needs torch
    from .bins_question import Question


class MonteCarlo(AnyAccountant):
    """Balls in bins × any C."""

    name = "monte-carlo"
    title = "Monte Carlo (upper confidence bound)"
    tolerance = 1e-4

    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        if type(sampling) is BallsInBins:
            return None
        return f"the 'monte-carlo' accountant needs sampling='balls-in-bins', not {sampling.name!r}"

    def answer_epsilon(self, query: Query, delta: float, parameters: int | None) -> Answer:
        if query.steps == 0:
            return Answer(0.0, delta)
        if query.sigma <= 0.0:
            return Answer(math.inf, delta)
        if query.coarse:
            gram = gram_of(query)
            allowance = allowance_of(gram, query.sigma, delta, parameters)
            found = Answer(closed_epsilon(BinsBounds(gram.gram, query.sigma), allowance), delta)
        else:
            found = question_of(query).epsilon(query.sigma, delta, parameters)
        return found if found.epsilon <= LARGEST_EPSILON else Answer(math.inf, delta)

    def answer_delta(self, query: Query, epsilon: float, parameters: int | None) -> Answer:
        if query.steps == 0 or epsilon == math.inf:
            return Answer(epsilon, 0.0)
        if query.sigma <= 0.0:
            return Answer(epsilon, 1.0)
        if query.coarse:
            gram = gram_of(query)
            allowance = allowance_of(gram, query.sigma, 1.0, parameters)
            return Answer(epsilon, closed_delta(BinsBounds(gram.gram, query.sigma), allowance, epsilon))
        return question_of(query).delta(query.sigma, epsilon, parameters)

    def calibrate(self, query: Query, budget: Budget, parameters: int | None) -> float:
        return question_of(query).noise(budget, parameters)


def estimate_noise(strategy: Strategy, sampling: Sampling, budget: Budget, parameters: int | None = None) -> float:
    """The noise multiplier that calibrating would find, to about a per cent and without any guarantee.

    For choosing among strategies, in a second or two; what is chosen has to be calibrated.
    """
    from .bins_search import rough_sigma

    if budget.epsilon == math.inf:
        return 0.0
    return rough_sigma(gram_of(Query(strategy, sampling, math.nan, strategy.steps)), budget, parameters)


def gram_of(query: Query) -> BinsGram:
    """Progress counts whole epochs: a longer run costs at least as much."""
    bins = query.sampling.participation.separation
    steps = min(query.strategy.steps, -(-query.steps // bins) * bins) if query.coarse else query.steps
    return bins_gram(query.strategy, bins, steps)


def question_of(query: Query) -> Question:
    return _question(gram_of(query))


@lru_cache(maxsize=2)
def _question(gram: BinsGram) -> Question:
    """Kept for its pilot, which the next query may need."""
    from .bins_question import Question

    return Question(gram)
