"""The base of banded strategies with any entries: C lower triangular, ``C_tj = 0`` for t − j ≥ p.

The noise comes by forward substitution, ``x_t = (z_t − Σ_{j=t−p+1}^{t−1} C_tj x_j)/C_tt``, from the last p − 1
outputs. Products, solutions, errors and sensitivities are O(T p) or O(T p²); C⁻¹ is never formed but by `inverse`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..budget import Participation
from ..errors import Unsupported
from .banded_algebra import cut, multiply, solve, to_dense
from .banded_sensitivity import banded_sensitivity
from .base import Recurrence, Strategy
from .blocks import Covariances, Layout, Sums
from .objectives import workload_filter
from .sensitivity import Sensitivity
from .workload import PREFIX_SUM, Workload


class Banded(Strategy):
    """``C[j+l, j] = entries[l, j]``, with a positive diagonal ``entries[0]``.

    >>> Banded("example", np.array([[1.0, 1.0, 2.0], [0.5, 0.25, 9.0]])).dense()
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.  , 0.25, 2.  ]])
    """

    def __init__(self, name: str, entries: np.ndarray) -> None:
        """`entries`: p × T; what reaches past the last row is ignored."""
        super().__init__(name, int(entries.shape[1]))
        self._columns = cut(np.asarray(entries, dtype=np.float64).T)
        self.bands = int(entries.shape[0])
        self.vectors_stored = self.bands - 1
        self.nonnegative = bool((self._columns >= 0.0).all())
        self.is_identity = bool(self.bands == 1 and (self._columns == 1.0).all())

    @property
    def entries(self) -> np.ndarray:
        """``C[j+l, j]`` at (l, j): p × T, 0 past the last row."""
        return self._columns.T

    def dense(self) -> np.ndarray:
        return to_dense(self._columns)

    def multiply(self, x: np.ndarray) -> np.ndarray:
        return multiply(self._columns, x)

    def solve(self, z: np.ndarray) -> np.ndarray:
        return solve(self._columns, z)

    def solve_transposed(self, z: np.ndarray) -> np.ndarray:
        return solve(self._columns, z, transposed=True)

    def inverse(self) -> np.ndarray:
        return self.solve(np.eye(self.steps))

    def columns(self, first: int, last: int) -> np.ndarray:
        out = np.zeros((self.steps, last - first))
        for l in range(min(self._columns.shape[1], self.steps - first)):
            j = np.arange(first, min(last, self.steps - l))
            out[j + l, j - first] = self._columns[j, l]
        return out

    def column_norm(self) -> float:
        return float(np.sqrt(np.square(self._columns).sum(axis=1).max()))

    def terms(self, step: int) -> list[tuple[int, float]]:
        self.check_step(step)
        if self.vectors_stored:
            raise Unsupported(
                f"noise={self.name!r}: row {step} of C⁻¹ reaches back to step 0; keep the last "
                f"{self.vectors_stored} outputs instead"
            )
        return [(step, float(1.0 / self._columns[step, 0]))]

    def recurrence(self, step: int) -> Recurrence:
        """A ring of outputs: slot t mod (p − 1) holds x_t until x_{t+p−1} takes its place."""
        slots = self.vectors_stored
        if slots == 0:
            return super().recurrence(step)
        self.check_step(step)
        fresh = float(1.0 / self._columns[step, 0])
        read, keep, put = [0.0] * slots, [1.0] * slots, [0.0] * slots
        for past in range(max(0, step - slots), step):
            read[past % slots] = -fresh * float(self._columns[past, step - past])
        keep[step % slots], put[step % slots] = 0.0, 1.0
        return Recurrence(fresh, tuple(read), tuple(keep), tuple(put))

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        self._check(participation)
        return banded_sensitivity(self._columns, participation)

    @cached_property
    def _row_norms(self) -> np.ndarray:
        layout = Layout(self.steps, self._columns.shape[1])
        return np.sqrt(Covariances(layout, Sums(layout, None), self._columns).noise())

    def row_norm(self, step: int) -> float:
        self.check_step(step)
        return float(self._row_norms[step])

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        layout = Layout(self.steps, self._columns.shape[1])
        return Covariances(layout, Sums(layout, workload_filter(workload, self.steps)), self._columns).errors()
