"""Lower-triangular matrices with p bands, kept by columns: ``columns[j, l] = C[j+l, j]``, T × p, and 0 past the end.

That is LAPACK's banded storage, transposed. Everything here is O(T p) a vector, O(T p²) a factorisation.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided


def cut(columns: np.ndarray) -> np.ndarray:
    """The same with zeros where a column reaches past the last row."""
    columns = np.array(columns, dtype=np.float64)
    steps, bands = columns.shape
    last = min(steps, bands - 1)
    if last > 0:
        reach = np.arange(last, 0, -1)  # rows left, for the columns at the end
        columns[steps - last :][np.arange(bands) >= reach[:, None]] = 0.0
    return columns


def from_dense(c: np.ndarray, bands: int) -> np.ndarray:
    """The band of a dense lower-triangular (or symmetric) matrix."""
    steps = len(c)
    columns = np.zeros((steps, bands))
    for l in range(bands):
        columns[: steps - l, l] = np.diagonal(c, -l)
    return columns


def to_dense(columns: np.ndarray) -> np.ndarray:
    steps, bands = columns.shape
    c = np.zeros((steps, steps))
    j = np.arange(steps)
    for l in range(min(bands, steps)):
        c[j[l:], j[: steps - l]] = columns[: steps - l, l]
    return c


def multiply(columns: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``C x`` along the first axis."""
    steps, bands = columns.shape
    x = np.asarray(x, dtype=np.float64)
    along = (-1, *[1] * (x.ndim - 1))
    out = columns[:, 0].reshape(along) * x
    for l in range(1, min(bands, steps)):
        out[l:] += columns[: steps - l, l].reshape(along) * x[: steps - l]
    return np.asarray(out)


def solve(columns: np.ndarray, z: np.ndarray, transposed: bool = False) -> np.ndarray:
    """``C⁻¹ z``, or ``C⁻ᵀ z``, along the first axis."""
    from scipy.linalg.lapack import dtbtrs

    z = np.asarray(z, dtype=np.float64)
    columns = np.ascontiguousarray(columns[:, : len(columns)])
    x, _ = dtbtrs(columns.T, z.reshape(len(z), -1), uplo="L", trans="T" if transposed else "N")
    return np.ascontiguousarray(x).reshape(z.shape)


def gram(columns: np.ndarray) -> np.ndarray:
    """The band of ``X = CᵀC``."""
    steps, bands = columns.shape
    out = np.zeros_like(columns)
    for l in range(min(bands, steps)):  # X_{j+l,j} = Σ_a C[j+l+a, j+l] C[j+l+a, j]
        out[: steps - l, l] = np.einsum("ja,ja->j", columns[l:, : bands - l], columns[: steps - l, l:])
    return out


def factor(x: np.ndarray) -> np.ndarray | None:
    """The reverse Cholesky factor C of the band of ``X = CᵀC``; None if X is not positive definite.

    ``C = J·chol(JXJ)ᵀ·J`` with J the exchange matrix: it keeps the band, and the norms of C's columns are ``√X_jj``.
    """
    from scipy.linalg.lapack import dpbtrf

    steps, bands = x.shape
    lower, failed = dpbtrf(_exchanged(x).T, lower=1, overwrite_ab=1)
    return None if failed else _exchanged(lower.T)


def _exchanged(columns: np.ndarray) -> np.ndarray:
    """The band of ``JXJ``, or that of ``J Lᵀ J``: entry (j, l) is entry (T − 1 − j − l, l), 0 where there is none."""
    steps, bands = columns.shape
    padded = np.zeros((bands - 1 + steps, bands))
    padded[bands - 1 :] = columns
    last = padded.reshape(-1)[(bands + steps - 2) * bands :]
    return np.array(as_strided(last, (steps, bands), (-8 * bands, -8 * (bands - 1))))
