"""NoiseCurve(p): the banded C with unit columns for which noise costs least where the loss is curved.

Problem P1 of NoiseCurve: minimise Tr(W X⁻¹) over ``X = CᵀC`` with unit diagonal and p bands, W the cost that a
`CurvatureWorkload` finds from public eigenvalues and the learning rate (Eq. 1, or Eq. 2 where its dense matrix is
affordable). W of Eq. 1 has rank 20 to 40, so by itself it leaves noise in mid-training free: the infimum need not be
attained, and rows of C⁻¹ grow without bound. So what is minimised is ``Tr((W + τ·tr W/T·I) X⁻¹)``, the second term the
noise itself; a thousandth costs a few per cent of Eq. 1. `optimality` is of that, `curvature_score` without it.

While p ≤ b no two of one example's columns overlap, and with unit columns the sensitivity is √k whatever the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SordinoError, StateError, Unsupported
from .banded import Banded
from .banded_algebra import gram, solve, to_dense
from .bsr import square_root
from .cache import Input, cached
from .objectives import Errors, LowRank, Total
from .optimizing import VERSION, Optimum, minimise, unit
from .problem import Problem
from .toeplitz import parse_bandwidth
from .toeplitz_found import participations, public_curvature

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload

NAME = "noise-curve"
RIDGE = 1e-3  # τ
TARGET = 1e-4  # of `optimality`

_ENTRIES = 2**24  # T·p up to which a search fits a machine's memory
_DENSE = 2**26  # T²·p up to which one for Eq. 2 ends in a minute or two
_OPERATIONS = 13 * 10**9  # T·p² of all evaluations together
_KEPT = ("optimality", "evaluations", "condition")


class NoiseCurve(Banded):
    """``C[j+l, j] = entries[l, j]``, columns of norm 1, optimised for public curvature."""

    def __init__(self, entries: np.ndarray, certificate: Mapping[str, float] | None = None) -> None:
        super().__init__(f"{NAME}:{len(entries)}", entries)
        self.certificate = dict(certificate or {})

    def definition(self) -> dict[str, np.ndarray]:
        return {"entries": np.array(self.entries)}


def noise_curve(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> NoiseCurve:
    """The optimum for the problem's curvature, or the `definition` given.

    >>> from sordino.curvature import CurvatureWorkload, Spectrum
    >>> curved = CurvatureWorkload(Spectrum.given([1.0, 0.1, 0.01]), learning_rate=0.5)
    >>> s = noise_curve("4", Problem(100, curvature=curved))
    >>> s.vectors_stored, s.certificate["optimality"] < 1e-3, round(curved.score(s), 2)
    (3, True, 1.49)
    """
    bands = parse_bandwidth(argument, NAME, problem.steps)
    if definition is not None:
        return NoiseCurve(_recalled(definition, bands, problem.steps))
    curved = problem.curvature
    if curved is None:
        raise SordinoError(
            f"noise='{NAME}:{bands}' is shaped by the curvature of the loss, and no spectrum was given; pass "
            "spectrum= and learning_rate= (--spectrum FILE --learning-rate η), made by `sordino spectrum`, or use "
            f"'band-mf:{bands}', which needs none"
        )
    separation = problem.participations.separation
    if participations(problem) > 1 and bands > separation:
        raise Unsupported(
            f"noise='{NAME}:{bands}' needs examples at least {bands} steps apart, and they come back after {separation}"
            f"; use '{NAME}:{separation}' or fewer bands"
        )
    if problem.steps * bands > _ENTRIES:
        raise Unsupported(
            f"noise='{NAME}:{bands}' has {problem.steps * bands} entries to optimise over {problem.steps} steps, at "
            f"most {_ENTRIES} fit; use fewer bands"
        )
    found = cached(NAME, question(curved, problem.steps, bands), lambda: _found(curved, problem.steps, bands))
    s = NoiseCurve(found["columns"].T, {name: float(found[name]) for name in _KEPT})
    largest = max(s.row_norm(t) for t in range(s.steps))
    s.certificate = {**s.certificate, "ridge": RIDGE, "largest_row_norm": largest, "curvature_score": curved.score(s)}
    return s


def question(curved: CurvatureWorkload, steps: int, bands: int) -> dict[str, Input]:
    """What the answer depends on."""
    return {
        "version": VERSION,
        "steps": steps,
        "bands": bands,
        "ridge": RIDGE,
        "target": TARGET,
        **public_curvature(curved, steps),
    }


def optimise(
    curved: CurvatureWorkload,
    steps: int,
    bands: int,
    *,
    ridge: float = RIDGE,
    target: float = TARGET,
    progress: Callable[[int, float], None] | None = None,
) -> Optimum:
    """P1 with the ridge; its value is relative to ``tr W/T``."""
    if curved.equation != "loss" and steps**2 * bands > _DENSE:
        raise Unsupported(
            f"noise='{NAME}:{bands}' for equation={curved.equation!r} over {steps} steps: its matrix has no low rank, "
            "which makes it too much to optimise for; use equation='loss'"
        )
    q = curved.factor(steps)
    q = q * np.sqrt(steps / float(np.square(q).sum()))
    objective = Total(LowRank(q), Errors(steps, bands, ridge=ridge))
    evaluations = int(np.clip(_OPERATIONS / (steps * bands * max(bands, 24)), 40, 2000))
    return minimise(objective, beginning(steps, bands), target=target, evaluations=evaluations, progress=progress)


def beginning(steps: int, bands: int) -> np.ndarray:
    """The square root of the prefix sum, cut to the band, with unit columns."""
    return unit(np.tile(square_root(bands), (steps, 1)))


def _found(curved: CurvatureWorkload, steps: int, bands: int) -> dict[str, np.ndarray]:
    optimum = optimise(curved, steps, bands)
    return {**optimum.arrays(), "condition": np.array(condition(optimum.columns))}


def condition(columns: np.ndarray) -> float:
    """The condition number of ``X = CᵀC``, to a few digits; linear in T.

    >>> round(condition(np.array([[1.0, 1.0], [2.0, 0.0]])), 3)
    6.854
    """
    if len(columns) <= 64:
        return float(np.linalg.cond(to_dense(columns)) ** 2)
    from scipy.sparse import diags
    from scipy.sparse.linalg import LinearOperator, eigsh

    steps, bands = columns.shape
    x = gram(columns)
    lower = diags([x[: steps - l, l] for l in range(bands)], [-l for l in range(bands)], format="csr")
    symmetric = lower + lower.T - diags([x[:, 0]], [0])
    inverse = LinearOperator(
        (steps, steps), matvec=lambda v: solve(columns, solve(columns, v, transposed=True)), dtype=np.float64
    )
    start = np.random.default_rng(0).normal(size=steps)
    ends = [
        eigsh(operator, k=1, which="LA", v0=start, tol=1e-4, return_eigenvectors=False)[0]
        for operator in (symmetric, inverse)
    ]
    return float(ends[0] * ends[1])


def _recalled(definition: Mapping[str, np.ndarray], bands: int, steps: int) -> np.ndarray:
    entries = np.asarray(definition.get("entries", []), dtype=np.float64)
    if entries.shape != (bands, steps) or not np.isfinite(entries).all() or (entries[0] <= 0.0).any():
        raise StateError(
            f"the definition of noise='{NAME}:{bands}' must have finite entries, {bands}×{steps}, the first row above "
            f"0; this one has an array of shape {entries.shape}; load the run's own"
        )
    return entries
