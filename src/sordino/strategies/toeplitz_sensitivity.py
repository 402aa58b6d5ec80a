"""The sensitivity of ``C = T·diag(s)``, T lower-triangular Toeplitz, in memory linear in the number of steps.

With coefficients c and scales s, X = CᵀC has ``X_{j−d,j} = s_{j−d} s_j R_d(n−j)``, ``R_d(m) = Σ_{l<m} c_l c_{l+d}``.
For s = 1 and C ≥ 0, R_d(m) grows with m, so two of the three conditions of the leftmost-columns formula (DP-λCGD,
Lemma 8's proof) hold by themselves. The third, ``R_{d+1}(m) ≤ R_d(m+1)`` for d ≥ b, reads

    c_0 c_d + Σ_{l=1..m} (c_l − c_{l−1}) c_{l+d} ≥ 0,

and by summation by parts follows from coefficients that do not increase *from lag b on*. Replacing |c_l|, l ≥ b, by
``max_{l'≥l} |c_l'|`` makes any matrix such a one and lowers no entry, and ``|X_ij| ≤ (|C|ᵀ|C|)_ij``: so the leftmost
columns of that majorant bound the sensitivity of every C, whatever its signs, and are the sensitivity itself where
there was nothing to replace.
"""

from __future__ import annotations

import math

import numpy as np

from ..budget import Participation
from .power_series import product
from .sensitivity import TOLERANCE, Sensitivity, separated

_DENSE = 1024  # steps up to which the dense dynamic programme may help where the majorant is not exact
_CHECKED = 8192  # steps up to which the third condition is checked pair by pair, in O(n²)
_ENUMERATED = 10**8  # operations up to which fixed patterns are enumerated


def repeated(c: np.ndarray, k: int, b: int) -> np.ndarray:
    """``Σ_{j<k} c`` moved down by jb: the sum of the columns 0, b, …, (k−1)b.

    >>> repeated(np.array([1.0, 0.5, 0.25, 0.125]), 2, 2)
    array([1.   , 0.5  , 1.25 , 0.625])
    """
    n = len(c)
    if k <= 64:
        out = np.array(c, dtype=np.float64)
        for start in range(b, min(k * b, n), b):
            out[start:] += c[: n - start]
        return out
    sums = np.concatenate([c, np.zeros(-n % b)]).reshape(-1, b).cumsum(axis=0).reshape(-1)[:n]
    if k * b < n:
        sums[k * b :] -= sums[: n - k * b].copy()
    return sums


def leftmost(c: np.ndarray, k: int, b: int) -> float:
    """``‖Σ_{j<k} C[:, jb]‖₂``."""
    return float(np.linalg.norm(repeated(c, k, b)))


def majorant_index(c: np.ndarray, b: int) -> np.ndarray:
    """Of which lag the majorant takes |c| for each lag: its own before b, the largest at or after it from b on.

    >>> majorant_index(np.array([1.0, 0.1, 0.2, -0.3, 0.1]), 2)
    array([0, 1, 3, 3, 4])
    """
    index, tail = np.arange(len(c)), np.abs(c[b:])[::-1]
    record = np.where(tail >= np.maximum.accumulate(tail), np.arange(len(tail)), 0)
    index[b:] = (len(c) - 1 - np.maximum.accumulate(record))[::-1]
    return index


def majorant(c: np.ndarray, b: int) -> np.ndarray:
    """The smallest coefficients ≥ |c| that do not increase from lag b on.

    >>> majorant(np.array([1.0, 0.1, 0.2, -0.3, 0.1]), 2)
    array([1. , 0.1, 0.3, 0.3, 0.1])
    """
    return np.asarray(np.abs(c)[majorant_index(c, b)])


def third_condition(c: np.ndarray, b: int) -> bool:
    """``X_ij ≤ X_{i,j−1}`` for all j − i > b, pair by pair, to `TOLERANCE`."""
    n, steps = len(c), np.diff(c)
    tolerance = TOLERANCE * float(c @ c)
    for d in range(b, n - 1):
        sums = np.cumsum(steps[: n - 1 - d] * c[1 + d :])
        if c[0] * c[d] + sums.min() < -tolerance:
            return False
    return True


