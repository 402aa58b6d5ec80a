"""Balls in bins by the closed forms alone: ε, δ and σ with nothing random in them.

They are what coarse queries get, what sampling is compared with, and where a search for less noise starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..budget import Budget
from .bins_allowance import Allowance, allowance_of
from .bins_bounds import BinsBounds, least_epsilon
from .bins_gram import BinsGram
from .gaussian import gaussian_epsilon, gaussian_sigma
from .search import least


def closed_delta(bounds: BinsBounds, allowance: Allowance, epsilon: float) -> float:
    return allowance.exact.total(epsilon, bounds.remove(epsilon), bounds.add(epsilon))


def closed_epsilon(bounds: BinsBounds, allowance: Allowance) -> float:
    """The smallest ε; inf where there is none."""
    allowance = allowance.exact
    left = allowance.remove()
    if left <= 0.0:
        return math.inf
    high = gaussian_epsilon(left, bounds.shift) if left < 1.0 else 0.0
    if high == math.inf or (bounds.bins == 1 and allowance.tail is None):
        return high
    excess = closed_excess(bounds, allowance)
    for _ in range(60):
        if excess(high) <= 0.0:
            return least_epsilon(excess, high)
        high = high * 1.3 + 1e-3  # the add direction's tail term needs more
    return math.inf


def closed_excess(bounds: BinsBounds, allowance: Allowance) -> Callable[[float], float]:
    """ln of the larger of (closed form/what is left for it), of the two directions, at ε."""

    def excess(epsilon: float) -> float:
        remove = log_ratio(bounds.remove(epsilon), allowance.exact.remove())
        return max(remove, log_ratio(bounds.add(epsilon), allowance.exact.add(epsilon)))

    return excess


def closed_sigma(gram: BinsGram, budget: Budget, parameters: int | None) -> float:
    """The smallest σ whose `closed_epsilon` is within the budget."""

    def ask(sigma: float) -> tuple[BinsBounds, Allowance]:
        return BinsBounds(gram.gram, sigma), allowance_of(gram, sigma, budget.delta, parameters)

    start = gaussian_sigma(budget.epsilon, budget.delta) * math.sqrt(float(gram.gram.max()))
    sigma = least(lambda sigma: closed_excess(*ask(sigma))(budget.epsilon), start, tolerance=1e-6, step=1.2)
    stride = 1e-7
    while closed_epsilon(*ask(sigma)) > budget.epsilon:  # the same curve read the other way, up to rounding
        sigma, stride = sigma * (1.0 + stride), stride * 2.0
    return sigma


def log_ratio(value: float, left: float) -> float:
    """ln(value/left), also where one of them is nothing."""
    if left <= 0.0:
        return math.inf
    return math.log(value / left) if value > 0.0 else -math.inf
