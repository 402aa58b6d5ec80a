"""The contract of an accountant: which combinations it has a proof for, and the privacy curve of one of them.

`reason` says in words why a combination is not supported, before anything is computed;
nothing is guessed. `curve` gives an upper bound of δ(ε), and of its inverse, for noise with
unbounded Gaussian tails; `tails` says what the finite reach of the real noise adds. `delta` and
`epsilon` put the two together, and everything else (calibrating, reporting, progress) goes through them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..sampling import Sampling
from ..strategies import Strategy
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


class Accountant(ABC):
    """One way to account for some combinations of sampling and strategy."""

    name: str
    title: str  # for people
    tolerance: float = 1e-12  # relative, of a calibrated noise multiplier
    failure_probability: float = 0.0

    @abstractmethod
    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        """Why this combination is not supported, naming the part; None if it is."""

    @abstractmethod
    def curve(self, query: Query) -> Curve: ...

    @abstractmethod
    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail: ...

    def released(self, query: Query) -> Query:
        """The query to answer instead: a longer run, where that costs no more to account for."""
        return query

    def delta(self, query: Query, epsilon: float, parameters: int | None) -> float:
        """The smallest δ known for ε, tails and failure probability included."""
        if query.steps == 0 or epsilon == math.inf:
            return 0.0
        if query.sigma <= 0.0:
            return 1.0
        query = self.released(query)
        curve = self.curve(query)
        delta = curve.delta(epsilon) + self.failure_probability
        if parameters:
            tail = self.tails(query, curve, parameters)
            delta += tail.expected if tail.holds(epsilon) else tail.worst
            kept = math.exp(log_kept(query.steps, parameters))
            delta = delta / kept if kept > 0.0 else 1.0
        return 1.0 if math.isnan(delta) else min(1.0, max(0.0, delta))

    def epsilon(self, query: Query, delta: float, parameters: int | None) -> float:
        """The smallest ε known for δ, tails and failure probability included; inf where there is none."""
        if query.steps == 0:
            return 0.0
        if query.sigma <= 0.0:
            return math.inf
        query = self.released(query)
        curve = self.curve(query)
        left = delta - self.failure_probability
        if not parameters:
            return _reported(curve.epsilon(left)) if left > 0 else math.inf
        tail = self.tails(query, curve, parameters)
        left = left * math.exp(log_kept(query.steps, parameters))
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
