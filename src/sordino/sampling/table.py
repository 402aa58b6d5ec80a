"""Who is in which batch, drawn once: the batches as slices of one sorted array."""

from __future__ import annotations

import numpy as np


class Table:
    """The examples of each of `batches` batches.

    >>> Table(np.array([1, 0, 1, 1]), 2).rows(1).tolist()
    [0, 2, 3]
    """

    def __init__(self, batch_of: np.ndarray, batches: int) -> None:
        self._members = np.argsort(batch_of, kind="stable").astype(np.int64)  # stable: sorted within a batch
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(batch_of, minlength=batches))])

    def rows(self, batch: int) -> np.ndarray:
        return self._members[self._starts[batch] : self._starts[batch + 1]].copy()

    def size(self, batch: int) -> int:
        return int(self._starts[batch + 1] - self._starts[batch])

    def pick(self, batch: int, positions: np.ndarray) -> np.ndarray:
        """Those members of `batch` at the given positions in it."""
        return np.asarray(self._members[self._starts[batch] + positions])
