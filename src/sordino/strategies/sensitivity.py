"""How far one example can move the released sums: the multi-participation sensitivity of a matrix.

If one example contributes vectors of norm at most 1 at the steps of a pattern π,
the noised quantity ``C G`` moves by at most ``√(Σ_{i,j∈π} |X_ij|)``, X = CᵀC, with
equality (all contributions equal) where X ≥ 0 on π. Signs are never used to
*lower* a bound: contributions are vectors and may be chosen adaptively, so a
negative X_ij helps the adversary as much as a positive one.

Everything here works on a dense X or C; a strategy with a closed form overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..budget import Participation

TOLERANCE = 1e-10  # inverses computed by FFT return -1e-17 where they mean 0


@dataclass(frozen=True)
class Sensitivity:
    """A bound on the sensitivity, whether it is attained, and how it was found."""

    value: float
    exact: bool
    route: str


def sensitivity_of(c: np.ndarray, participation: Participation) -> Sensitivity:
    """The best sound bound known here for the leading ``steps × steps`` block of C."""
    n, k, b = participation.steps, participation.epochs, participation.separation
    if n == 0 or k == 0:
        return Sensitivity(0.0, True, "nothing released")
    c = np.asarray(c, dtype=np.float64)[:n, :n]
    x = c.T @ c
    if participation.fixed:
        return fixed_order(x, k, b)
    if leftmost_applies(c, b):
        return Sensitivity(leftmost(c, k, b), True, "leftmost columns")
    return separated(x, k, b)


def fixed_order(x: np.ndarray, k: int, b: int) -> Sensitivity:
    """Patterns i, i+b, …: enumerate them, ``max_i Σ_{j,l∈π_i} |X_jl|``."""
    n = len(x)
    best, exact = 0.0, True
    for start in range(min(n, b) if k * b >= n else n):  # fewer than all: an example may also begin later
        pattern = np.arange(start, n, b)[:k]
        block = x[np.ix_(pattern, pattern)]
        value = float(np.abs(block).sum())
        if value > best:
            best, exact = value, bool((block >= -TOLERANCE).all())
    return Sensitivity(float(np.sqrt(best)), exact, "all fixed patterns")


def leftmost_applies(c: np.ndarray, b: int) -> bool:
    """The three conditions under which the leftmost pattern is the worst (the steps of DP-λCGD, Lemma 8).

    C ≥ 0, and X_jj ≤ X_{j−1,j−1}; X_ij ≤ X_{i−1,j−1} for j−i ≥ b; X_ij ≤ X_{i,j−1} for j−i > b.
    """
    x = c.T @ c
    tolerance = TOLERANCE * float(np.abs(x).max())  # relative: a C of any size is judged alike
    if (c < -TOLERANCE * float(np.abs(c).max())).any() or (np.diff(np.diagonal(x)) > tolerance).any():
        return False
    far = np.triu(np.ones_like(x, dtype=bool), b)
    further = np.triu(np.ones_like(x, dtype=bool), b + 1)
    down = (x[1:, 1:] - x[:-1, :-1] > tolerance) & far[1:, 1:]
    right = (x[:, 1:] - x[:, :-1] > tolerance) & further[:, 1:]
    return not (down.any() or right.any())


def leftmost(c: np.ndarray, k: int, b: int) -> float:
    """``‖Σ_{j<k} C[:, jb]‖₂``: sound only where `leftmost_applies`."""
    return float(np.linalg.norm(c[:, 0 : k * b : b].sum(axis=1)))


def separated(x: np.ndarray, k: int, b: int) -> Sensitivity:
    """Gaps of at least b, any signs: ``max_π Σ_{i∈π} r_i`` by dynamic programming.

    r_i = |X_ii| + the best k−1 further |X_ij| on either side of i with gaps ≥ b. Each r_i is at
    least what i contributes to Σ_{i,j∈π} |X_ij|, whichever admissible π it belongs to. The bound
    is attained where nothing lies outside the band of width b (then it is Σ X_ii) and X ≥ 0.
    """
    n = len(x)
    a = np.abs(x)
    k = min(k, -(-n // b))
    right = _best_ahead(a, k, b)  # (k, n): m further entries to the right of i
    left = _best_ahead(a[::-1, ::-1], k, b)[:, ::-1]
    r = np.diagonal(a) + np.max(right + left[::-1], axis=0)  # m to the right, k−1−m to the left
    best = _best_sum(r[None, :], k, b)[0, 0]
    banded = b >= n or not (np.triu(a, b) > 0).any()
    return Sensitivity(float(np.sqrt(best)), banded, "dynamic programming over gaps")


def _best_ahead(a: np.ndarray, k: int, b: int) -> np.ndarray:
    """Entry (m, i): the best sum of at most m of ``a[i, i+b:]`` with gaps ≥ b."""
    n = len(a)
    out = np.zeros((k, n))
    rows = np.arange(max(0, n - b))
    best = np.zeros_like(a)  # best[i, j]: at most m entries from column j on
    for m in range(1, k):
        best = extend(a, best, b)
        out[m, rows] = best[rows, rows + b]
    return out


def _best_sum(a: np.ndarray, k: int, b: int) -> np.ndarray:
    best = np.zeros_like(a)
    for _ in range(k):
        best = extend(a, best, b)
    return best


def extend(a: np.ndarray, best: np.ndarray, b: int) -> np.ndarray:
    """One entry more: ``max_{j' ≥ j} a[:, j'] + best[:, j'+b]``, as a running maximum from the right."""
    taken = a.copy()
    taken[:, : max(0, a.shape[1] - b)] += best[:, b:]
    return np.maximum.accumulate(taken[:, ::-1], axis=1)[:, ::-1]
