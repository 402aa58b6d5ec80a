"""What balls in bins know of a matrix C: how the bins' means overlap.

An example in bin i takes part at steps i, i+b, … and moves the noised quantity C G by at most

    m_i = Σ_{j: i+jb<t} |C|[:, i+jb]

row by row, absolute values taken *before* summing. All that the privacy of the first t steps depends on is the b × b
Gram matrix ``G = MᵀM`` of the leading rows (C is lower triangular, so later columns have nothing there). δ grows with
every entry of G (Kahane's inequality), the diagonal included, so rounding errors are covered by adding a little to all
of them: a billionth everywhere, and on the diagonal what makes G safely positive definite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..strategies import Strategy

ROUNDING = 1e-9  # relative, of every entry
RIDGE = 1e-10  # of the largest diagonal entry
KEPT = 1 << 25  # entries of M that are kept for the next prefix


@dataclass(frozen=True, eq=False)
class BinsGram:
    """G from above, and what the noise's finite reach needs to know of M (t × b)."""

    gram: np.ndarray  # b × b
    totals: np.ndarray  # Σ_t M_ti, one a bin
    largest: float  # max_ti M_ti
    steps: int  # t

    @property
    def bins(self) -> int:
        return len(self.gram)


@lru_cache(maxsize=4)
def bins_gram(strategy: Strategy, bins: int, steps: int) -> BinsGram:
    """G of the first `steps` steps."""
    m = (_kept_means if strategy.steps * bins <= KEPT else bins_means)(strategy, bins)[:steps]
    return from_means(m)


def from_means(m: np.ndarray) -> BinsGram:
    """G of given means, one column a bin."""
    gram = m.T @ m
    gram = (gram + gram.T) * ((1.0 + ROUNDING) / 2.0)
    gram[np.diag_indices_from(gram)] += RIDGE * gram.max()
    return BinsGram(gram, m.sum(axis=0), float(m.max()), len(m))


def bins_means(strategy: Strategy, bins: int) -> np.ndarray:
    """M, T × b, one epoch of columns after the other."""
    m = np.zeros((strategy.steps, bins))
    for first in range(0, strategy.steps, bins):
        last = min(first + bins, strategy.steps)
        m[:, : last - first] += np.abs(strategy.columns(first, last))
    return m


@lru_cache(maxsize=1)
def _kept_means(strategy: Strategy, bins: int) -> np.ndarray:
    return bins_means(strategy, bins)
