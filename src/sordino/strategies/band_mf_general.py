"""BandMF(p) with any entries: the lower-triangular C with p bands and unit columns that has the least error.

Of one example's columns no two overlap while p ≤ b, so with unit columns its sensitivity is √k whatever the entries
are, and only the error is left: a convex problem in ``X = CᵀC`` (Choquette-Choo et al. 2023b; McKenna 2025), solved in
time linear in T from the best Toeplitz C on. The last p − 1 outputs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import StateError, Unsupported
from .band_mf import band_mf
from .banded import Banded
from .cache import cached
from .objectives import Errors, workload_filter
from .optimizing import VERSION, minimise, unit
from .problem import Problem
from .toeplitz import parse_bandwidth
from .toeplitz_optimizing import participations
from .workload import Workload

NAME = "band-mf-general"

_ENTRIES = 2**24  # T·p up to which the search fits a machine's memory (some 0.4 kB an entry)
_OPERATIONS = 13 * 10**9  # T·p² of all evaluations together: half a minute
_FEW = 256  # evaluations below which the search is begun with fewer steps
_POWERS = (4.0, 16.0, 64.0, 256.0)  # of norms of all errors that come closer and closer to the largest


class BandMFGeneral(Banded):
    """``C[j+l, j] = entries[l, j]``, columns of norm 1, optimised."""

    def __init__(self, entries: np.ndarray, certificate: Mapping[str, float] | None = None) -> None:
        super().__init__(f"{NAME}:{len(entries)}", entries)
        self.certificate = dict(certificate or {})

    def definition(self) -> dict[str, np.ndarray]:
        return {"entries": np.array(self.entries)}


def band_mf_general(
    argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None
) -> BandMFGeneral:
    """The optimum for the problem's workload and objective, or the `definition` given.

    >>> s = band_mf_general("4", Problem(100))
    >>> s.vectors_stored, round(s.sensitivity(Problem(100).participations), 12), s.certificate["optimality"] < 1e-3
    (3, 1.0, True)
    """
    bands = parse_bandwidth(argument, NAME, problem.steps)
    if definition is not None:
        return BandMFGeneral(_recalled(definition, bands, problem.steps))
    separation = problem.participations.separation
    if participations(problem) > 1 and bands > separation:
        raise Unsupported(
            f"noise='{NAME}:{bands}' needs examples at least {bands} steps apart, and they come back after {separation}"
            f"; use '{NAME}:{separation}' or fewer bands, or 'band-mf:{bands}'"
        )
    if problem.steps * bands > _ENTRIES:
        raise Unsupported(
            f"noise='{NAME}:{bands}' has {problem.steps * bands} entries to optimise over {problem.steps} steps, at "
            f"most {_ENTRIES} fit; use 'band-mf:{bands}', which is nearly as good"
        )
    workload = problem.workload
    inputs = {
        "version": VERSION,
        "steps": problem.steps,
        "bands": bands,
        "objective": problem.objective,
        "momentum": float(workload.momentum),
        "shrink": float(workload.shrink),
        "rates": np.ones(1) if workload.is_toeplitz else workload.rates(problem.steps),
    }
    found = cached(NAME, inputs, lambda: _optimised(problem, bands))
    return BandMFGeneral(found["columns"].T, {name: float(found[name]) for name in ("optimality", "evaluations")})


def _optimised(problem: Problem, bands: int) -> dict[str, np.ndarray]:
    steps, workload = problem.steps, problem.workload
    start, evaluations = _toeplitz(problem, bands), _evaluations(steps, bands)
    if problem.objective == "max-se":
        return _least_maximum(problem, start, evaluations // 2)
    errors = _errors(workload, steps, bands, 1.0)
    if evaluations < _FEW:
        start = min(start, _from_fewer_steps(problem, start), key=lambda columns: errors(columns)[0])
    return minimise(errors, start, evaluations=evaluations, memory=_memory(start)).arrays()


def _toeplitz(problem: Problem, bands: int) -> np.ndarray:
    """The best Toeplitz C, its columns scaled to norm 1."""
    s = band_mf(str(bands), Problem(problem.steps, workload=problem.workload, objective=problem.objective))
    return unit(np.tile(s.coefficients[:bands], (problem.steps, 1)))


def _evaluations(steps: int, bands: int) -> int:
    return int(np.clip(_OPERATIONS / (steps * bands * max(bands, 24)), 40, 1000))


def _from_fewer_steps(problem: Problem, toeplitz: np.ndarray) -> np.ndarray:
    """What the optimum for a sixteenth of the steps adds to its best Toeplitz C, stretched: most of what is to gain.

    With learning rates that change it gains nothing.
    """
    steps, bands = toeplitz.shape
    fewer = steps // 16
    if fewer < 4 * bands or not problem.workload.is_toeplitz:
        return toeplitz
    workload = Workload(problem.workload.momentum, problem.workload.shrink ** (steps / fewer))
    small = Problem(fewer, workload=workload)
    start = _toeplitz(small, bands)
    errors = _errors(workload, fewer, bands, 1.0)
    found = minimise(errors, start, target=0.05, evaluations=_evaluations(fewer, bands))
    return unit(toeplitz + _stretched(found.columns - start, steps, 3 * bands))


def _stretched(columns: np.ndarray, steps: int, ends: int) -> np.ndarray:
    """As many columns as there are steps: the first and last `ends` as they are, those between interpolated."""
    fewer = len(columns)
    ends = min(ends, fewer // 3)
    j = np.arange(steps)
    between = ends + (j - ends) * (fewer - 2 * ends - 1) / (steps - 2 * ends - 1)
    at = np.select([j < ends, j >= steps - ends], [j, j - (steps - fewer)], between)
    low = np.floor(at).astype(np.intp)
    part = (at - low)[:, None]
    return np.asarray((1.0 - part) * columns[low] + part * columns[np.minimum(low + 1, fewer - 1)])


def _least_maximum(problem: Problem, start: np.ndarray, evaluations: int) -> dict[str, np.ndarray]:
    """The best of the Toeplitz C and what higher and higher norms of the errors lead to."""
    steps, bands = start.shape
    columns, best, least, bound, spent = start, start, np.inf, 0.0, 0
    for power in _POWERS:
        errors = _errors(problem.workload, steps, bands, power)
        found = minimise(errors, columns, target=1e-2, evaluations=evaluations, memory=_memory(start))
        for candidate in (columns, found.columns):
            largest, factor = errors.largest(candidate)
            if largest < least:
                best, least = candidate, largest
        bound = max(bound, found.value * (1.0 - found.optimality) * factor)  # of all largest errors, from below
        columns, spent = found.columns, spent + found.evaluations
    optimality, count = np.array(1.0 - bound / least), np.array(float(spent))
    return {"columns": best, "optimality": optimality, "evaluations": count}


def _errors(workload: Workload, steps: int, bands: int, power: float) -> Errors:
    """The error of a workload; where learning rates vanish a trace of the noise itself, which would be free there."""
    rates = workload.rates(steps)
    rates = rates / float(rates.max())
    filtered = workload_filter(Workload(workload.momentum, workload.shrink, tuple(rates.tolist())), steps)
    ridge = 0.0
    if float(rates.min()) < 1e-3:
        impulse = np.square(workload.coefficients(steps))
        ridge = 1e-8 * float((np.square(rates) * np.cumsum(impulse)[::-1]).mean())  # of tr W/T
        ridge /= steps if power > 1.0 else 1  # one error, not the sum of all
    return Errors(steps, bands, filtered, ridge, power)


def _memory(start: np.ndarray) -> int:
    """Pairs that L-BFGS keeps, each as large as two C: fewer where C is large."""
    return 4 if start.size > 2**20 else 6


def _recalled(definition: Mapping[str, np.ndarray], bands: int, steps: int) -> np.ndarray:
    entries = np.asarray(definition.get("entries", []), dtype=np.float64)
    if entries.shape != (bands, steps) or not np.isfinite(entries).all() or (entries[0] <= 0.0).any():
        raise StateError(
            f"the definition of noise='{NAME}:{bands}' must have finite entries, {bands}×{steps}, the first row above "
            f"0; this one has an array of shape {entries.shape}; load the run's own"
        )
    return entries
