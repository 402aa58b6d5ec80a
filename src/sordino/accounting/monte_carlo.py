"""Balls in bins with any lower-triangular C: Monte Carlo, and never anything but an upper confidence bound.

The dominating pair (docs/balls-in-bins.md says why, and why |C|) is ``mean_i N(m_i, σ²I)`` against ``N(0, σ²I)``. An
answer takes these steps:

1. G of the query's steps (`bins_gram`), and bounds in closed form (`bins_bounds`).
2. A pilot chooses the sampler and the number of samples (`bins_pilot`).
3. Fresh samples, and their empirical Bernstein bound (`bins_certify`). With probability at most β they mislead; β is
   inside δ.

A query has one answer: random numbers come from a hash of it, and answers are round numbers. `calibrate` asks for the
same answers as `account`, so the report of a run is the plan's. They are kept on disk, because they take seconds.

Coarse queries (progress) are answered by the closed forms, for whole epochs: nothing random, a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..budget import Budget
from ..sampling import BallsInBins, Sampling
from ..strategies import Strategy
from ..strategies.cache import Input, cached
from .base import LARGEST_EPSILON, Answer, AnyAccountant, Query
from .bins_bounds import BinsBounds
from .bins_gram import bins_gram

if TYPE_CHECKING:  # needs torch
    from .bins_question import Question

VERSION = 1  # of the answers kept on disk


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
        question = question_of(query)
        if query.coarse:
            allowance = question.allowance(query.sigma, delta, parameters)
            found = Answer(question.closed(BinsBounds(question.gram.gram, query.sigma), allowance.exact), delta)
        else:
            found = kept(question, "epsilon", question.epsilon, query.sigma, delta, parameters)
        return found if found.epsilon <= LARGEST_EPSILON else Answer(math.inf, delta)

    def answer_delta(self, query: Query, epsilon: float, parameters: int | None) -> Answer:
        if query.steps == 0 or epsilon == math.inf:
            return Answer(epsilon, 0.0)
        if query.sigma <= 0.0:
            return Answer(epsilon, 1.0)
        question = question_of(query)
        if query.coarse:
            bounds, allowance = (
                BinsBounds(question.gram.gram, query.sigma),
                question.allowance(query.sigma, 1.0, parameters),
            )
            return Answer(epsilon, allowance.exact.total(epsilon, bounds.remove(epsilon), bounds.add(epsilon)))
        return kept(question, "delta", question.delta, query.sigma, epsilon, parameters)

    def calibrate(self, query: Query, budget: Budget, parameters: int | None) -> float:
        question = question_of(query)

        def answer(epsilon: float, delta: float, parameters: int | None) -> Answer:
            return Answer(question.calibrate(Budget(epsilon, delta), parameters), delta)

        return kept(question, "noise", answer, budget.epsilon, budget.delta, parameters).epsilon


def estimate_noise(strategy: Strategy, sampling: Sampling, budget: Budget, parameters: int | None = None) -> float:
    """The noise multiplier that calibrating would find, to about a per cent and without any guarantee.

    For choosing among strategies, in seconds; what is chosen has to be calibrated.
    """
    query = Query(strategy, sampling, math.nan, strategy.steps)
    if budget.epsilon == math.inf:
        return 0.0
    return question_of(query).noise(budget, parameters)


def question_of(query: Query) -> Question:
    """Progress counts whole epochs: a longer run costs at least as much."""
    bins = query.sampling.participation.separation
    steps = min(query.strategy.steps, -(-query.steps // bins) * bins) if query.coarse else query.steps
    return _question(query.strategy, bins, steps)


@lru_cache(maxsize=2)
def _question(strategy: Strategy, bins: int, steps: int) -> Question:
    from .bins_question import Question

    return Question(bins_gram(strategy, bins, steps), steps)


def kept(
    question: Question,
    kind: str,
    answer: Callable[[float, float, int | None], Answer],
    first: float,
    second: float,
    parameters: int | None,
) -> Answer:
    """The answer, or the same from disk: everything it depends on is in the key."""
    gram = question.gram
    inputs: dict[str, Input] = {
        "version": VERSION,
        "gram": gram.gram,
        "totals": gram.totals,
        "largest": gram.largest,
        "steps": question.steps,
        "first": first,
        "second": second,
        "parameters": parameters or 0,
    }

    def compute() -> dict[str, np.ndarray]:
        found = answer(first, second, parameters)
        return {"answer": np.array([found.epsilon, found.delta, found.failure_probability, found.samples])}

    epsilon, delta, failure, samples = (float(x) for x in cached(f"bins-{kind}", inputs, compute)["answer"])
    return Answer(epsilon, delta, failure, int(samples))
