"""A banded C for the tests: any lower-triangular dense matrix, given as such."""

from __future__ import annotations

import numpy as np

from sordino.strategies import Strategy


class Given(Strategy):
    """C as an array; `bands` as claimed (None: not banded)."""

    def __init__(self, c: np.ndarray, bands: int | None, name: str = "given") -> None:
        super().__init__(name, len(c))
        self.c, self.bands = np.asarray(c, dtype=np.float64), bands
        self.nonnegative = bool((self.c >= 0).all())
        self.vectors_stored = (bands or self.steps) - 1

    def dense(self) -> np.ndarray:
        return self.c

    def terms(self, step: int) -> list[tuple[int, float]]:
        return [(j, float(x)) for j, x in enumerate(self.inverse()[step]) if x]


def banded(steps: int, bands: int, seed: int = 0, unit: bool = False) -> Given:
    """Random entries of either sign in the band, a diagonal away from 0."""
    rng = np.random.default_rng(seed)
    c = np.tril(rng.normal(size=(steps, steps))) - np.tril(rng.normal(size=(steps, steps)), -bands)
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    c = np.where((lag >= 0) & (lag < bands), c, 0.0)
    c[np.diag_indices(steps)] = 0.8 + rng.random(steps)
    if unit:
        c = c / np.linalg.norm(c, axis=0)
    return Given(c, bands, f"given:{bands}")


def toeplitz(steps: int, coefficients: list[float]) -> Given:
    c = sum((x * np.eye(steps, k=-i) for i, x in enumerate(coefficients)), np.zeros((steps, steps)))
    return Given(c, len(coefficients), f"given:{len(coefficients)}")
