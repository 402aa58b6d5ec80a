"""Root finding for decreasing functions, always answered from the safe side."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import SordinoError


def narrow(
    excess: Callable[[float], float], low: float, high: float, f_low: float, f_high: float, tolerance: float
) -> float:
    """A point x in [low, high] with excess(x) ≤ 0, within `tolerance` of the least (or of 0 in value).

    Needs f_low > 0 ≥ f_high. False position with halving (Illinois): the excess is ln δ, close to linear over short
    stretches, so few evaluations do; where a value is infinite, or progress is slow, it bisects.
    """
    best, kept, slow = f_high, 0, 0
    while high - low > tolerance and not -tolerance < best:
        width = high - low
        if slow < 3 and math.isfinite(f_low) and math.isfinite(f_high) and f_low > f_high:
            middle = high - f_high * width / (f_high - f_low)
            middle += 0.3 * tolerance  # a little to the safe side, so that the upper end comes down too
            middle = min(max(middle, low + 0.01 * width), high - 0.01 * width)
        else:
            middle, slow = (low + high) / 2, 0
        if not low < middle < high:
            break
        value = excess(middle)
        if value <= 0.0:
            high, f_high, best = middle, value, value
            kept = max(kept, 0) + 1
            if kept > 1:
                f_low /= 2
        else:
            low, f_low = middle, value
            kept = min(kept, 0) - 1
            if kept < -1:
                f_high /= 2
        slow = slow + 1 if high - low > width / 2 else 0
    return high


def least(excess: Callable[[float], float], start: float, *, tolerance: float, step: float) -> float:
    """The least x > 0 with excess(x) ≤ 0, to a relative `tolerance` and from above: bracket, then `narrow`.

    >>> f"{least(lambda x: 2 - x, 1.0, tolerance=1e-9, step=2.0):.6f}"
    '2.000000'
    """

    def at(log: float) -> float:
        return excess(math.exp(log))

    low = high = math.log(start)
    f_low = f_high = at(high)
    stride = math.log(step)
    while f_high > 0.0:  # more
        low, f_low = high, f_high
        high, stride = high + stride, stride * 2.0
        if high > 60.0:
            raise SordinoError(
                "no noise multiplier meets the budget: the noise's finite reach alone costs more δ; raise δ"
            )
        f_high = at(high)
    while f_low <= 0.0:  # less
        high, f_high = low, f_low
        low, stride = low - stride, stride * 2.0
        if low < -60.0:
            return math.exp(high)
        f_low = at(low)
    return math.exp(narrow(at, low, high, f_low, f_high, tolerance))
