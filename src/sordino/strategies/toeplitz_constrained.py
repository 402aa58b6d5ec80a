"""BandInvMF where the conditions of the leftmost columns bind: a smooth problem with constraints.

For ``C ≥ 0`` whose coefficients do not increase from lag b on (in a fixed order: C ≥ 0), the leftmost columns are the
sensitivity, and smooth. The bound that holds for all C is the same there, but has kinks at the edge, where L-BFGS
stalls. So the edge is met by an augmented Lagrangian,

    minimise ½ log(error²·‖leftmost columns‖²)   s.t.   g(c) ≥ 0,

and what comes out, feasible to about 1e-9, is afterwards worth what the bound says, as any other candidate.
"""

from __future__ import annotations

import numpy as np

from .power_series import reciprocal
from .problem import Problem
from .toeplitz_found import participations
from .toeplitz_optimizing import Loss, Optimum, PartialSums, by_inverse, squared_error
from .toeplitz_sensitivity import repeated

_ROUNDS, _ITERATIONS = 30, 3000
_FEASIBLE = 1e-10


class Conditions:
    """``g(c) ≥ 0``: ``c_1, c_2, …``, and from lag b on by how much each coefficient is above the next."""

    def __init__(self, problem: Problem) -> None:
        free = problem.participations.fixed or participations(problem) == 1
        self._from = problem.steps if free else problem.participations.separation

    def __call__(self, c: np.ndarray) -> np.ndarray:
        g = c.copy()
        g[self._from : -1] -= c[self._from + 1 :]
        return g[1:]

    def transposed(self, multipliers: np.ndarray) -> np.ndarray:
        by_c = np.concatenate([[0.0], multipliers])
        by_c[self._from + 1 :] -= multipliers[self._from - 1 : -1] if self._from > 0 else 0.0
        return by_c


def constrained(problem: Problem, start: np.ndarray) -> Optimum:
    """From `start`, ``w_1, …, w_{p−1}``; the gradient reported is that of the Lagrangian."""
    conditions = Conditions(problem)
    x, spent, sums = start, 0, PartialSums(problem.steps, len(start) + 1)
    multipliers, weight, before = np.zeros(problem.steps - 1), 10.0, np.inf
    for _ in range(_ROUNDS):
        found = sums.minimise(lagrangian(problem, conditions, multipliers, weight), x, iterations=500)
        x, spent = found.x, spent + found.iterations
        g = conditions(reciprocal(np.concatenate([[1.0], x]), problem.steps))
        multipliers = np.maximum(0.0, multipliers - weight * g)
        violated = float(np.maximum(-g, 0.0).max(initial=0.0))
        if violated <= _FEASIBLE or spent >= _ITERATIONS:
            break
        weight *= 4.0 if violated > 0.25 * before else 1.0
        before = violated
    return Optimum(x, found.loss, found.gradient, spent)


def lagrangian(problem: Problem, conditions: Conditions, multipliers: np.ndarray, weight: float) -> Loss:
    error, k, b = squared_error(problem), participations(problem), problem.participations.separation

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = np.concatenate([[1.0], x])
        c = reciprocal(w, problem.steps)
        e, by_w = error(w)
        columns = repeated(c, k, b)
        s = float(columns @ columns)
        active = np.maximum(0.0, multipliers - weight * conditions(c))
        value = 0.5 * float(np.log(e * s)) + 0.5 * float(active @ active - multipliers @ multipliers) / weight
        by_c = repeated(columns[::-1], k, b)[::-1] / s - conditions.transposed(active)
        return value, (0.5 * by_w / e - by_inverse(w, c, by_c)[: len(w)])[1:]

    return loss
