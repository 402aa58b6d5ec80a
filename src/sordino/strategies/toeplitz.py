"""The base of every Toeplitz strategy: ``C = T·diag(s)``, T lower-triangular Toeplitz, s = 1 unless said.

T is given by the coefficients of its first column (a band: C is banded, and the last p−1
outputs are kept) or by those of its inverse (a band there: the last p−1 rows of Z are
drawn again). Everything is linear in T, or T log T, in time and in memory, but `dense` and `inverse`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..budget import Participation
from ..errors import SordinoError, Unsupported
from .base import Recurrence, Strategy
from .power_series import product, product_transposed, quotient, quotient_transposed, reciprocal
from .sensitivity import Sensitivity
from .toeplitz_errors import error_rows
from .toeplitz_sensitivity import toeplitz_sensitivity
from .workload import PREFIX_SUM, Workload

LARGEST = 1e100  # of C's entries, and of 1 over them: their squares are numbers


def parse_bandwidth(argument: str, name: str, steps: int) -> int:
    """p from the text after the colon, from 1 to T.

    >>> parse_bandwidth("16", "bisr", 100)
    16
    """
    if argument == "":
        raise SordinoError(f"noise={name!r} needs a bandwidth; write for example {name + ':16'!r}")
    try:
        bands = int(argument)
    except ValueError:
        bands = 0
    if bands < 1:
        raise SordinoError(f"noise='{name}:{argument}': the bandwidth must be a whole number of at least 1")
    if bands > steps:
        raise Unsupported(
            f"noise='{name}:{argument}': a bandwidth of {bands} is above the {steps} steps; use at most {steps}"
        )
    return bands


class Toeplitz(Strategy):
    """``C_ij = c_{i−j} s_j``, from the coefficients c or from those of T⁻¹.

    >>> Toeplitz("example", 4, inverse=np.array([1.0, -0.5])).coefficients
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        coefficients: np.ndarray | None = None,
        inverse: np.ndarray | None = None,
        scale: np.ndarray | None = None,
    ) -> None:
        super().__init__(name, steps)
        given = coefficients if coefficients is not None else inverse
        assert given is not None and (coefficients is None or inverse is None)
        self._banded_inverse = coefficients is None
        self._band = _band(given, steps, name)  # the coefficients that are not 0, of T or of T⁻¹
        self._scale = None if scale is None else _fixed(scale, "scale", name)
        if self._scale is not None and (self._scale.shape != (steps,) or not (self._scale > 0.0).all()):
            raise SordinoError(f"noise={name!r}: scale must have {steps} numbers above 0, one for each step")
        if not float(np.abs(self.coefficients).max()) <= LARGEST:  # nor is nan
            raise SordinoError(f"noise={name!r}: the entries of C grow beyond {LARGEST:g} in {steps} steps")
        single = len(self._band) == 1
        self.is_identity = bool(single and self._band[0] == 1.0 and scale is None)
        self.bands = len(self._band) if single or not self._banded_inverse else None
        self.vectors_regenerated = len(self._band) - 1 if self._banded_inverse else 0
        self.vectors_stored = 0 if self._banded_inverse else len(self._band) - 1
        self.nonnegative = bool((self.coefficients >= 0.0).all())

    @cached_property
    def coefficients(self) -> np.ndarray:
        """c, the first column of T, in full."""
        return _fixed(self._filled(not self._banded_inverse), "coefficients", self.name)

    @cached_property
    def inverse_coefficients(self) -> np.ndarray:
        """w, the first column of T⁻¹, in full."""
        return _fixed(self._filled(self._banded_inverse), "inverse", self.name)

    def _filled(self, given: bool) -> np.ndarray:
        if given:
            return np.concatenate([self._band, np.zeros(self.steps - len(self._band))])
        return reciprocal(self._band, self.steps)

    @cached_property
    def scale(self) -> np.ndarray:
        """s, what the columns are multiplied with."""
        return np.ones(self.steps) if self._scale is None else self._scale

    def dense(self) -> np.ndarray:
        return self.columns(0, self.steps)

    def inverse(self) -> np.ndarray:
        from scipy.linalg import toeplitz

        return toeplitz(self.inverse_coefficients, np.zeros(self.steps)) / self.scale[:, None]

    def multiply(self, x: np.ndarray) -> np.ndarray:
        scaled = _along(self.scale, x) * x
        return quotient(self._band, scaled) if self._banded_inverse else product(self._band, scaled)

    def solve(self, z: np.ndarray) -> np.ndarray:
        z = np.asarray(z, dtype=np.float64)
        x = product(self._band, z) if self._banded_inverse else quotient(self._band, z)
        return x / _along(self.scale, z)

    def solve_transposed(self, z: np.ndarray) -> np.ndarray:
        z = np.asarray(z, dtype=np.float64)
        scaled = z / _along(self.scale, z)
        transposed = product_transposed if self._banded_inverse else quotient_transposed
        return transposed(self._band, scaled)

    def columns(self, first: int, last: int) -> np.ndarray:
        padded = np.concatenate([np.zeros(self.steps), self.coefficients])
        rows = np.lib.stride_tricks.sliding_window_view(padded[self.steps - last + 1 :], last - first)
        return np.ascontiguousarray(rows[: self.steps, ::-1]) * self.scale[first:last]

    def column_norm(self) -> float:
        return float((self.scale * np.sqrt(np.cumsum(np.square(self.coefficients))[::-1])).max())

    def terms(self, step: int) -> list[tuple[int, float]]:
        self.check_step(step)
        if not self._banded_inverse and len(self._band) > 1:
            raise Unsupported(
                f"noise={self.name!r}: row {step} of C⁻¹ reaches back to step 0; keep the last "
                f"{self.vectors_stored} outputs instead"
            )
        w = self._band if self._banded_inverse else 1.0 / self._band
        last = min(step + 1, len(w))
        return [(step - lag, float(w[lag] / self.scale[step])) for lag in range(last) if lag == 0 or w[lag] != 0.0]

    def recurrence(self, step: int) -> Recurrence:
        """Forward substitution with a ring of outputs: slot t mod (p−1) holds ``x_t`` until x_{t+p−1} replaces it."""
        slots = self.vectors_stored
        if slots == 0:
            return super().recurrence(step)
        self.check_step(step)
        diagonal = self._band[0] * self.scale[step]
        read, keep, put = [0.0] * slots, [1.0] * slots, [0.0] * slots
        for lag in range(1, min(slots, step) + 1):
            past = step - lag
            read[past % slots] = -float(self._band[lag] * self.scale[past] / diagonal)
        keep[step % slots], put[step % slots] = 0.0, 1.0
        return Recurrence(float(1.0 / diagonal), tuple(read), tuple(keep), tuple(put))

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        self._check(participation)
        return toeplitz_sensitivity(self.coefficients, self._scale, participation)

    @cached_property
    def _inverse_norms(self) -> np.ndarray:
        return np.sqrt(np.cumsum(np.square(self.inverse_coefficients)))

    def row_norm(self, step: int) -> float:
        self.check_step(step)
        return float(self._inverse_norms[step] / self.scale[step])

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        w = self._band if self._banded_inverse else self.inverse_coefficients
        return error_rows(w, self.steps, workload if self._scale is None else workload.scaled(1.0 / self._scale))


def _band(coefficients: np.ndarray, steps: int, name: str) -> np.ndarray:
    given = _fixed(coefficients, "coefficients", name)
    if given.ndim != 1 or not np.isfinite(given).all():
        raise SordinoError(f"noise={name!r}: coefficients must be a list of finite numbers, this is {given}")
    band = np.trim_zeros(given, "b")
    if not 1 <= len(band) <= steps or band[0] <= 0.0:
        raise SordinoError(f"noise={name!r}: coefficients must be 1 to {steps} numbers, the first above 0")
    if not 1.0 / LARGEST <= float(np.abs(band).max()) <= LARGEST:
        raise SordinoError(
            f"noise={name!r}: the largest coefficient must be from 1e-100 to 1e100, or its square is lost"
        )
    return band


def _fixed(values: np.ndarray, what: str, name: str) -> np.ndarray:
    """A copy that cannot be written to: noise and sensitivity are to read the same numbers as long as the run lasts."""
    try:
        copied = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SordinoError(f"noise={name!r}: {what} must be real numbers") from error
    copied.flags.writeable = False
    return copied


def _along(scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    return scale.reshape(-1, *[1] * (np.ndim(x) - 1))
