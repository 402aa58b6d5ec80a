"""What the noise's finite reach costs under balls in bins, whatever C.

The normals are a Gaussian conditioned on an event A: every pair lies in a disc of radius R (see `tails`). In units of
the noise, bin i shifts the pairs of row t by vectors of total length at most ``s_ti = M_ti/σ``, chosen adaptively; A_i
is A shifted so. With q, p_i the densities for unbounded noise the densities are q·1_A and p_i·1_{A_i}, over P(A).

**What one bin loses.** Given the history, row t loses ``Σ_pairs H(v) ≤ a·√P·s_ti + c·s_ti²``, P = d/2 the number of
pairs, c = c(s) at the largest s. Summed over the rows

    L_i = a·√P·Σ_t s_ti + c·G_ii/σ²  bounds  Q(A \\ A_i) and P_i(A_i \\ A).

**Remove.** ``∫ (mean_i p_i 1_{A_i} − e^ε q 1_A)₊ ≤ δ + mean_i P_i(A_i \\ A)``: adds ``mean_i L_i``.

**Add.** On A, with U the bins that x does not exclude (x ∈ A_i),

    q − e^ε mean_i p_i 1_{A_i} = mean_i 1_{A_i}(q − e^ε p_i) + mean_i q 1_{A \\ A_i},

so the second part adds ``mean_i L_i`` and the first is δ's integrand where no bin is excluded. Where one is, it is at
most ``mean_i 1_{A_i} (q − e^ε p_i)₊``: every bin alone, without amplification, but only in the excluded strips. Say x
is excluded from bin j by one pair that j shifts by v. A bin i that is not excluded has there a density ratio of at
least ``exp(−(R² − |x|²)/2) ≥ e^{−R·v}``; all other pairs are independent of that one, given the history, whatever is
chosen next. So the strips by shifts of at most u cost ``Σ_j L_j · δ°(ε − R·u)``, δ° the Gaussian mechanism with the
longest mean, and since an example has at most ``Σ s²/u²`` longer shifts, those cost ``(a/u + c) Σ_j G_jj/σ² · δ°(ε −
R·max s)``: the best u.

Or, from ``(q − e^ε p')₊ ≤ (q − e^ε p)₊ + e^ε (p − p')``: adds ``e^ε mean_i P_i(A \\ A_i)``, and under its own bin's
noise a pair comes back into the disc with probability at most a·v. Small ε is decided by this, large ε by the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .bins_gram import BinsGram
from .gaussian import gaussian_delta
from .tails import R_MAX, SHORT_OF_RADIUS, first_order, pair_loss

SHIFTS = np.geomspace(1e-4, 4.0, 24)  # candidates for u


@dataclass(frozen=True)
class BinsTail:
    """The terms of both directions; all 1 where a single row may shift a pair too far."""

    linear: float  # mean_i a·√P·Σ_t s_ti
    quadratic: float  # mean_i c·G_ii/σ²
    square: float  # mean_i G_ii/σ²
    bins: int
    longest: float  # max_i √G_ii/σ
    largest: float  # max s_ti
    radius: float = R_MAX

    @property
    def remove(self) -> float:
        return min(1.0, self.linear + self.quadratic)

    @property
    def worst(self) -> float:
        """An output is excluded from any bin at all."""
        return min(1.0, self.bins * (self.linear + self.quadratic))

    def add(self, epsilon: float) -> float:
        known = 1.0 if self.remove >= 1.0 else self._strips(epsilon)
        back = math.exp(min(epsilon, 700.0)) * self.linear
        return min(self.worst, back, self.remove + known)

    def _strips(self, epsilon: float) -> float:
        first = first_order(self.radius)
        far = gaussian_delta(epsilon - self.radius * self.largest, self.longest)
        every = self.linear + self.quadratic
        best = every * far
        for u in SHIFTS[self.largest > SHIFTS]:
            near = every * gaussian_delta(epsilon - self.radius * float(u), self.longest)
            best = min(best, near + (first / float(u) * self.square + self.quadratic) * far)
        return self.bins * best


def bins_tail(gram: BinsGram, sigma: float, parameters: int, radius: float = R_MAX) -> BinsTail:
    """For noise of `sigma` on `parameters` coordinates."""
    largest = gram.largest / sigma
    square = float(np.trace(gram.gram)) / gram.bins / sigma / sigma
    longest = math.sqrt(float(gram.gram.max())) / sigma
    if not largest <= radius - SHORT_OF_RADIUS:
        return BinsTail(1.0, 1.0, square, gram.bins, longest, largest, radius)
    linear = first_order(radius) * math.sqrt(max(1.0, parameters / 2)) * float(gram.totals.mean()) / sigma
    at = max(largest, 1e-6)  # c does not decrease
    curvature = (pair_loss(at, radius) - first_order(radius) * at) / at**2
    return BinsTail(linear, max(0.0, curvature) * square, square, gram.bins, longest, largest, radius)
