"""BISR(p), the banded inverse square root: C⁻¹ has the first p coefficients of ``A^{−1/2}``, A the prefix sum.

``A^{−1/2} = (1 − q)^{1/2}``, so ``w_0 = 1, w_i = w_{i−1}(2i−3)/(2i)`` (Kalinin et al. 2025). All w_i but w_0 are
negative, so C ≥ 0. The last p−1 rows of Z are drawn again at each step; nothing is stored.
"""

from __future__ import annotations

import numpy as np

from .problem import Problem
from .toeplitz import Toeplitz, parse_bandwidth


def inverse_square_root(bands: int) -> np.ndarray:
    """The first coefficients of ``(1 − q)^{1/2}``.

    >>> inverse_square_root(4)
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """
    i = np.arange(1.0, bands)
    return np.concatenate([[1.0], np.cumprod((2 * i - 3) / (2 * i))])


def bisr(argument: str, problem: Problem) -> Toeplitz:
    bands = parse_bandwidth(argument, "bisr", problem.steps)
    return Toeplitz(f"bisr:{bands}", problem.steps, inverse=inverse_square_root(bands))
