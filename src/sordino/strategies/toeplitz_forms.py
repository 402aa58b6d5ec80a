"""The error of ``A C⁻¹`` as a function of the first column w of a Toeplitz ``T⁻¹``, with its gradient, for optimisers.

What is minimised is the mean of the rows' squared norms (``rmse``) or their maximum (``max-se``). Where row T−1 need
not be the largest, the maximum is replaced by the 128-norm, which is at most T^{1/128} above it.
Memory is linear in T, or T·√p with a schedule, or T·p with unit columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .problem import Objective
from .toeplitz_errors import late_rows, moments, moments_transposed
from .workload import Workload

Outer = Callable[[np.ndarray], tuple[float, np.ndarray]]

_NORM = 128.0
_AT_ONCE = 2**24  # numbers kept at a time for the backward pass,
_COLUMNS = 4096  # but of no fewer columns, or the loop over rows costs more


def outer(objective: Objective) -> Outer:
    """The rows' squared norms to one number, and its derivative by each."""

    def mean(rows: np.ndarray) -> tuple[float, np.ndarray]:
        return float(rows.mean()), np.full(len(rows), 1.0 / len(rows))

    def largest(rows: np.ndarray) -> tuple[float, np.ndarray]:
        top = float(rows.max())
        value = top * float(np.power(rows / top, _NORM).sum()) ** (1.0 / _NORM)
        return value, np.power(rows / value, _NORM - 1.0)

    return mean if objective == "rmse" else largest


def plain(w: np.ndarray, steps: int, workload: Workload, objective: Objective) -> tuple[float, np.ndarray]:
    """A Toeplitz workload: O(T). Row T−1 is the largest."""
    weights = np.arange(steps, 0.0, -1.0) / steps if objective == "rmse" else np.ones(steps)
    weights *= float(workload.rates(1)[0]) ** 2
    sums = workload.sums(np.concatenate([w, np.zeros(steps - len(w))]))
    weighted = weights * sums
    return float(weighted @ sums), 2.0 * workload.sums_transposed(weighted)[: len(w)]


def scheduled(
    w: np.ndarray, rates: np.ndarray, workload: Workload, outside: Outer
) -> tuple[float, np.ndarray, np.ndarray]:
    """Any rates: the value, its gradients by w and by the rates, in O(T·len(w)).

    All columns of ``A T⁻¹`` step through their lags together, as in `toeplitz_errors.error_rows`; the way back needs
    the states again, which are computed again between checkpoints.
    """
    steps, p = len(rates), len(w)
    alpha, beta, stride = workload.shrink, workload.momentum, max(1, math.isqrt(2 * p))

    def forward(x: np.ndarray, y: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
        x = alpha * x[: steps - lag] + rates[lag:] * w[lag]
        return x, beta * y[: steps - lag] + x

    rows, x, y, checkpoints = np.zeros(steps), np.zeros(steps), np.zeros(steps), []
    for lag in range(p):
        if lag % stride == 0:
            checkpoints.append((x, y))
        x, y = forward(x, y, lag)
        rows[lag:] += np.square(y)
    value, weights = outside(rows + moments(x, y, p - 1, steps, alpha, beta))
    xx, xy, yy = moments_transposed(weights, alpha, beta)
    gx = 2.0 * x * xx[p - 1 :] + y * xy[p - 1 :]
    gy = 2.0 * y * (yy - weights)[p - 1 :] + x * xy[p - 1 :]
    by_w, by_rates = np.zeros(p), np.zeros(steps)
    for block in reversed(range(len(checkpoints))):
        x, y = checkpoints.pop()
        lags, ys = range(block * stride, min((block + 1) * stride, p)), []
        for lag in lags:
            x, y = forward(x, y, lag)
            ys.append(y)
        for lag in reversed(lags):
            gy = gy + 2.0 * weights[lag:] * ys.pop()
            gx = gx + gy
            by_w[lag] = rates[lag:] @ gx
            by_rates[lag:] += w[lag] * gx
            gx, gy = np.append(alpha * gx, 0.0), np.append(beta * gy, 0.0)
    return value, by_w, by_rates


def unit_columns(
    w: np.ndarray, rates: np.ndarray, same: int, workload: Workload, outside: Outer
) -> tuple[float, np.ndarray, np.ndarray]:
    """Rates whose first `same` entries are equal: value and gradients in O(T·(T − same)).

    Rows before `same` are running sums of squares of the Toeplitz case; the others are computed one by one, for
    all columns together, as the Toeplitz part plus the response to what the last rates differ by.
    """
    steps, head, late = len(w), float(rates[0]), len(rates) - same
    alpha, beta, differ = workload.shrink, workload.momentum, rates[same:] - rates[0]
    sums = workload.sums(w)
    padded_w, padded_sums = (np.concatenate([np.zeros(late), a]) for a in (w, sums))
    rows = head**2 * np.cumsum(np.square(sums))
    rows[same:] = 0.0
    by_padded_w, by_padded_sums = np.zeros_like(padded_w), np.zeros_like(padded_sums)
    by_head, by_differ = 0.0, np.zeros(late)
    size = max(_COLUMNS, _AT_ONCE // max(1, late))
    chunks = [(first, min(first + size, steps)) for first in range(0, steps, size)]  # of columns, the last one first
    kept: list[np.ndarray] = []
    for first, last in chunks:
        kept = list(late_rows(w, sums, rates, same, workload, first, last))
        rows[same:] += [float(row @ row) for row in kept]
    value, weights = outside(rows)
    for first, last in chunks:
        if len(chunks) > 1:
            kept = list(late_rows(w, sums, rates, same, workload, first, last))
        gx = gy = np.zeros(last - first)
        for i in reversed(range(late)):
            at = slice(first + i + 1, last + i + 1)
            g = 2.0 * weights[same + i] * kept[i]
            gy = g + beta * gy
            gx = gy + alpha * gx
            by_differ[i] += gx @ padded_w[at]
            by_padded_w[at] += differ[i] * gx
            by_padded_sums[at] += head * g
            by_head += float(g @ padded_sums[at])
    later = np.cumsum(weights[:same][::-1])[::-1]  # of the rows from this one to the last of the first
    by_sums = by_padded_sums[late:]
    by_sums[:same] += 2.0 * head**2 * later * sums[:same]
    by_head += 2.0 * head * float(later @ np.square(sums[:same])) - float(by_differ.sum())
    by_rates = np.zeros(steps)
    by_rates[0], by_rates[same:] = by_head, by_differ
    return value, by_padded_w[late:] + workload.sums_transposed(by_sums), by_rates
