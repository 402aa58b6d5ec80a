"""How much noise a budget is going to need, by a pilot alone: where calibrating starts, and to choose by."""

from __future__ import annotations

import math

from ..budget import Budget
from .bins_allowance import Allowance, allowance_of
from .bins_closed import closed_excess, closed_sigma, log_ratio
from .bins_gram import BinsGram
from .bins_pilot import Look, Pilot
from .bins_sampler import Sampler, best_tilt
from .counted import seed
from .search import narrow

STRIDE = 0.1  # of ln σ, on the way down from enough noise
TOLERANCE = 3e-4  # of ln σ
SMALLEST_EPSILON, SMALLEST_DELTA = 0.02, 1e-20  # below, the closed forms answer


def expected_sigma(
    pilot: Pilot, gram: BinsGram, budget: Budget, parameters: int | None, enough: float, tolerance: float = TOLERANCE
) -> float:
    """The σ at which a certified ε is to be expected to be the budget's, searched from above."""

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        allowance = allowance_of(gram, sigma, budget.delta, parameters)
        return expected_excess(pilot.look(sigma), allowance, budget.epsilon)

    if gram.bins == 1 or budget.epsilon < SMALLEST_EPSILON:
        return enough
    top = math.log(enough)
    f_top = excess(top)
    if f_top > 0.0:
        return enough
    low = top - STRIDE
    while (f_low := excess(low)) <= 0.0:
        top, f_top, low = low, f_low, low - STRIDE
    return math.exp(narrow(excess, low, top, f_low, f_top, tolerance))


def expected_excess(look: Look, allowance: Allowance, epsilon: float) -> float:
    """ln of the larger of (the bound to expect/what is left for it), of the two directions."""
    if look.bounds.orders < 1:
        return closed_excess(look.bounds, allowance)(epsilon)
    left, level = allowance.add(epsilon), allowance.level
    remove = log_ratio(look.remove(epsilon, level).expected, allowance.remove())
    add = log_ratio(look.bounds.add(epsilon), left)
    if math.inf > add > max(0.0, remove):
        sampled = look.add(epsilon, level, best_tilt(look.bounds, epsilon), left).expected
        add = min(add, log_ratio(sampled, left))
    return max(remove, add)


def rough_sigma(gram: BinsGram, budget: Budget, parameters: int | None) -> float:
    """The same from a smaller pilot, whose random numbers are the same for every G: candidates compare smoothly."""
    enough = closed_sigma(gram, budget, parameters)
    pilot = Pilot(Sampler(gram.gram), seed("estimate", gram.gram[:1, :1] * 0.0), 1 << 12)
    return expected_sigma(pilot, gram, budget, parameters, enough, tolerance=1e-3)
