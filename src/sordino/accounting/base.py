"""The contract of an accountant: which combinations it has a proof for, and the privacy of one of them.

`reason` says in words why a combination is not supported, before anything is computed; nothing is guessed.
`answer_epsilon` and `answer_delta` give what a query costs, tails and failure probability included, and everything else
(reporting, progress) asks them; `calibrate` finds the noise for which `answer_epsilon` is within a budget.

Most accountants have a privacy curve, an upper bound of δ(ε) and of its inverse for noise with unbounded Gaussian
tails, and a term for the finite reach of the real noise: they are `Accountant`s. One that answers every query by itself
is an `AnyAccountant`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..budget import Budget
from ..sampling import Sampling
from ..strategies import Strategy
from .search import least
from .tails import log_kept

LARGEST_EPSILON = 1e18


@dataclass(frozen=True)
class Query:
    """The first `steps` steps of a run with noise of standard deviation `sigma` (times the clip norm) in Z."""

    strategy: Strategy
    sampling: Sampling
    sigma: float
    steps: int
    coarse: bool = False  # for bracketing a search: still an upper bound, only a looser one


@dataclass(frozen=True)
class Answer:
    """(ε, δ) of a query. A random answer misleads with at most `failure_probability`, which is inside `delta`."""

    epsilon: float
    delta: float
    failure_probability: float = 0.0
    samples: int = 0


class Curve(Protocol):
    """An upper bound on the privacy of one mechanism."""

    def delta(self, epsilon: float) -> float: ...

    def epsilon(self, delta: float) -> float: ...


@dataclass(frozen=True)
class Tail:
    """What finite noise adds to δ: `expected` where ``holds(ε)``, `worst` always."""

    expected: float
    worst: float
    holds: Callable[[float], bool]


class AnyAccountant(ABC):
    """One way to account for some combinations of sampling and strategy."""

    name: str
    title: str  # for people
    tolerance: float = 1e-12  # relative, of a calibrated noise multiplier

    @abstractmethod
    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        """Why this combination is not supported, naming the part; None if it is."""

    @abstractmethod
    def answer_epsilon(self, query: Query, delta: float, parameters: int | None) -> Answer:
        """The smallest ε known for δ; inf where there is none."""

    @abstractmethod
    def answer_delta(self, query: Query, epsilon: float, parameters: int | None) -> Answer:
        """The smallest δ known for ε."""

    def calibrate(self, query: Query, budget: Budget, parameters: int | None) -> float:
        """The smallest noise multiplier (to `tolerance`, from above) that answers within the budget."""
        from .gaussian import gaussian_sigma

        def excess(sigma: float, coarse: bool) -> float:
            """ln(δ of the run at this σ and the budget's ε / the budget's δ): at most 0 is enough noise."""
            spent = self.answer_delta(replace(query, sigma=sigma, coarse=coarse), budget.epsilon, parameters).delta
            return math.log(spent / budget.delta) if spent > 0.0 else -math.inf

        # Any start will do; this one is right where nothing is amplified and near where it is.
        start = gaussian_sigma(budget.epsilon, budget.delta)
        coarse = least(lambda sigma: excess(sigma, True), start, tolerance=max(1e-4, self.tolerance), step=2.0)
        sigma = least(lambda sigma: excess(sigma, False), coarse, tolerance=self.tolerance, step=1.002)
        # What is reported is ε at δ, not δ at ε: the same curve read the other way, up to rounding.
        stride = max(1e-12, self.tolerance / 8)
        while self.answer_epsilon(replace(query, sigma=sigma), budget.delta, parameters).epsilon > budget.epsilon:
            # Wider every time, for where one direction has to be answered by a coarser bound than the other.
            sigma, stride = sigma * (1.0 + stride), min(1.0, stride * 1.5)
        return sigma


class Accountant(AnyAccountant):
    """One that has a privacy curve, in which nothing is random."""

    @abstractmethod
    def curve(self, query: Query) -> Curve: ...

    @abstractmethod
    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail: ...

    def released(self, query: Query) -> Query:
        """The query to answer instead: a longer run, where that costs no more to account for."""
        return query

    def answer_epsilon(self, query: Query, delta: float, parameters: int | None) -> Answer:
        return Answer(self.epsilon(query, delta, parameters), delta)

    def answer_delta(self, query: Query, epsilon: float, parameters: int | None) -> Answer:
        return Answer(epsilon, self.delta(query, epsilon, parameters))

    def delta(self, query: Query, epsilon: float, parameters: int | None) -> float:
        """The smallest δ known for ε, tails included."""
        if query.steps == 0 or epsilon == math.inf:
            return 0.0
        if query.sigma <= 0.0:
            return 1.0
        query = self.released(query)
        curve = self.curve(query)
        delta = curve.delta(epsilon)
        if parameters:
            tail = self.tails(query, curve, parameters)
            delta += tail.expected if tail.holds(epsilon) else tail.worst
            kept = math.exp(log_kept(query.steps, parameters))
            delta = delta / kept if kept > 0.0 else 1.0
        return 1.0 if math.isnan(delta) else min(1.0, max(0.0, delta))

    def epsilon(self, query: Query, delta: float, parameters: int | None) -> float:
        """The smallest ε known for δ, tails included; inf where there is none."""
        if query.steps == 0:
            return 0.0
        if query.sigma <= 0.0:
            return math.inf
        query = self.released(query)
        curve = self.curve(query)
        if not parameters:
            return _reported(curve.epsilon(delta))
        tail = self.tails(query, curve, parameters)
        left = delta * math.exp(log_kept(query.steps, parameters))
        for term, needs_check in ((tail.expected, True), (tail.worst, False)):
            if left - term <= 0.0:
                continue
            epsilon = _reported(curve.epsilon(left - term))
            if not needs_check or tail.holds(epsilon):
                return epsilon
        return math.inf


def _reported(epsilon: float) -> float:
    """At least 0; what is not a number, or too large to mean or be printed as anything, is no guarantee."""
    return max(0.0, epsilon) if epsilon <= LARGEST_EPSILON else math.inf
