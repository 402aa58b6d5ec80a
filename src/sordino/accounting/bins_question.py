"""Balls in bins with one G: its certified ε at δ, its certified δ at ε, and the noise for a budget.

Each answer goes closed form → pilot → certification, and is never worse than the closed form. See `monte_carlo` for
what the pieces are, `bins_certify` for what makes the result valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..budget import Budget
from .base import Answer
from .bins_bounds import BinsBounds, least_epsilon
from .bins_certify import (
    ATTEMPTS,
    Allowance,
    candidates,
    draw,
    failure_probability,
    refined,
    slope_of,
    smallest,
)
from .bins_gram import BinsGram
from .bins_pilot import Choice, Look, Pilot
from .bins_sampler import Sampler, best_tilt
from .bins_tails import bins_tail
from .gaussian import gaussian_epsilon, gaussian_sigma
from .search import least, narrow
from .tails import log_kept

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

    def __init__(self, gram: BinsGram, steps: int) -> None:
        self.gram, self.steps = gram, steps

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.gram.gram)

    @cached_property
    def pilot(self) -> Pilot:
        return Pilot(self.sampler)

    def epsilon(self, sigma: float, delta: float, parameters: int | None) -> Answer:
        """The smallest certified ε."""
        allowance = self.allowance(sigma, delta, parameters)
        bounds = BinsBounds(self.gram.gram, sigma)
        closed = self.closed(bounds, allowance.exact)
        expected = self._expect(sigma, allowance, closed)
        if expected is None:
            return Answer(closed, delta)
        certificate = draw(self.sampler, sigma, bounds, allowance.level, expected.remove, expected.add, delta)
        found = smallest(certificate, allowance, candidates(expected.epsilon, expected.slope, closed))
        return Answer(min(found, closed), delta, allowance.beta, certificate.samples)

    def delta(self, sigma: float, epsilon: float, parameters: int | None) -> Answer:
        """The smallest certified δ, rounded up to four digits where it was sampled."""
        bounds = BinsBounds(self.gram.gram, sigma)
        allowance = self.allowance(sigma, 1.0, parameters)
        closed = allowance.exact.total(epsilon, bounds.remove(epsilon), bounds.add(epsilon))
        if not self._worth_sampling(bounds) or closed <= 0.0:
            return Answer(epsilon, closed)
        look = self.pilot.look(sigma)
        rough = look.remove(epsilon, failure_probability(closed) / ATTEMPTS)
        allowance = replace(allowance, beta=_power_of_ten(failure_probability(min(closed, rough.expected))))
        remove = look.remove(epsilon, allowance.level)
        add = None
        if bounds.add(epsilon) > remove.expected:
            add = look.add(epsilon, allowance.level, best_tilt(bounds, epsilon), remove.expected)
        certificate = draw(self.sampler, sigma, bounds, allowance.level, remove, add, epsilon)
        found = allowance.total(epsilon, certificate.remove(epsilon), certificate.add(epsilon))
        found = _round_up(found, 4)
        return Answer(epsilon, min(found, closed), allowance.beta, certificate.samples)

    def noise(self, budget: Budget, parameters: int | None) -> float:
        """The σ at which `epsilon` is to be expected to answer with the budget's, by the pilot alone. An estimate."""
        high = self.enough(budget, parameters)
        if not self._worth_sampling(BinsBounds(self.gram.gram, high)):
            return high

        def excess(log_sigma: float) -> float:
            sigma = math.exp(log_sigma)
            return self._excess(self.pilot.look(sigma), self.allowance(sigma, budget.delta, parameters), budget.epsilon)

        top, f_high = math.log(high), excess(math.log(high))
        if f_high > 0.0:
            return high
        low = top - 0.1
        while (f_low := excess(low)) <= 0.0:
            top, f_high, low = low, f_low, low - 0.1
        return math.exp(narrow(excess, low, top, f_low, f_high, 3e-4))

    def calibrate(self, budget: Budget, parameters: int | None) -> float:
        """A σ whose certified ε is within the budget: the estimate, corrected, and tried at most ``ATTEMPTS`` times."""
        sigma, enough = self.noise(budget, parameters), self.enough(budget, parameters)
        steep, found = 1.0, math.inf
        for attempt in range(ATTEMPTS):
            allowance = self.allowance(sigma, budget.delta, parameters)
            look = self.pilot.look(sigma)
            closed = self.closed(look.bounds, allowance.exact)
            expected = self._expect(sigma, allowance, closed)
            if expected is None:
                break
            if attempt == 0:
                ahead = self._excess(self.pilot.look(sigma * 1.01), allowance, budget.epsilon)
                steep = max(1.0, (self._excess(look, allowance, budget.epsilon) - ahead) / math.log(1.01))
                excess, margin = expected.slope * (expected.epsilon - budget.epsilon), 1.5 * expected.error + 0.005
            else:
                excess, margin = expected.slope * (found - budget.epsilon), 0.01 * 2.0**attempt
            sigma = _round_up(sigma * math.exp((excess + margin) / steep), DIGITS)
            if sigma >= enough:
                break
            found = self.epsilon(sigma, budget.delta, parameters).epsilon
            if found <= budget.epsilon:
                return sigma
        return enough

    def allowance(self, sigma: float, delta: float, parameters: int | None) -> Allowance:
        beta = failure_probability(delta)
        if not parameters:
            return Allowance(delta, beta)
        return Allowance(
            delta, beta, math.exp(log_kept(self.steps, parameters)), bins_tail(self.gram, sigma, parameters)
        )

    def closed(self, bounds: BinsBounds, allowance: Allowance) -> float:
        """The smallest ε by the closed forms; inf where there is none."""
        left = allowance.remove()
        if left <= 0.0:
            return math.inf
        if bounds.bins == 1 and allowance.tail is None:
            return gaussian_epsilon(left, bounds.shift)
        high = gaussian_epsilon(left, bounds.shift) if left < 1.0 else 0.0
        excess = closed_excess(bounds, allowance)
        for _ in range(60):
            if not high < math.inf or excess(high) <= 0.0:
                break
            high = high * 1.3 + 1e-3  # the add direction's tail term needs more
        else:
            return math.inf
        return high if high in (0.0, math.inf) else least_epsilon(excess, high)

    def enough(self, budget: Budget, parameters: int | None) -> float:
        """The smallest σ by the closed forms."""

        def excess(sigma: float) -> float:
            return closed_excess(BinsBounds(self.gram.gram, sigma), allowance(sigma))(budget.epsilon)

        def allowance(sigma: float) -> Allowance:
            return self.allowance(sigma, budget.delta, parameters).exact

        start = gaussian_sigma(budget.epsilon, budget.delta) * math.sqrt(float(self.gram.gram.max()))
        sigma, stride = least(excess, start, tolerance=1e-6, step=1.2), 1e-7
        while self.closed(BinsBounds(self.gram.gram, sigma), allowance(sigma)) > budget.epsilon:
            sigma, stride = sigma * (1.0 + stride), stride * 2.0
        return sigma

    def _worth_sampling(self, bounds: BinsBounds) -> bool:
        return self.gram.bins > 1 and bounds.orders >= 1

    def _excess(self, look: Look, allowance: Allowance, epsilon: float) -> float:
        """ln of the larger of (the bound to expect/what is left for it), of the two directions."""
        remove, add = allowance.remove(), allowance.add(epsilon)
        if min(remove, add) <= 0.0:
            return math.inf
        worst = _log_ratio(look.remove(epsilon, allowance.level).expected, remove)
        closed = _log_ratio(look.bounds.add(epsilon), add)
        if closed > max(0.0, worst):
            closed = min(
                closed,
                _log_ratio(look.add(epsilon, allowance.level, best_tilt(look.bounds, epsilon), add).expected, add),
            )
        return max(worst, closed)

    def _expect(self, sigma: float, allowance: Allowance, closed: float) -> Expected | None:
        """Two pilots; None where the closed forms are as good."""
        look = self.pilot.look(sigma)
        left = allowance.remove()
        if closed in (0.0, math.inf) or left <= 0.0 or not self._worth_sampling(look.bounds):
            return None
        level = allowance.level
        epsilon = least_epsilon(lambda e: _log_ratio(look.remove(e, level).expected, left), closed, 1e-4)
        remove = look.remove(epsilon, level)
        samples = refined(self.sampler, sigma, look.bounds, remove)
        epsilon = least_epsilon(lambda e: _log_ratio(samples.moments(e).bound(level, remove.count), left), closed, 1e-5)
        error, add = math.hypot(samples.moments(epsilon).error, remove.error_of_all), None
        if look.bounds.add(epsilon) > allowance.add(epsilon):
            tilt = best_tilt(look.bounds, epsilon)

            def excess(e: float) -> float:
                closed_form = look.bounds.add(e)
                return _log_ratio(
                    min(closed_form, look.add(e, level, tilt, allowance.add(e)).expected), allowance.add(e)
                )

            epsilon = max(epsilon, least_epsilon(excess, closed, 1e-5))
            add = look.add(epsilon, level, tilt, allowance.add(epsilon))
            error = max(error, add.error)
        if epsilon > GAIN * closed:
            return None
        return Expected(epsilon, slope_of(lambda e: samples.moments(e).estimate, epsilon), error, remove, add)


def closed_excess(bounds: BinsBounds, allowance: Allowance) -> Callable[[float], float]:
    """ln of the larger of (closed form/what is left for it), of the two directions, at ε."""

    def excess(epsilon: float) -> float:
        return max(
            _log_ratio(bounds.remove(epsilon), allowance.remove()),
            _log_ratio(bounds.add(epsilon), allowance.add(epsilon)),
        )

    return excess


def _log_ratio(value: float, left: float) -> float:
    if left <= 0.0:
        return math.inf
    return math.log(value / left) if value > 0.0 else -math.inf


def _round_up(value: float, digits: int) -> float:
    """Up to so many digits.

    >>> _round_up(4.2374001, 5), _round_up(1.23e-5, 4)
    (4.2375, 1.23e-05)
    """
    if not 0.0 < value < math.inf:
        return value
    places = digits - 1 - math.floor(math.log10(value))
    scaled = round(value * 10.0**places, 3)  # a value that is already round stays
    return float(f"{math.ceil(scaled)}e{-places}")


def _power_of_ten(value: float) -> float:
    """The power of ten at or below."""
    return 10.0 ** math.floor(math.log10(max(value, SMALLEST_FAILURE)) + 1e-9)
