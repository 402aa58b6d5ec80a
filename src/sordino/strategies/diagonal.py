"""The best diagonal C for an example that takes part in every step (DP-λCGD, Theorem 4).

``C = diag((n − j + 1)^{1/4})``, j from 1: with full batches (b = 1, k = n) it reaches ``RMSE = n^{-1/2} Σ_j √j``,
where independent noise of one size has ``√(n(n+1)/2)`` and no factorisation is below ``√((n+1)(2n+1)/6)``.
Noise stays independent from step to step; early steps, which all later sums contain, get less of it.
"""

from __future__ import annotations

import numpy as np

from .banded import Banded
from .problem import Problem


class Diagonal(Banded):
    """``C_jj = (n − j)^{1/4}``, j from 0. The sensitivity of a diagonal is exact.

    >>> np.round(Diagonal(3).dense().diagonal(), 3)
    array([1.316, 1.189, 1.   ])
    """

    def __init__(self, steps: int) -> None:
        super().__init__("diagonal", np.arange(Problem(steps).steps, 0.0, -1.0)[None] ** 0.25)
