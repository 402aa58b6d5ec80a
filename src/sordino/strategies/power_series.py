"""Lower-triangular Toeplitz matrices as truncated power series: product, quotient, reciprocal.

A series ``a`` may be shorter than what it acts on (a band). Short ones run as direct
recursions, whose rounding is that of forward substitution; long ones by FFT, with
absolute errors of about 1e-16 times the largest coefficient. Everything acts along the
first axis and keeps its length.
"""

from __future__ import annotations

import numpy as np

_SHORT = 256  # coefficients up to which the direct recursion is used, whatever the length of x


def product(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``a(q)·x``, truncated to the length of x: the Toeplitz matrix with first column a, times x.

    >>> product(np.array([1.0, -1.0]), np.array([1.0, 4.0, 9.0]))
    array([1., 3., 5.])
    """
    a = a[: len(x)]
    if len(a) <= _SHORT:
        from scipy.signal import lfilter

        return np.asarray(lfilter(a, [1.0], x, axis=0))
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(x, a.reshape(-1, *[1] * (x.ndim - 1)), axes=0)[: len(x)])


def quotient(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``x/a(q)``: forward substitution.

    >>> quotient(np.array([1.0, -1.0]), np.array([1.0, 3.0, 5.0]))
    array([1., 4., 9.])
    """
    a = a[: len(x)]
    if len(a) <= _SHORT:
        from scipy.signal import lfilter

        return np.asarray(lfilter([1.0], a, x, axis=0))
    return product(reciprocal(a, len(x)), x)


def reciprocal(a: np.ndarray, n: int) -> np.ndarray:
    """The first n coefficients of ``1/a(q)``: the first column of the inverse.

    >>> reciprocal(np.array([1.0, -0.5]), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    if len(a) <= _SHORT:
        impulse = np.zeros(n)
        impulse[0] = 1.0
        return quotient(a, impulse)
    out = np.array([1.0 / a[0]])
    while len(out) < n:  # Newton: g ← g(2 − a g) doubles the number of right coefficients
        m = min(2 * len(out), n)
        guess = np.concatenate([out, np.zeros(m - len(out))])
        residual = -_fft_product(a[:m], guess, m)
        residual[0] += 2.0
        out = _fft_product(guess, residual, m)
    return out


def _fft_product(a: np.ndarray, x: np.ndarray, n: int) -> np.ndarray:
    from scipy.fft import irfft, next_fast_len, rfft

    size = next_fast_len(len(a) + len(x) - 1, real=True)
    return np.asarray(irfft(rfft(a, size) * rfft(x, size), size)[:n])


def product_transposed(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The transposed Toeplitz matrix with first column a, times x."""
    return product(a, x[::-1])[::-1]


def quotient_transposed(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The transposed inverse of the Toeplitz matrix with first column a, times x."""
    return quotient(a, x[::-1])[::-1]
