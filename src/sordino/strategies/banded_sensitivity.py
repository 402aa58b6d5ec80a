"""The sensitivity of a banded C with entries of any sign, from the band of ``X = CᵀC`` alone: O(T p²) at most.

X_ij = 0 for |i − j| ≥ p. With p ≤ b the columns of a pattern do not overlap, and its sensitivity is the sum of their
squared norms, attained whatever the signs. Otherwise the bounds are those of `sensitivity`, with |X_ij|, restricted
to the band.
"""

from __future__ import annotations

import math

import numpy as np

from ..budget import Participation
from .banded_algebra import cut, gram
from .sensitivity import TOLERANCE, Sensitivity, extend


def banded_sensitivity(columns: np.ndarray, participation: Participation) -> Sensitivity:
    """A sound bound for the leading steps; exact where the columns do not overlap, or X ≥ 0 on the worst pattern."""
    n, b = participation.steps, participation.separation
    if n == 0 or participation.epochs == 0:
        return Sensitivity(0.0, True, "nothing released")
    k = min(participation.epochs, -(-n // b))
    columns = cut(columns[:n])
    if k == 1 or columns.shape[1] <= b or not columns[:, b:].any():
        norms = np.square(columns).sum(axis=1)
        value = _fixed(norms, k, b).max() if participation.fixed else _best(norms, k, b)
        return Sensitivity(math.sqrt(value), True, "columns that do not overlap")
    x = gram(columns)
    if participation.fixed:
        return _patterns(x, k, b)
    if (columns >= 0.0).all() and _leftmost_applies(x, b):
        total = np.zeros(n + columns.shape[1])
        for j in range(0, k * b, b):
            total[j : j + columns.shape[1]] += columns[j] if j < n else 0.0
        return Sensitivity(float(np.linalg.norm(total)), True, "leftmost columns; conditions on CᵀC checked")
    return Sensitivity(math.sqrt(_separated(np.abs(x), k, b)), False, "dynamic programming over gaps")


def _fixed(values: np.ndarray, k: int, b: int) -> np.ndarray:
    """``Σ_{j<k} values[i + jb]`` for every start i; past the end there is nothing."""
    n = len(values)
    padded = np.concatenate([values, np.zeros(-n % b)])
    tail = padded.reshape(-1, b)[::-1].cumsum(axis=0)[::-1].reshape(-1)  # all that follow
    out = tail.copy()
    if k * b < len(padded):
        out[: len(padded) - k * b] -= tail[k * b :]
    return out[:n]


def _best(values: np.ndarray, k: int, b: int) -> float:
    """The largest sum of at most k values at least b apart."""
    n = len(values)
    if values.max() - values[: k * b : b].min() <= 1e-12 * values.max():
        return float(k * values.max())  # unit columns: no pattern is better
    best = np.zeros(n + b)
    for _ in range(k):
        best[:n] = np.maximum.accumulate((values + best[b:])[::-1])[::-1]
    return float(best[0])


def _patterns(x: np.ndarray, k: int, b: int) -> Sensitivity:
    """``max_i Σ_{j,l∈π_i} |X_jl|`` over the patterns i, i+b, …"""
    n, bands = x.shape
    absolute, signed = np.zeros(n), np.zeros(n)
    for lag in range(0, bands, b):
        pairs, twice = k - lag // b, 1.0 if lag == 0 else 2.0
        if pairs > 0:
            absolute += twice * _fixed(np.abs(x[:, lag]), pairs, b)
            signed += twice * _fixed(x[:, lag], pairs, b)
    starts = min(n, b) if k * b >= n else n
    worst = int(np.argmax(absolute[:starts]))
    exact = bool(absolute[worst] - signed[worst] <= TOLERANCE * absolute[worst])
    return Sensitivity(math.sqrt(float(absolute[worst])), exact, "all fixed patterns")


def _leftmost_applies(x: np.ndarray, b: int) -> bool:
    """The conditions of `sensitivity.leftmost_applies` on entries (j, l) = X_{j+l,j}, none of them negative."""
    tolerance = TOLERANCE * float(x.max())
    shifted = np.diff(x, axis=0)  # both participations one step later
    further = np.diff(x[:, b:], axis=1)  # the later one of them
    return bool(
        (shifted[:, 0] <= tolerance).all() and (shifted[:, b:] <= tolerance).all() and (further <= tolerance).all()
    )


def _separated(a: np.ndarray, k: int, b: int) -> float:
    """``max_π Σ_{i∈π} r_i``, r_i = X_ii + the best k−1 further |X_ij| on either side of i with gaps ≥ b."""
    n, bands = a.shape
    most = min(k - 1, -(-(bands - b) // b))  # entries of one side of the band
    ahead = a[:, b:]  # X_{i+b+u, i}
    behind = np.zeros_like(ahead)  # X_{i, i−b−u}
    for u in range(min(bands - b, n - b)):
        behind[b + u :, u] = ahead[: n - b - u, u]
    right, left = _side(ahead, most, b), _side(behind, most, b)
    sides = [right[m] + left[min(most, k - 1 - m)] for m in range(most + 1)]
    return _best(a[:, 0] + np.max(sides, axis=0), k, b)


def _side(a: np.ndarray, most: int, b: int) -> np.ndarray:
    """Entry (m, i): the best sum of at most m of ``a[i]`` with gaps ≥ b."""
    out = np.zeros((most + 1, len(a)))
    best = np.zeros_like(a)
    for m in range(1, most + 1):
        best = extend(a, best, b)
        out[m] = best[:, 0]
    return out
