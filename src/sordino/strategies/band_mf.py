"""BandMF(p), Toeplitz: C has p bands, its coefficients optimised for the error (McKenna 2025).

Columns that are at least p steps apart do not overlap, so with p ≤ b (or one participation) nothing but their norms
matters, and the last p−1, which the end of the run cuts off, are scaled up to the norm of the others:
``C = T·diag(s)``, all columns of norm 1, sensitivity √k, and less error. With p > b the columns of a pattern overlap;
then the best T with ``c ≥ 0``, not increasing from lag b on, is compared with the best of b bands, which usually
wins. The last p−1 outputs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .bsr import square_root
from .cache import cached
from .problem import Problem
from .toeplitz import Toeplitz, parse_bandwidth
from .toeplitz_found import certified, participations, question, recalled
from .toeplitz_optimizing import (
    Decrements,
    Optimum,
    banded_loss,
    column_norms,
    minimise,
    unit_columns_loss,
)

NAME = "band-mf"
_POLISHED = 2**26  # operations of one evaluation up to which unit columns are optimised as such
_SCHEDULED = (
    2**28
)  # T² up to which a schedule of learning rates is minded: 1/c has T coefficients, each of them T rates


class BandMF(Toeplitz):
    """``C_ij = c_{i−j} s_j``, p bands; s = 1, or what makes all columns of norm 1."""

    def __init__(
        self, bands: int, steps: int, c: np.ndarray, unit: bool, certificate: Mapping[str, float] | None = None
    ) -> None:
        scale = 1.0 / column_norms(c, steps)
        super().__init__(
            f"{NAME}:{bands}", steps, coefficients=c, scale=scale if unit and (scale != 1.0).any() else None
        )
        self._c, self._unit, self.certificate = c, unit, dict(certificate or {})

    def definition(self) -> dict[str, np.ndarray]:
        return {"coefficients": self._c.copy(), "unit_columns": np.array(float(self._unit))}

    def column_norm(self) -> float:
        return 1.0 if self._unit else super().column_norm()


def band_mf(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> BandMF:
    """The optimum for the problem's workload, objective and participation, or the `definition` given.

    >>> s = band_mf("4", Problem(100))
    >>> s.vectors_regenerated, s.vectors_stored, round(s.sensitivity(Problem(100).participations), 12)
    (0, 3, 1.0)
    """
    bands = parse_bandwidth(argument, NAME, problem.steps)
    if definition is not None:
        c = recalled(definition, "coefficients", f"{NAME}:{bands}", bands)
        return BandMF(bands, problem.steps, c, bool(np.any(definition.get("unit_columns", 0.0))))
    found = cached(NAME, question(problem, bands), lambda: _optimised(problem, bands))
    return BandMF(bands, problem.steps, found["coefficients"], bool(found["unit_columns"]), certified(found))


def _optimised(problem: Problem, bands: int) -> dict[str, np.ndarray]:
    participation, asked = problem.participations, problem
    without = not problem.workload.is_toeplitz and problem.steps**2 > _SCHEDULED
    if without:
        problem = replace(problem, workload=replace(problem.workload, learning_rates=None))
    apart = bands if participations(problem) == 1 else min(bands, participation.separation)
    candidates = [(_toeplitz(problem, apart), True)]
    candidates[0] = (_unit_columns(problem, *candidates[0][0]), True)
    if bands > apart:
        candidates.append((_toeplitz(problem, bands), False))
    made = []
    for (c, found), unit in candidates:
        s = BandMF(bands, problem.steps, c, unit)
        made.append((asked.error(s) * s.sensitivity(participation), c, found, unit))
    value, c, found, unit = min(made, key=lambda candidate: candidate[0])
    certificate = found.arrays() | {"loss": np.array(value)} | ({"schedule_ignored": np.array(1.0)} if without else {})
    return {"coefficients": c, "unit_columns": np.array(float(unit))} | certificate


def _toeplitz(problem: Problem, bands: int) -> tuple[np.ndarray, Optimum]:
    """The best Toeplitz C ≥ 0, from BSR on."""
    shape = Decrements(problem, bands)
    found = minimise(banded_loss(problem, shape), shape.variables(square_root(bands)), np.zeros(bands - 1))
    return shape.coefficients(found.x), found


def _unit_columns(problem: Problem, c: np.ndarray, found: Optimum) -> tuple[np.ndarray, Optimum]:
    """The best for unit columns, from the best Toeplitz on; where that costs too much, that one: they hardly differ."""
    late = len(c) if problem.workload.is_toeplitz else problem.steps
    if late * problem.steps > _POLISHED:
        return c, found
    better = minimise(unit_columns_loss(problem), c[1:], np.zeros(len(c) - 1))
    return np.concatenate([[1.0], better.x]), replace(better, iterations=better.iterations + found.iterations)
