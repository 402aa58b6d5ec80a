"""What the noise's finite reach costs: a term of δ.

The normals come in pairs from a 40-bit radius and a 24-bit angle, so no pair lies beyond
``R_MAX = √(2·41·ln 2) = 7.539``. Noise cut off there is a Gaussian conditioned on an event A
of probability ``(1 − 2⁻⁴¹)`` a pair; an example that shifts the sum by v shifts the support too,
and an output outside the neighbour's support identifies it. For any mechanism that is
(ε, δ)-DP with unbounded noise

    δ_total = (δ + P(A \\ (A + v))) / P(A).

The lost mass. For one pair shifted by a vector of length v it is at most

    H(v) = ∫₀ᵛ h(u) du,   h(u) = (r/2π) ∫_{|α|<π/2} exp(−(r² + u²)/2 + ur·cos α) cos α dα

(the boundary of the shifted disc inside the old one moves outwards at rate cos α; the arc is at most
a half circle). To first order it is ``a·v``, ``a = φ(r)·r·√(2/π) = 6.0 φ(r)``: more than the φ(r)·v of noise cut off
coordinate by coordinate, because a disc has a whole arc of boundary. With ``H(v) ≤ a·v + c(s)·v²`` for
v ≤ s, ``c(s) = (H(s) − a·s)/s²``, a shift of total length s spread over P pairs, in whatever way, loses at most

    a·s·√P + c(s)·s²  =  a·s·(√P − 1) + H(s).

The first term is an example whose gradient is spread over all parameters, the second one
whose gradient is a single entry; the second decides when ε is above about 20: the noise then is
not wide enough to hide such an example, whatever the formula for unbounded noise says.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

R_MAX = math.sqrt(2 * 41 * math.log(2))
PAIR_MISSING = 2.0**-41  # P(radius > R_MAX) = exp(−R_MAX²/2)
SHORT_OF_RADIUS = 1.5  # c(s) increases up to r − 1.5 (checked in the tests); beyond, the term is set to 1
# One odd entry a tensor uses a pair of its own; more tensors than this no model has.
SPARE_PAIRS = 1_000_000


@lru_cache(maxsize=1024)
def pair_loss(shift: float, radius: float = R_MAX) -> float:
    """``H(shift)``: the mass one pair loses at most. Gauss–Legendre in both variables.

    >>> f"{pair_loss(1.67):.2e}"
    '4.75e-09'
    """
    if shift <= 0.0:
        return 0.0
    x, w = np.polynomial.legendre.leggauss(128)
    u, du = (x + 1) * shift / 2, w * shift / 2
    cos, da = np.cos((x + 1) * math.pi / 4), w * math.pi / 2  # twice the quarter circle
    rate = np.exp(-(radius**2 + u[:, None] ** 2) / 2 + radius * u[:, None] * cos) * cos @ da
    return float(radius / (2 * math.pi) * (du @ rate))


def first_order(radius: float = R_MAX) -> float:
    """``a = H'(0) = φ(r)·r·√(2/π)``."""
    return radius * math.exp(-(radius**2) / 2) / math.pi


def lost_mass(shift: float, coordinates: float, radius: float = R_MAX) -> float:
    """``P(A \\ (A + v))`` for any v of length `shift` (in standard deviations) in `coordinates` dimensions."""
    if shift <= 0.0:
        return 0.0
    if shift > radius - SHORT_OF_RADIUS:
        return 1.0
    pairs = max(1.0, coordinates / 2)
    return min(1.0, first_order(radius) * shift * (math.sqrt(pairs) - 1.0) + pair_loss(shift, radius))


def log_kept(steps: int, parameters: int) -> float:
    """``ln P(A)`` over all pairs of all steps."""
    pairs = parameters / 2 + min(parameters / 2, SPARE_PAIRS)
    return steps * pairs * math.log1p(-PAIR_MISSING)
