"""The best banded C with unit columns: minimise f(X) over ``X = CᵀC``, diag X = 1, X_ij = 0 for |i − j| ≥ p.

The problem is convex in X, so that is where it is solved: L-BFGS on the off-diagonal band, C the reverse Cholesky
factor of X (a step that leaves the positive definite matrices has none, and is shortened). The metric in which L-BFGS
begins is what makes it fast: at the optimum ``S = X⁻¹WX⁻¹`` is diagonal within the band, its diagonal the multipliers
of the constraints, and the Hessian ``Δ ↦ X⁻¹ΔS + SΔX⁻¹`` scales with them, so Δ_ij is measured in ``√(S_ii S_jj)``.

f(X*) ≥ f(X) − ⟨S, X* − X⟩ and |X*_ij| ≤ 1, so ``f(X) − f* ≤ 2 Σ_{0<i−j<p} (|S_ij| − S_ij X_ij)``, at most
``4 Σ |S_ij|``: that, relative to f, is the `optimality` that is reported. It is of first order, and the true gap of
second: 1e-2 stands for something like 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .banded_algebra import cut, factor, gram
from .objectives import Objective

VERSION = 1  # of what is searched and how: part of the key of what is kept on disk

_ARMIJO = 1e-4


@dataclass(frozen=True)
class Optimum:
    """Where the search ended, and how far from the optimum that may be."""

    columns: np.ndarray  # C
    value: float  # f
    optimality: float  # f − f* is at most this times f
    evaluations: int

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "columns": self.columns,
            "optimality": np.array(self.optimality),
            "evaluations": np.array(float(self.evaluations)),
        }


def unit(columns: np.ndarray) -> np.ndarray:
    """Every column scaled to norm 1, after what reaches past the end is cut off."""
    columns = cut(columns)
    return np.asarray(columns / np.linalg.norm(columns, axis=1, keepdims=True))


def gap(s: np.ndarray, x: np.ndarray) -> float:
    """The certificate: how far f can be above its minimum."""
    return 2.0 * float((np.abs(s[:, 1:]) - s[:, 1:] * x[:, 1:]).sum())


@dataclass(frozen=True)
class _Point:
    x: np.ndarray
    columns: np.ndarray
    value: float
    s: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        """With respect to the entries below the diagonal; each of them stands for two."""
        out = -2.0 * self.s
        out[:, 0] = 0.0
        return out

    @property
    def optimality(self) -> float:
        return gap(self.s, self.x) / self.value


def minimise(
    objective: Objective,
    start: np.ndarray,
    *,
    target: float = 1e-3,
    evaluations: int = 1000,
    memory: int = 6,
    progress: Callable[[int, float], None] | None = None,
) -> Optimum:
    """From a C with unit columns to one whose `optimality` is at most `target`, or as far as `evaluations` last.

    `progress` is told how many evaluations are done, and the optimality reached.
    """
    point = _point(objective, gram(start))
    assert point is not None, "the search must start at a matrix that can be inverted"
    spent = 1
    steps: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    while True:
        if progress is not None:
            progress(spent, point.optimality)
        if point.optimality <= target or spent >= evaluations:
            break
        gradient = point.gradient
        direction = _direction(gradient, _metric(point.s), steps, changes)
        slope = float(np.vdot(gradient, direction))
        if not slope < 0.0:
            if not steps:
                break
            steps, changes = [], []
            continue
        following, tried = _search(objective, point, direction, slope, evaluations - spent)
        spent += tried
        if following is None:
            if not steps or spent >= evaluations:
                break
            steps, changes = [], []  # rounding, or a model gone astray: once more from the metric alone
            continue
        step, change = following.x - point.x, following.gradient - gradient
        if float(np.vdot(step, change)) > 0.0:
            steps, changes = [*steps, step][-memory:], [*changes, change][-memory:]
        point = following
    return Optimum(unit(point.columns), point.value, point.optimality, spent)


def _point(objective: Objective, x: np.ndarray) -> _Point | None:
    x[:, 0] = 1.0
    columns = factor(x)
    if columns is None:
        return None
    with np.errstate(all="ignore"):  # close to the boundary
        value, s = objective(columns)
    return _Point(x, columns, value, s) if np.isfinite(value) and np.isfinite(s).all() else None


def _metric(s: np.ndarray) -> np.ndarray:
    """``1/√(S_ii S_jj)`` on the band."""
    bands = s.shape[1]
    diagonal = np.maximum(s[:, 0], 1e-12 * float(s[:, 0].max()))
    root = np.concatenate([1.0 / np.sqrt(diagonal), np.zeros(bands - 1)])
    return np.asarray(np.lib.stride_tricks.sliding_window_view(root, bands) * root[: len(s), None])


def _direction(
    gradient: np.ndarray, metric: np.ndarray, steps: list[np.ndarray], changes: list[np.ndarray]
) -> np.ndarray:
    """L-BFGS: the two loops of Nocedal 1980 around a metric."""
    q, coefficients = gradient.copy(), []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        coefficient = float(np.vdot(step, q)) / float(np.vdot(step, change))
        coefficients.append(coefficient)
        q -= coefficient * change
    q *= metric
    if steps:
        q *= float(np.vdot(steps[-1], changes[-1])) / float(np.vdot(changes[-1] * metric, changes[-1]))
    else:
        q *= 0.05 / max(float(np.abs(q).max()), 1e-300)  # correlations are at most 1
    for step, change, coefficient in zip(steps, changes, reversed(coefficients), strict=True):
        q += step * (coefficient - float(np.vdot(change, q)) / float(np.vdot(step, change)))
    return -q


def _search(
    objective: Objective, point: _Point, direction: np.ndarray, slope: float, evaluations: int
) -> tuple[_Point | None, int]:
    """Backtracking, by quadratic interpolation, to a sufficient decrease."""
    length, spent = 1.0, 0
    while spent < min(evaluations, 30):
        spent += 1
        following = _point(objective, point.x + length * direction)
        if following is None:
            length *= 0.5
            continue
        if following.value <= point.value + _ARMIJO * length * slope:
            return following, spent
        bend = following.value - point.value - length * slope
        length *= min(0.5, max(0.1, -0.5 * length * slope / bend))
    return None, spent
