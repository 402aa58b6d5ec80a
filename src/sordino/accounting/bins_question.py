"""Balls in bins with one G: its certified ε at δ, its certified δ at ε, and the noise for a budget.

Each answer goes closed form → pilot → certification, and is never worse than the closed form. See `monte_carlo` for
what the pieces are, `bins_certify` for what makes the result valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..budget import Budget
from .base import Answer
from .bins_allowance import ATTEMPTS, Allowance, allowance_of, failure_probability
from .bins_bounds import BinsBounds, least_epsilon
from .bins_certify import candidates, draw, refined, slope_of, smallest
from .bins_closed import closed_delta, closed_epsilon, closed_sigma, log_ratio
from .bins_gram import BinsGram
from .bins_kept import kept
from .bins_pilot import Choice, Pilot
from .bins_sampler import Sampler, best_tilt
from .bins_search import SMALLEST_DELTA, SMALLEST_EPSILON, expected_excess, expected_sigma
from .counted import seed

GAIN = 0.998  # what sampling must promise, as a share of the ε of the closed forms
DIGITS = 5  # of a calibrated σ
SMALLEST_FAILURE = 1e-30


@dataclass(frozen=True)
class Expected:
    """Where the certified ε is going to be, and what will be drawn for it."""

    epsilon: float
    slope: float  # −d ln δ/dε
    error: float  # relative, of δ
    remove: Choice
    add: Choice | None


class Question:
    """What can be asked of one G."""

    def __init__(self, gram: BinsGram) -> None:
        self.gram = gram

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.gram.gram)

    @cached_property
    def pilot(self) -> Pilot:
        return Pilot(self.sampler, seed("pilot", self.gram.gram), 1 << 14)

    def epsilon(self, sigma: float, delta: float, parameters: int | None) -> Answer:
        """The smallest certified ε."""
        asked = (sigma, delta, float(parameters or 0))
        return kept("epsilon", self.gram, asked, lambda: self._epsilon(sigma, delta, parameters))

    def delta(self, sigma: float, epsilon: float, parameters: int | None) -> Answer:
        """The smallest certified δ, rounded up to four digits where it was sampled."""
        asked = (sigma, epsilon, float(parameters or 0))
        return kept("delta", self.gram, asked, lambda: self._delta(sigma, epsilon, parameters))

    def noise(self, budget: Budget, parameters: int | None) -> float:
        """A noise multiplier whose `epsilon` is within the budget."""
        asked = (budget.epsilon, budget.delta, float(parameters or 0))
        # An answer with σ for its ε.
        return kept("noise", self.gram, asked, lambda: Answer(self._noise(budget, parameters), budget.delta)).epsilon

    def _epsilon(self, sigma: float, delta: float, parameters: int | None) -> Answer:
        allowance = allowance_of(self.gram, sigma, delta, parameters)
        bounds = BinsBounds(self.gram.gram, sigma)
        closed = closed_epsilon(bounds, allowance)
        expected = self._expect(sigma, allowance, closed)
        if expected is None:
            return Answer(closed, delta)
        certificate = draw(self.sampler, sigma, bounds, allowance.level, expected.remove, expected.add, delta)
        found = smallest(certificate, allowance, candidates(expected.epsilon, expected.slope, closed))
        return Answer(min(found, closed), delta, allowance.beta, certificate.samples)

    def _delta(self, sigma: float, epsilon: float, parameters: int | None) -> Answer:
        bounds = BinsBounds(self.gram.gram, sigma)
        allowance = allowance_of(self.gram, sigma, 1.0, parameters)
        closed = closed_delta(bounds, allowance, epsilon)
        without = max(bounds.remove(epsilon), bounds.add(epsilon))  # the tails: what sampling could improve on
        if self.gram.bins == 1 or bounds.orders < 1 or epsilon < SMALLEST_EPSILON:
            return Answer(epsilon, closed)
        if without < max(SMALLEST_DELTA, (1.0 - GAIN) * closed):
            return Answer(epsilon, closed)
        look = self.pilot.look(sigma)
        rough = min(closed, look.remove(epsilon, failure_probability(closed) / ATTEMPTS).expected)
        allowance = replace(allowance, beta=_power_of_ten(failure_probability(rough)))
        remove, add = look.remove(epsilon, allowance.level), None
        if bounds.add(epsilon) > remove.expected:
            add = look.add(epsilon, allowance.level, best_tilt(bounds, epsilon), remove.expected)
        certificate = draw(self.sampler, sigma, bounds, allowance.level, remove, add, epsilon)
        found = allowance.total(epsilon, certificate.remove(epsilon), certificate.add(epsilon))
        return Answer(epsilon, min(closed, _round_up(found, 4)), allowance.beta, certificate.samples)

    def _noise(self, budget: Budget, parameters: int | None) -> float:
        """The pilot's σ, corrected and certified, at most ``ATTEMPTS`` times; else what the closed forms say."""
        enough = closed_sigma(self.gram, budget, parameters)
        sigma = expected_sigma(self.pilot, self.gram, budget, parameters, enough)
        allowance, look = allowance_of(self.gram, sigma, budget.delta, parameters), self.pilot.look(sigma)
        expected = self._expect(sigma, allowance, closed_epsilon(look.bounds, allowance))
        if expected is None:
            return enough
        more = expected_excess(self.pilot.look(sigma * 1.01), allowance, budget.epsilon)
        steep = max(1.0, (expected_excess(look, allowance, budget.epsilon) - more) / math.log(1.01))  # −d ln δ/d ln σ
        # A narrow margin first: what fails says how much is missing, to a per cent of δ.
        found, margin = expected.epsilon, 0.5 * expected.error + 0.002
        for _ in range(ATTEMPTS):
            missing = expected.slope * (found - budget.epsilon)
            sigma = _round_up(sigma * math.exp((missing + margin) / steep), DIGITS)
            if sigma >= enough:
                break
            found = self.epsilon(sigma, budget.delta, parameters).epsilon
            if found <= budget.epsilon:
                return sigma
            margin = max(2.0 * margin, 1.5 * expected.remove.error_of_all + 0.002)
        return enough

    def _expect(self, sigma: float, allowance: Allowance, closed: float) -> Expected | None:
        """Two pilots; None where the closed forms are as good."""
        left, level = allowance.remove(), allowance.level
        if self.gram.bins == 1 or not SMALLEST_EPSILON < closed < math.inf or left <= 0.0:
            return None
        look = self.pilot.look(sigma)
        if look.bounds.orders < 1:
            return None
        epsilon = least_epsilon(lambda e: log_ratio(look.remove(e, level).expected, left), closed, 1e-4)
        remove = look.remove(epsilon, level)
        samples = refined(self.sampler, sigma, look.bounds, remove)
        epsilon = least_epsilon(lambda e: log_ratio(samples.moments(e).bound(level, remove.count), left), closed, 1e-5)
        error, add = math.hypot(samples.moments(epsilon).error, remove.error_of_all), None
        if look.bounds.add(epsilon) > allowance.add(epsilon):
            tilt = best_tilt(look.bounds, epsilon)

            def excess(e: float) -> float:
                target = allowance.add(e)
                return log_ratio(min(look.bounds.add(e), look.add(e, level, tilt, target).expected), target)

            other = least_epsilon(excess, closed, 1e-5)
            decides, epsilon = other > epsilon, max(epsilon, other)
            add = look.add(epsilon, level, tilt, allowance.add(epsilon))
            error = max(error, add.error) if decides else error
        if epsilon > GAIN * closed:
            return None
        return Expected(epsilon, slope_of(lambda e: samples.moments(e).estimate, epsilon), error, remove, add)


def _round_up(value: float, digits: int) -> float:
    """Up to so many digits.

    >>> _round_up(4.2374001, 5), _round_up(1.23e-5, 4)
    (4.2375, 1.23e-05)
    """
    if not 0.0 < value < math.inf:
        return value
    places = digits - 1 - math.floor(math.log10(value))
    scaled = round(value * 10.0**places, 6)  # a value that is already round stays
    return float(f"{math.ceil(scaled)}e{-places}")


def _power_of_ten(value: float) -> float:
    """The power of ten at or below."""
    return 10.0 ** math.floor(math.log10(max(value, SMALLEST_FAILURE)) + 1e-9)