def toeplitz_sensitivity(c: np.ndarray, scale: np.ndarray | None, participation: Participation) -> Sensitivity:
    """A sound bound for the leading steps of ``T·diag(scale)``; exact where the route says how."""
    n, b = participation.steps, participation.separation
    if n == 0 or participation.epochs == 0:
        return Sensitivity(0.0, True, "nothing released")
    k = min(participation.epochs, -(-n // b))
    c = c[:n]
    if scale is not None:
        return _scaled(c, scale[:n], k, b, participation.fixed)
    if k == 1 or not c[b:].any():  # X_ij = 0 beyond the diagonal, and X_jj falls with j
        return Sensitivity(leftmost(c, k, b), True, "leftmost columns, which do not overlap")
    nonnegative = bool(c.min() >= -TOLERANCE * float(np.abs(c).max()))
    if participation.fixed:
        if nonnegative:
            return Sensitivity(leftmost(np.abs(c), k, b), True, "leftmost of the fixed patterns")
        return _fixed(c, np.ones(n), k, b) or Sensitivity(leftmost(np.abs(c), k, b), False, "leftmost columns of |C|")
    bound, plain = leftmost(majorant(c, b), k, b), leftmost(np.abs(c), k, b)
    if nonnegative and bound <= plain * (1.0 + 1e-12):
        return Sensitivity(bound, True, "leftmost columns; C ≥ 0, no increase from lag b on")
    if nonnegative and n <= _CHECKED and third_condition(c, b):
        return Sensitivity(plain, True, "leftmost columns; C ≥ 0, conditions on CᵀC checked")
    best = Sensitivity(bound, False, "leftmost columns of a majorant of |C|")
    return _smaller(best, _dense(c, np.ones(n), k, b))


def _scaled(c: np.ndarray, scale: np.ndarray, k: int, b: int, fixed: bool) -> Sensitivity:
    norms = np.square(scale) * np.cumsum(np.square(c))[::-1]  # X_jj
    longest = math.sqrt(float(norms.max()))
    if k == 1 or not c[b:].any():
        value, route = _disjoint(norms, k, b, fixed)
        return Sensitivity(math.sqrt(value), route != "", route or "√k times the longest column")
    raised = np.nonzero(scale > scale[0] * (1.0 + 1e-12))[0]  # of unit columns: the last ones, which the end cuts
    head = int(raised[0]) if len(raised) else len(c)
    value = float(scale[:head].max()) * leftmost(majorant(c, b), k, b)
    value += min(k, -(-(len(c) - head) // b)) * math.sqrt(float(norms[head:].max(initial=0.0)))
    return _smaller(
        Sensitivity(k * longest, False, "k times the longest column"),
        Sensitivity(value, False, "leftmost columns of a majorant of |C|, the last columns apart"),
        _fixed(c, scale, k, b) if fixed else _dense(c, scale, k, b),
    )


def _smaller(*bounds: Sensitivity | None) -> Sensitivity:
    return min((bound for bound in bounds if bound is not None), key=lambda bound: bound.value)


def _disjoint(norms: np.ndarray, k: int, b: int, fixed: bool) -> tuple[float, str]:
    """``max_π Σ_{j∈π} X_jj``, attained: the columns of a pattern do not overlap."""
    n = len(norms)
    if fixed:
        return float(repeated(norms[::-1], k, b).max()), "all fixed patterns, whose columns do not overlap"
    if (np.diff(norms) <= 0.0).all():
        return float(norms[: k * b : b].sum()), "leftmost columns, which do not overlap"
    if norms.max() - norms[: k * b : b].min() <= 1e-12 * norms.max():
        return k * float(norms.max()), "columns of one norm, which do not overlap"
    if n * k > _ENUMERATED:
        return k * float(norms.max()), ""
    best = np.zeros(n + b)  # of at most m columns from j on; the zeros past the end are the end of the run
    for _ in range(k):
        best[:n] = np.maximum.accumulate((norms + best[b : b + n])[::-1])[::-1]
    return float(best[0]), "dynamic programming over columns, which do not overlap"


def _fixed(c: np.ndarray, scale: np.ndarray, k: int, b: int) -> Sensitivity | None:
    """``max_i Σ_{j,l∈π_i} |X_jl|`` over the patterns i, i+b, …; None where there are too many."""
    n = len(c)
    starts = min(n, b) if k * b >= n else n  # fewer than all: an example may also begin later
    if k * (n + k * starts) > _ENUMERATED:
        return None
    total, least = np.zeros(starts), np.full(starts, np.inf)
    first = np.arange(starts)
    for apart in range(k):
        d = apart * b
        if d >= n:
            break
        r = np.concatenate([[0.0], np.cumsum(c[: n - d] * c[d:])])  # R_d(m), m = 0..n−d
        for j in range(apart, k):  # the pair of participations (j − apart, j)
            column = first + j * b
            inside = column < n
            x = np.zeros(starts)
            x[inside] = r[n - column[inside]] * scale[column[inside]] * scale[column[inside] - d]
            total += (2.0 if apart else 1.0) * np.abs(x)
            least = np.minimum(least, x)
    best = int(np.argmax(total))
    exact = bool(least[best] >= -TOLERANCE * total[best])
    return Sensitivity(math.sqrt(float(total[best])), exact, "all fixed patterns")


def _dense(c: np.ndarray, scale: np.ndarray, k: int, b: int) -> Sensitivity | None:
    n = len(c)
    if n > _DENSE:
        return None
    dense = product(c, np.eye(n)) * scale
    return separated(dense.T @ dense, k, b)
