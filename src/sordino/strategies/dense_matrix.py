"""A matrix the user brings: ``noise=sordino.strategies.DenseMatrix(C)``, or ``dense:PATH`` for an array in a file.

C has to be what a strategy is: square, finite, lower triangular, with a positive diagonal, and well enough conditioned
that C⁻¹ can be had in float64. How its noise is generated follows from its zeros: rows of C⁻¹ with few entries are
drawn again; a band in C is kept as a ring of outputs; whichever needs fewer vectors. Everything about it is dense, so
it is meant for thousands of steps, not for millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from ..budget import Participation
from ..errors import SordinoError, Unsupported
from .banded import Banded
from .banded_algebra import from_dense
from .banded_sensitivity import banded_sensitivity
from .base import Recurrence, Strategy
from .problem import Problem
from .sensitivity import Sensitivity, sensitivity_of

NAME = "dense"

_CONDITION = 1e12  # ‖C‖₁‖C⁻¹‖₁ up to which C⁻¹ is more than rounding
_ZERO = 1e-13  # of the largest entry of a row of C⁻¹: what rounding leaves where the exact inverse has nothing


class DenseMatrix(Strategy):
    """``C``, entry by entry.

    >>> s = DenseMatrix([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]])
    >>> s.terms(2), s.vectors_regenerated, s.vectors_stored
    ([(2, 1.0), (1, -0.5)], 1, 0)
    """

    def __init__(self, c: np.ndarray | list[list[float]], name: str = NAME) -> None:
        c = _checked(c, name)
        super().__init__(name, len(c))
        self._c = c
        self._inverse = _inverted(c, name)
        self.nonnegative = bool((c >= 0.0).all())
        self.is_identity = bool(np.array_equal(c, np.eye(len(c))))
        self.bands = _bandwidth(c)
        past = (self._inverse != 0.0).sum(axis=1) - 1  # the diagonal is not past
        regenerated = int(past.max())
        self._ring: Banded | None = None
        if self.bands - 1 < regenerated:
            self._ring = Banded(name, from_dense(c, self.bands).T)
            self.vectors_stored = self.bands - 1
        else:
            self.vectors_regenerated = regenerated

    def dense(self) -> np.ndarray:
        return self._c.copy()

    def inverse(self) -> np.ndarray:
        return self._inverse.copy()

    def definition(self) -> dict[str, np.ndarray]:
        return {"matrix": self._c.copy()}

    def terms(self, step: int) -> list[tuple[int, float]]:
        self.check_step(step)
        if self._ring is not None:
            raise Unsupported(
                f"noise={self.name!r}: row {step} of C⁻¹ is longer than the band of C; keep the last "
                f"{self.vectors_stored} outputs instead"
            )
        row = self._inverse[step]
        past = [int(j) for j in np.flatnonzero(row[:step])[::-1]]
        return [(step, float(row[step])), *((j, float(row[j])) for j in past)]

    def recurrence(self, step: int) -> Recurrence:
        return super().recurrence(step) if self._ring is None else self._ring.recurrence(step)

    def row_norm(self, step: int) -> float:
        self.check_step(step)
        return float(np.linalg.norm(self._inverse[step]))

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        self._check(participation)
        assert self.bands is not None
        if 4 * self.bands <= self.steps:
            return banded_sensitivity(self._columns, participation)
        return sensitivity_of(self._c, participation)

    @cached_property
    def _columns(self) -> np.ndarray:
        assert self.bands is not None
        return from_dense(self._c, self.bands)


def dense_matrix(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> DenseMatrix:
    """The matrix in the file `argument`, or the one of a `definition`."""
    name = f"{NAME}:{argument}" if argument else NAME
    if definition is not None and "matrix" in definition:
        made = DenseMatrix(definition["matrix"], name)
    elif not argument:
        raise SordinoError(
            f"noise={NAME!r} needs a matrix; write {NAME + ':PATH'!r} with a .npy or .npz file, or in Python "
            "noise=sordino.strategies.DenseMatrix(C)"
        )
    else:
        made = DenseMatrix(_read(argument, name), name)
    if made.steps != problem.steps:
        raise SordinoError(
            f"noise={name!r}: C is {made.steps}×{made.steps} and the run has {problem.steps} steps; give a "
            f"{problem.steps}×{problem.steps} matrix"
        )
    return made


def _read(text: str, name: str) -> np.ndarray:
    path = Path(text).expanduser()
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            names = list(found.files)
            if len(names) == 1:
                return np.asarray(found[names[0]])
    except OSError as error:
        raise SordinoError(
            f"noise={name!r}: {path} cannot be read ({error.strerror or error}); check the path"
        ) from error
    except Exception as error:  # whatever a damaged or foreign file makes zipfile, zlib or numpy say
        raise SordinoError(
            f"noise={name!r}: {path} is not an array that NumPy wrote; save C with numpy.save"
        ) from error
    raise SordinoError(
        f"noise={name!r}: {path} holds {len(names)} arrays ({', '.join(names[:5]) or 'none'}); "
        "save C alone, with numpy.save"
    )


def _checked(c: object, name: str) -> np.ndarray:
    """C as float64, or what is wrong with it."""
    try:
        given = np.asarray(c)
        made = given.astype(np.float64, casting="same_kind" if given.dtype.kind in "biuf" else "no")
    except (TypeError, ValueError) as error:
        raise SordinoError(f"noise={name!r}: C must be a matrix of real numbers, this is {type(c).__name__}") from error
    if made.ndim != 2 or made.shape[0] != made.shape[1] or made.size == 0:
        raise SordinoError(f"noise={name!r}: C must be square, T×T; it has shape {made.shape}")
    if not np.isfinite(made).all():
        i, j = np.argwhere(~np.isfinite(made))[0]
        raise SordinoError(f"noise={name!r}: C[{i}, {j}] is {made[i, j]}; all entries must be finite")
    upper = np.triu(made, 1)
    if upper.any():
        i, j = np.unravel_index(int(np.abs(upper).argmax()), upper.shape)
        raise SordinoError(
            f"noise={name!r}: C must be lower triangular and C[{i}, {j}] is {made[i, j]:g}; a step cannot use later "
            "noise (the Cholesky factor C of X = CᵀC has to be the reverse one)"
        )
    diagonal = np.diagonal(made)
    if (diagonal == 0.0).any():
        i = int(np.flatnonzero(diagonal == 0.0)[0])
        raise SordinoError(f"noise={name!r}: C[{i}, {i}] is 0, so C is singular; every diagonal entry must be positive")
    if (diagonal < 0.0).any():
        i = int(np.flatnonzero(diagonal < 0.0)[0])
        raise SordinoError(
            f"noise={name!r}: C[{i}, {i}] is {diagonal[i]:g}; multiply that row of C by −1, which is the same mechanism"
        )
    largest = float(np.abs(made).max())
    if not 1e-100 <= largest <= 1e100:
        raise SordinoError(
            f"noise={name!r}: the largest entry of C is {largest:.1g}, whose square is not a number; divide C by it, "
            "which is the same mechanism with another noise multiplier"
        )
    return np.ascontiguousarray(made)


def _inverted(c: np.ndarray, name: str) -> np.ndarray:
    from scipy.linalg import solve_triangular

    with np.errstate(all="ignore"):
        inverse = np.tril(solve_triangular(c, np.eye(len(c)), lower=True))
        condition = float(np.abs(c).sum(axis=0).max() * np.abs(inverse).sum(axis=0).max())
    if not condition <= _CONDITION:
        raise SordinoError(
            f"noise={name!r}: C is numerically singular (condition number {condition:.1g}, at most {_CONDITION:.0g}); "
            "its noise would be mostly rounding"
        )
    inverse[np.abs(inverse) <= _ZERO * np.abs(inverse).max(axis=1, keepdims=True)] = 0.0
    return np.asarray(inverse)


def _bandwidth(c: np.ndarray) -> int:
    rows, columns = np.nonzero(c)
    return int((rows - columns).max()) + 1
