"""``‖(A C⁻¹)_t‖²`` for all t where C⁻¹ is Toeplitz, in memory linear in T.

With a Toeplitz workload ``A C⁻¹`` is Toeplitz too, and row t is a running sum of squares:
O(T). A schedule takes O(T·p), p the coefficients of C⁻¹ that are not zero: column j of
``A C⁻¹`` is the response of A's recursion ``x ← αx + η_s w_{s−j}``, ``y ← βy + x``; all
columns step through their p lags together, and from then on they only decay, so that
three running second moments of (x, y) carry them all. Where only the last r rates differ from the others, as with
columns scaled to norm 1, it is O(T·r) by rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .workload import Workload


def error_rows(w: np.ndarray, steps: int, workload: Workload) -> np.ndarray:
    """Squared norms of the rows of ``A W``, W Toeplitz with the first column w (zeros at its end may be left out)."""
    w, rates = w[:steps], workload.rates(steps)
    same = steps if (rates == rates[0]).all() else int(np.argmax(rates != rates[0]))
    if steps - same >= len(w):
        return _by_lag(w, rates, workload)
    w = np.concatenate([w, np.zeros(steps - len(w))])
    sums = workload.sums(w)
    rows = rates[0] ** 2 * np.cumsum(np.square(sums))
    for i, row in enumerate(late_rows(w, sums, rates, same, workload, 0, steps)):
        rows[same + i] = row @ row
    return np.asarray(rows)


def late_rows(
    w: np.ndarray, sums: np.ndarray, rates: np.ndarray, same: int, workload: Workload, first: int, last: int
) -> Iterator[np.ndarray]:
    """The rows of ``A W`` from `same` on, before which the rates are equal; columns T−1−first down to T−last.

    Each is that of equal rates (`sums` is ``A w`` at rate 1) plus the response to what the last rates differ by.
    """
    late = len(w) - same
    padded_w, padded_sums = (np.concatenate([np.zeros(late), a[:last]]) for a in (w, sums))
    x = y = np.zeros(last - first)
    for i in range(late):
        at = slice(first + i + 1, last + i + 1)
        x = workload.shrink * x + (rates[same + i] - rates[0]) * padded_w[at]
        y = workload.momentum * y + x
        yield rates[0] * padded_sums[at] + y


def _by_lag(w: np.ndarray, rates: np.ndarray, workload: Workload) -> np.ndarray:
    steps, alpha, beta = len(rates), workload.shrink, workload.momentum
    rows, x, y = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for lag, coefficient in enumerate(w):  # entry j: the state of column j at step j + lag
        x = alpha * x[: steps - lag] + rates[lag:] * coefficient
        y = beta * y[: steps - lag] + x
        rows[lag:] += np.square(y)
    return rows + moments(x, y, len(w) - 1, steps, alpha, beta)


def moments(x: np.ndarray, y: np.ndarray, lag: int, steps: int, alpha: float, beta: float) -> np.ndarray:
    """What columns add to the rows after their last input, at j + lag, where column j has the state (x_j, y_j)."""

    def at(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(lag), values])

    xx = _running(alpha**2, at(x * x))  # Σ x² over the columns that entered up to t
    xy = _running(alpha * beta, at(x * y) + alpha**2 * _late(xx))
    yy = _running(beta**2, at(y * y) + 2.0 * alpha * beta * _late(xy) + alpha**2 * _late(xx))
    return np.asarray(yy - at(y * y))


def moments_transposed(weights: np.ndarray, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The derivatives of ``weights @ yy`` by what enters xx, xy and yy."""
    yy = _running(beta**2, weights[::-1])
    xy = _running(alpha * beta, 2.0 * alpha * beta * _late(yy))
    xx = _running(alpha**2, alpha**2 * (_late(yy) + _late(xy)))
    return xx[::-1], xy[::-1], yy[::-1]


def _running(factor: float, entering: np.ndarray) -> np.ndarray:
    """``m_t = factor·m_{t−1} + entering_t``."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], [1.0, -factor], entering))


def _late(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values[:-1]])
