"""``‖(A C⁻¹)_t‖²`` for all t where C⁻¹ is Toeplitz, in memory linear in T.

With a Toeplitz workload ``A C⁻¹`` is Toeplitz too, and row t is a running sum of squares:
O(T). A schedule takes O(T·p), p the coefficients of C⁻¹ that are not zero: column j of
``A C⁻¹`` is the response of A's recursion ``x ← αx + η_s w_{s−j}``, ``y ← βy + x``; all
columns step through their p lags together, and from then on they only decay, so that
three running second moments of (x, y) carry them all.
"""

from __future__ import annotations

import numpy as np

from .workload import Workload


def error_rows(w: np.ndarray, steps: int, workload: Workload) -> np.ndarray:
    """Squared norms of the rows of ``A W``, W Toeplitz with the first column w (zeros at its end may be left out)."""
    w = w[:steps]
    if workload.is_toeplitz:
        padded = np.concatenate([w, np.zeros(steps - len(w))])
        rate = float(workload.rates(steps)[0])
        return np.asarray(rate**2 * np.cumsum(np.square(workload.sums(padded))))
    alpha, beta, rates = workload.shrink, workload.momentum, workload.rates(steps)
    rows, x, y = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for lag, coefficient in enumerate(w):  # entry j: the state of column j at step j + lag
        x = alpha * x[: steps - lag] + rates[lag:] * coefficient
        y = beta * y[: steps - lag] + x
        rows[lag:] += np.square(y)
    return rows + _decaying(x, y, len(w) - 1, steps, alpha, beta)


def _decaying(x: np.ndarray, y: np.ndarray, lag: int, steps: int, alpha: float, beta: float) -> np.ndarray:
    """What columns add to the rows after their last input, at j + lag, where column j has the state (x_j, y_j)."""
    from scipy.signal import lfilter

    def running(factor: float, entering: np.ndarray, carried: np.ndarray) -> np.ndarray:
        """``m_t = factor·m_{t−1} + entering_t + carried_{t−1}``."""
        return np.asarray(lfilter([1.0], [1.0, -factor], entering + np.concatenate([[0.0], carried[:-1]])))

    def at(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(lag), values])

    none = np.zeros(steps)
    xx = running(alpha**2, at(x * x), none)  # Σ x² over the columns that entered up to t
    xy = running(alpha * beta, at(x * y), alpha**2 * xx)
    yy = running(beta**2, at(y * y), 2.0 * alpha * beta * xy + alpha**2 * xx)
    return yy - at(y * y)
