"""What a banded C is optimised for: ``f(X) = Tr(W X⁻¹)``, X = CᵀC, and relatives, all convex in X, linear in T.

An objective takes C by columns (see `banded_algebra`) and gives f and ``S = X⁻¹WX⁻¹`` on the band, the negative
gradient with respect to X. W is never formed: it is a low-rank ``QQᵀ``, or what some filtered sum of the noise costs,
or the noise itself (a ridge, ``τ·Tr X⁻¹``), or a sum of such.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .banded_algebra import solve
from .blocks import Covariances, Filter, Layout, Sums, curvature
from .workload import Workload

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Errors:
    """``(Σ_t e_t^q)^{1/q} + Σ_t τ_t Var(x_t)``, e_t the variance of the t-th filtered sum of ``x = C⁻¹z``.

    q = 1 is the mean squared error times T. A large q comes close to the largest error.
    """

    def __init__(
        self,
        steps: int,
        bands: int,
        filtered: Filter | None = None,
        ridge: float | np.ndarray = 0.0,
        power: float = 1.0,
    ) -> None:
        self.layout = Layout(steps, bands)
        self.sums = Sums(self.layout, filtered)
        self.power = power
        self.ridge = self.layout.rows(np.broadcast_to(np.asarray(ridge, dtype=np.float64), steps))
        self.costs = self.sums.costs(None, self.ridge) if power == 1.0 else None

    def __call__(self, columns: np.ndarray) -> tuple[float, np.ndarray]:
        forward = Covariances(self.layout, self.sums, columns)
        if self.costs is not None:
            value = float(np.einsum("kij,kij->", self.costs, forward.summed))
            return value, curvature(forward, self.costs)[0]
        errors = forward.errors()
        norm, weights = self._norm(errors)
        costs = self.sums.costs(self.layout.rows(weights), self.ridge)
        return norm + self._noise(forward), curvature(forward, costs)[0]

    def largest(self, columns: np.ndarray) -> tuple[float, float]:
        """``max_t e_t`` with its ridge, and a factor that makes of a lower bound of f one of the least such maximum.

        The norm is ``Σ_t w_t e_t`` with weights that depend on C; fixed, they bound it from below for every other C,
        and ``max e ≥ Σ w e / Σ w``, where Σ w ≥ 1.
        """
        forward = Covariances(self.layout, self.sums, columns)
        errors = forward.errors()
        return float(errors.max()) + self._noise(forward), 1.0 / float(self._norm(errors)[1].sum())

    def _norm(self, errors: np.ndarray) -> tuple[float, np.ndarray]:
        """‖e‖_q, and its derivative."""
        largest = float(errors.max())
        norm = float(np.power(errors / largest, self.power).sum()) ** (1.0 / self.power)
        return largest * norm, np.power(errors / (largest * norm), self.power - 1.0)

    def _noise(self, forward: Covariances) -> float:
        return float(self.ridge.reshape(-1)[self.layout.pad :] @ forward.noise())


class LowRank:
    """``Tr(QQᵀ X⁻¹) = ‖C⁻ᵀQ‖_F²``: two banded solves for each column of Q."""

    def __init__(self, q: np.ndarray) -> None:
        self.q = np.asarray(q, dtype=np.float64)

    def __call__(self, columns: np.ndarray) -> tuple[float, np.ndarray]:
        y = solve(columns, self.q, transposed=True)
        z = solve(columns, y)  # X⁻¹Q
        steps, bands = columns.shape
        s = np.zeros((steps, bands))
        for l in range(min(bands, steps)):
            s[: steps - l, l] = np.einsum("jr,jr->j", z[l:], z[: steps - l])
        return float(np.square(y).sum()), s


class Total:
    """A sum of objectives."""

    def __init__(self, *parts: Objective) -> None:
        self.parts = parts

    def __call__(self, columns: np.ndarray) -> tuple[float, np.ndarray]:
        values, curvatures = zip(*(part(columns) for part in self.parts), strict=True)
        return float(sum(values)), np.sum(curvatures, axis=0)


def workload_filter(workload: Workload, steps: int) -> Filter:
    """A workload as a filter: ``y_t = (α+β) y_{t−1} − αβ y_{t−2} + η_t x_t``."""
    first, second = workload.shrink + workload.momentum, workload.shrink * workload.momentum
    rates = np.array(workload.rates(steps), dtype=np.float64)
    if second == 0.0:
        return Filter(np.array([[first]]), np.ones(1), np.ones((1, 1)), rates)
    return Filter(np.array([[first, -second], [1.0, 0.0]]), np.array([1.0, 0.0]), np.array([[1.0, 0.0]]), rates)
