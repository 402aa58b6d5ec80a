"""Small strategies with entries that no closed form gives, for the noise room alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Banded:
    """C⁻¹ lower triangular with the given coefficients on its diagonals, rows scaled if `scaled`."""

    coefficients: tuple[float, ...]
    scaled: bool = False
    steps: int = 9
    name: str = "banded"
    vectors_stored: int = 0

    @property
    def vectors_regenerated(self) -> int:
        return len(self.coefficients) - 1

    def inverse(self) -> np.ndarray:
        inverse = sum(c * np.eye(self.steps, k=-k) for k, c in enumerate(self.coefficients))
        d = np.linspace(1, 2, self.steps) if self.scaled else np.ones(self.steps)
        return d[:, None] * inverse

    def terms(self, step: int) -> list[tuple[int, float]]:
        row = self.inverse()[step]
        return [(j, float(row[j])) for j in range(step, -1, -1) if row[j] != 0]

    def recurrence(self, step: int) -> OneStep:
        raise NotImplementedError


@dataclass(frozen=True)
class OneStep:
    fresh: float
    read: tuple[float, ...]
    keep: tuple[float, ...]
    put: tuple[float, ...]


@dataclass
class Buffers:
    """``x_t = f_t z_t + Σ r_i v_i`` with decaying buffers v_i, as in a BLT; coefficients move with t if `moving`.

    With `ring`, the last of the vectors is a ring of one output instead: keep 0, put 1.
    """

    decays: tuple[float, ...] = (0.9, 0.5, 0.25)
    moving: bool = False
    ring: bool = False
    steps: int = 9
    name: str = "buffers"
    vectors_regenerated: int = 0

    @property
    def vectors_stored(self) -> int:
        return len(self.decays)

    def recurrence(self, step: int) -> OneStep:
        m = len(self.decays)
        shift = 0.01 * step if self.moving else 0.0
        read = [-(0.3 - shift) / (i + 1) for i in range(m)]
        keep = [decay + shift for decay in self.decays]
        put = [1.0 if i == 0 else 0.7 for i in range(m)]
        if self.ring:
            keep[-1], put[-1] = 0.0, 1.0
        if self.moving and step % 3 == 1:
            read[0] = 0.0  # not read
            keep[1], put[1] = 1.0, 0.0  # not written
        return OneStep(1.0 + shift, tuple(read), tuple(keep), tuple(put))

    def terms(self, step: int) -> list[tuple[int, float]]:
        raise NotImplementedError

    def inverse(self) -> np.ndarray:
        """The rows of C⁻¹, by going through the steps with unit vectors for z."""
        v = np.zeros((len(self.decays), self.steps))
        rows = []
        for t in range(self.steps):
            r = self.recurrence(t)
            x = r.fresh * np.eye(self.steps)[t] + np.array(r.read) @ v
            v = np.array(r.keep)[:, None] * v + np.array(r.put)[:, None] * x
            rows.append(x)
        return np.stack(rows)
