"""The coefficients that minimise error × sensitivity, by L-BFGS with gradients written by hand.

The loss is the logarithm, ``½ log(error²·sensitivity²)``, of matrices with ``c_0 = 1``. Its sensitivity is never a
formula that needs a condition, but a bound that holds for all coefficients (`toeplitz_sensitivity`), so there
is nothing to exploit. One evaluation is O(T·p) or O(T log T).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..budget import Participation
from .power_series import product_transposed, quotient_transposed, reciprocal
from .problem import Problem
from .toeplitz_forms import outer, plain, scheduled, unit_columns
from .toeplitz_found import participations
from .toeplitz_sensitivity import majorant_index, repeated

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

_FIRST_STEP = 0.01  # the length of L-BFGS's first step: coefficients are at most 1, the last ones 1/√T
_FEW = 32  # coefficients up to which forward substitution is faster than two products by FFT
_OUTSIDE = 1e3  # what a matrix whose inverse overflows is worth


@dataclass(frozen=True)
class Optimum:
    """Where the search ended, and how flat the loss is there."""

    x: np.ndarray
    loss: float
    gradient: float  # the largest entry of the projected gradient of the (logarithmic, so relative) loss
    iterations: int

    def arrays(self) -> dict[str, np.ndarray]:
        return {"projected_gradient": np.array(self.gradient), "iterations": np.array(float(self.iterations))}


def minimise(loss: Loss, start: np.ndarray, lower: np.ndarray | None = None, iterations: int = 2000) -> Optimum:
    """L-BFGS-B from `start`; begun again where it gave up, as long as that helps."""
    from scipy.optimize import minimize

    x, spent = np.array(start, dtype=np.float64), 0
    if len(x) == 0:
        return Optimum(x, loss(x)[0], 0.0, 0)

    def scaled(y: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value, gradient = loss(x + _FIRST_STEP * y)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return _OUTSIDE, np.zeros_like(y)
        return value, _FIRST_STEP * gradient

    bounds = None if lower is None else [(low, None) for low in (lower - x) / _FIRST_STEP]
    y, best = np.zeros_like(x), np.inf
    for _ in range(5):
        found = minimize(
            scaled,
            y,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={
                "maxiter": iterations - spent,
                "maxfun": 2 * iterations,
                "maxcor": 20,
                "ftol": 1e-14,
                "gtol": 1e-9,
            },
        )
        spent, gained = spent + int(found.nit), best - float(found.fun)
        if gained > 0.0:
            y, best = found.x, float(found.fun)
        if gained < 1e-9 or spent >= iterations:
            break
    x = x + _FIRST_STEP * y
    if lower is not None:
        x = np.maximum(x, lower)
    value, gradient = loss(x)
    if lower is not None:
        gradient = np.where((x <= lower) & (gradient > 0.0), 0.0, gradient)
    return Optimum(x, value, float(np.abs(gradient).max()), spent)


def goldstein(loss: Loss, x: np.ndarray, radius: float = 1e-4) -> float:
    """How flat the loss is at a kink: the largest entry of the smallest mean of its gradients within `radius` of x.

    At a minimum with a kink gradients stay large on every side, but some convex combination of them is 0 (Goldstein
    1977). They are sampled, so that this is an upper bound.
    """
    from scipy.optimize import nnls

    rng = np.random.default_rng(0)
    near = [x] + [x + radius * rng.uniform(-1.0, 1.0, len(x)) for _ in range(min(6 * len(x), 400))]
    gradients = np.array([loss(y)[1] for y in near])
    weight = 1e3 * float(np.abs(gradients).max())  # of the condition that the combination is convex
    rows = np.vstack([gradients.T, np.full(len(near), weight)])
    try:
        combination, _ = nnls(rows, np.concatenate([np.zeros(len(x)), [weight]]))
    except RuntimeError:  # no convergence
        return float(np.abs(gradients[0]).max())
    return float(np.abs(combination @ gradients).max() / combination.sum())


def squared_error(problem: Problem) -> Loss:
    """By the first column of ``T⁻¹``."""
    if problem.objective == "curvature" and problem.curvature is not None:
        return curvature_form(problem.curvature.factor(problem.steps))
    rates = problem.workload.rates(problem.steps)
    if problem.workload.is_toeplitz:
        return lambda w: plain(w, problem.steps, problem.workload, problem.objective)
    outside = outer(problem.objective)
    return lambda w: scheduled(w, rates, problem.workload, outside)[:2]


def curvature_form(q: np.ndarray) -> Loss:
    """``‖T⁻ᵀQ‖_F²``, relative to ``‖Q‖_F²``, by the first entries w of the first column of ``T⁻¹``.

    Row j of ``T⁻ᵀQ`` is ``Σ_l w_l Q_{j+l}``: a quadratic form ``wᵀGw``, ``G_{l+1,m+1} = G_{lm} − Q_l·Q_m``.
    """
    forms: dict[int, np.ndarray] = {}

    def form(bands: int) -> np.ndarray:
        g = np.zeros((bands, bands))
        g[0] = [np.vdot(q[: len(q) - m], q[m:]) for m in range(bands)]
        products = q[:bands] @ q[:bands].T
        for l in range(bands - 1):
            g[l + 1, l + 1 :] = g[l, l:-1] - products[l, l:-1]
        return np.asarray(np.triu(g) + np.triu(g, 1).T) / np.vdot(q, q)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        if len(w) not in forms:
            forms[len(w)] = form(len(w))
        by_w = forms[len(w)] @ w
        return float(w @ by_w), 2.0 * by_w

    return loss


def squared_sensitivity(c: np.ndarray, participation: Participation) -> tuple[float, np.ndarray]:
    """The leftmost columns of the majorant (of |C| in a fixed order), squared, by c; see `toeplitz_sensitivity`."""
    k, b = participation.epochs, participation.separation
    k = min(k, -(-len(c) // b))
    from_lag = len(c) if participation.fixed or k == 1 else b
    index = majorant_index(c, from_lag)
    columns = repeated(np.abs(c)[index], k, b)
    by_majorant = 2.0 * repeated(columns[::-1], k, b)[::-1]
    return float(columns @ columns), np.bincount(index, by_majorant, len(c)) * np.sign(c)


class PartialSums:
    """Variables in which L-BFGS is fast for an inverse band: ``u_i = w_0 + … + w_i``, the last one times √(T/p).

    ``A T⁻¹`` has the coefficients u_0, …, u_{p−1} and from there on u_{p−1} again and again: in these variables the
    error is all but a sum of squares of one size. (20 iterations for 64 bands instead of 500 and more.)
    """

    def __init__(self, steps: int, bands: int) -> None:
        self._scale = np.ones(bands - 1)
        self._scale[-1:] = np.sqrt(steps / bands)

    def variables(self, x: np.ndarray) -> np.ndarray:
        """From ``w_1, …, w_{p−1}``, w_0 = 1."""
        return np.asarray((1.0 + np.cumsum(x)) * self._scale)

    def coefficients(self, y: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate([[1.0], y / self._scale]))

    def minimise(self, loss: Loss, start: np.ndarray, iterations: int) -> Optimum:
        """As `minimise`, of a loss by ``w_1, …, w_{p−1}``."""
        if len(start) == 0:
            return minimise(loss, start)

        def changed(y: np.ndarray) -> tuple[float, np.ndarray]:
            value, by_w = loss(self.coefficients(y))
            return value, (by_w - np.append(by_w[1:], 0.0)) / self._scale

        found = minimise(changed, self.variables(start), iterations=iterations)
        x = self.coefficients(found.x)
        value, by_w = loss(x)
        return Optimum(x, value, float(np.abs(by_w).max()), found.iterations)


def inverse_banded_loss(problem: Problem) -> Loss:
    """By ``w_1, …, w_{p−1}``, w_0 = 1, the coefficients of C⁻¹."""
    error = squared_error(problem)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = np.concatenate([[1.0], x])
        c = reciprocal(w, problem.steps)
        e, by_w = error(w)
        s, by_c = squared_sensitivity(c, problem.participations)
        by_w = by_w / e - by_inverse(w, c, by_c)[: len(w)] / s
        return 0.5 * float(np.log(e * s)), 0.5 * by_w[1:]

    return loss


class Decrements:
    """Variables, all ≥ 0, for the coefficients of a banded Toeplitz C that the leftmost columns are the worst of.

    ``c_1, …`` themselves up to lag b, and from there on what they decrease by at each lag. In a fixed order, or if an
    example takes part once, C ≥ 0 is enough: the coefficients themselves.
    """

    def __init__(self, problem: Problem, bands: int) -> None:
        free = problem.participations.fixed or participations(problem) == 1
        self.bands, self._from = bands, bands if free else problem.participations.separation

    def coefficients(self, x: np.ndarray) -> np.ndarray:
        c = np.concatenate([[1.0], x])
        c[self._from :] = np.cumsum(c[self._from :][::-1])[::-1]
        return c

    def variables(self, c: np.ndarray) -> np.ndarray:
        x = np.array(c)
        x[self._from :] -= np.append(x[self._from + 1 :], 0.0)[: len(x[self._from :])]
        return x[1:]

    def pull(self, by_c: np.ndarray) -> np.ndarray:
        """From derivatives by the coefficients to those by the variables."""
        by_c = np.array(by_c)
        by_c[self._from :] = np.cumsum(by_c[self._from :])
        return by_c[1:]


def banded_loss(problem: Problem, shape: Decrements) -> Loss:
    """Of a banded Toeplitz C ≥ 0, by the variables of its `shape`."""
    error = squared_error(problem)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        c = shape.coefficients(x)
        w = reciprocal(c, problem.steps)
        e, by_w = error(w)
        padded = np.concatenate([c, np.zeros(problem.steps - len(c))])
        s, by_c = squared_sensitivity(padded, problem.participations)
        gradient = by_c / s - by_inverse(c, w, by_w) / e
        return 0.5 * float(np.log(e * s)), 0.5 * shape.pull(gradient[: len(c)])

    return loss


def unit_columns_loss(problem: Problem) -> Loss:
    """By ``c_1, …, c_{p−1}`` of a banded Toeplitz matrix whose columns are then scaled to norm 1.

    Only the error counts: columns of norm 1 that do not overlap have sensitivity √k.
    """
    workload, steps, outside = problem.workload, problem.steps, outer(problem.objective)
    rates = workload.rates(steps)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], x])
        w = reciprocal(c, steps)
        norms = column_norms(c, steps)
        if workload.is_toeplitz:
            e, by_w, by_rates = unit_columns(w, rates * norms, steps - len(c) + 1, workload, outside)
        else:
            e, by_w, by_rates = scheduled(w, rates * norms, workload, outside)
        cut = np.cumsum(by_rates * rates / norms)[::-1][: len(c)]  # columns up to T−1−l reach lag l
        by_c = c * cut - by_inverse(c, w, by_w)[: len(c)]
        return 0.5 * float(np.log(e)), 0.5 * by_c[1:] / e

    return loss


def column_norms(c: np.ndarray, steps: int) -> np.ndarray:
    """``‖T[:, j]‖₂``: the last columns are cut off by the end.

    >>> column_norms(np.array([3.0, 4.0]), 3)
    array([5., 5., 3.])
    """
    squares = np.concatenate([np.square(c), np.zeros(steps - len(c))])
    return np.asarray(np.sqrt(np.cumsum(squares)[::-1]))


def by_inverse(a: np.ndarray, inverse: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Minus the derivative by a of what has this gradient by ``1/a``: ``δ(1/a) = −(1/a)²·δa``."""
    if len(a) <= _FEW:
        return quotient_transposed(a, quotient_transposed(a, gradient))
    return product_transposed(inverse, product_transposed(inverse, gradient))
