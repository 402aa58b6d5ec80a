"""DP-λCGD: subtract λ times the previous step's noise, which is drawn again rather than stored.

``C_ij = λ^{i−j}``, so C⁻¹ has 1 on the diagonal and −λ below it. λ = 0 is DP-SGD;
λ = 1 releases noisy prefix sums with independent noise. The column-normalised variant
is ``C̃ = C D⁻¹``, D the column norms of C, so ``(C̃⁻¹Z)_t = d_t (z_t − λ z_{t−1})``.

Both satisfy the conditions of the leftmost-columns formula for every block of leading
steps: X_ij = λ^{j−i} S_{t−j} / (d_i d_j), S_m = Σ_{l<m} λ^{2l}, and S_m, S_m/S_{m+c} and
S_m/√S_{m+c} do not decrease in m. So the sensitivity is exact, in O(k).
"""

from __future__ import annotations

import math

import numpy as np

from ..budget import Participation
from ..errors import SordinoError
from .sensitivity import Sensitivity
from .toeplitz import Toeplitz
from .workload import PREFIX_SUM, Workload


def parse_lambda(argument: str | float, name: str) -> float:
    """λ from the text after the colon.

    >>> parse_lambda("0.95", "lambda-cgd")
    0.95
    """
    try:
        value = math.nan if isinstance(argument, bool) else float(argument)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise SordinoError(
            f"noise='{name}:{argument}': λ must be from 0 to 1; write for example '{name}:0.95', or '{name}' for the "
            "λ of the smallest error"
        )
    return value


def _spell(lam: float) -> str:
    """The shortest text that parses back to λ: two strategies of one name are the same matrix."""
    return repr(float(lam)).removesuffix(".0")


def _power_sum(lam: float, terms: int | np.ndarray) -> np.ndarray:
    """``S_m = Σ_{l<m} λ^{2l}``, accurate as λ → 1."""
    m = np.asarray(terms, dtype=np.float64)
    if lam == 1.0:
        return m
    if lam == 0.0:
        return np.minimum(m, 1.0)
    log = 2.0 * math.log(lam)
    return np.expm1(m * log) / math.expm1(log)


class LambdaCGD(Toeplitz):
    """``C_ij = λ^{i−j}``.

    >>> round(LambdaCGD(0.9, 10).sensitivity(Participation(steps=10, epochs=4, separation=3)), 3)
    5.427
    """

    def __init__(self, lam: float, steps: int, name: str | None = None) -> None:
        self.lam = parse_lambda(lam, "lambda-cgd")
        super().__init__(name or f"lambda-cgd:{_spell(lam)}", steps, inverse=np.array([1.0, -self.lam])[:steps])

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        self._check(participation)
        return Sensitivity(_leftmost(self.lam, participation), True, "leftmost columns, closed form")

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        if not workload.is_prefix_sum:
            return super().error_rows(workload)
        return 1.0 + (1.0 - self.lam) ** 2 * np.arange(self.steps)


class NormalizedLambdaCGD(Toeplitz):
    """``C̃ = C D⁻¹``: the same correlation, columns of norm 1.

    >>> round(NormalizedLambdaCGD(0.9, 10).sensitivity(Participation(steps=10, epochs=1, separation=10)), 12)
    1.0
    """

    def __init__(self, lam: float, steps: int, name: str | None = None) -> None:
        self.lam = parse_lambda(lam, "lambda-cgd-normalized")
        self.column_norms = np.sqrt(_power_sum(self.lam, steps - np.arange(steps)))  # d_j, of C before
        self.column_norms.flags.writeable = False
        scale = None if self.lam == 0.0 else 1.0 / self.column_norms
        w = np.array([1.0, -self.lam])[:steps]
        super().__init__(name or f"lambda-cgd-normalized:{_spell(lam)}", steps, inverse=w, scale=scale)

    def column_norm(self) -> float:
        return 1.0

    def sensitivity_bound(self, participation: Participation) -> Sensitivity:
        self._check(participation)
        value = _leftmost(self.lam, participation, 1.0 / self.column_norms)
        return Sensitivity(value, True, "leftmost columns, closed form")

    def error_rows(self, workload: Workload = PREFIX_SUM) -> np.ndarray:
        if not workload.is_prefix_sum:
            return super().error_rows(workload)
        d = self.column_norms
        kept = np.square(d[:-1] - self.lam * d[1:])  # what stays of z_j in every later partial sum
        return np.asarray(np.square(d) + np.concatenate([[0.0], np.cumsum(kept)]))


def _leftmost(lam: float, participation: Participation, weights: np.ndarray | None = None) -> float:
    """``‖Σ_{j<k} w_j C[:, jb]‖₂`` over the leading t rows, one geometric segment per participation.

    After participation j the sum decays by λ each step from its value ``a_j = λ^b a_{j−1} + w_j``, so the rows up to
    the next participation contribute ``a_j² S_b`` (the last one up to row t).
    """
    from scipy.signal import lfilter

    t, b = participation.steps, participation.separation
    k = min(participation.epochs, -(-t // b))
    if k == 0:
        return 0.0
    amplitudes = lfilter([1.0], [1.0, -(lam**b)], np.ones(k) if weights is None else weights[: k * b : b])
    lengths = np.full(k, b)
    lengths[-1] = t - (k - 1) * b
    return math.sqrt(float(np.square(amplitudes) @ _power_sum(lam, lengths)))
