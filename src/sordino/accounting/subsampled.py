"""Poisson and cyclic Poisson sampling: compositions of the subsampled Gaussian, as `cyclic` counts them.

Two accountants, both from dp-accounting: `pld` composes the privacy loss distribution,
discretised so that every rounding is pessimistic (connect the dots), and is tight; `rdp`
composes Rényi divergences, and is looser but holds at any δ, however small. The FFT of a PLD
carries rounding errors of up to a few 1e-12, so `pld` gives away ``FFT_ERROR`` of δ, and where δ is not
well above that it answers with `rdp`. Adjacency is add/remove, both directions.

Where the library cannot answer (σ so small that it leaves floating point), `pld` falls back on `rdp`, and `rdp` on the
Gaussian mechanism without amplification, μ = √t/σ: the run is a mixture over who takes part when, each part
at most that mechanism, and δ is jointly convex.

**Discretisation.** Connecting the dots with spacing h adds at most h²/6 to the variance s² of one step's
loss, hence about h²/12s² to ε, relatively, whatever T is: h = s/40 costs 5e-5, h = s/8 (for
bracketing a search) a thousandth. Without this, a fixed h is either slow or, at small q and many steps, loose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..sampling import Sampling
from ..strategies import Strategy
from .base import Accountant, Curve, Query, Tail
from .cyclic import reason, rounds
from .gaussian import GaussianCurve, gaussian_delta, gaussian_epsilon
from .tails import lost_mass

FFT_ERROR = 1e-11
SMALLEST_DELTA = 1e-9  # below this, RDP answers
FINE, COARSE = 40, 8  # grid points per standard deviation of one step's loss
# Points of the distribution of one step (which the library builds one by one), and of all steps.
LARGEST_GRID, LARGEST_COARSE_GRID, LARGEST_COMPOSED = 200_000, 40_000, 4_000_000


class SubsampledAccountant(Accountant):
    """What the two share: the combinations, and what finite tails cost."""

    def reason(self, strategy: Strategy, sampling: Sampling) -> str | None:
        return reason(strategy, sampling, self.name)

    def tails(self, query: Query, curve: Curve, parameters: int) -> Tail:
        """What finite tails add: q·m participations in the mean, all m at worst, m the number of rounds (or steps).

        With the example: given who takes part, each participation loses `strip`; averaged over the
        sampling that is q·m·strip. Without it (the other direction): an output in a strip of one round
        has, with the example, at least 1−q of its density there, so such an output costs
        no more than ``δ(ε + ln(1−q))``, and there are m strips; two strips at once (m·strip)²/2.
        That is below q·m·strip wherever ``δ(ε + ln(1−q)) + m·strip/2 ≤ q``, which `holds` checks.
        """
        r = rounds(query)
        q, m = r.rate, r.count
        strip = lost_mass(1.0 / r.multiplier, r.rows * parameters)

        def holds(epsilon: float) -> bool:
            if q >= 1.0:
                return True
            shifted = epsilon + math.log1p(-q)
            return shifted >= 0.0 and curve.delta(shifted) + m * strip / 2 <= q

        return Tail(min(1.0, q * m * strip), min(1.0, m * strip), holds)


class SubsampledPLD(SubsampledAccountant):
    """The privacy loss distribution."""

    name = "pld"
    title = "PLD"
    tolerance = 2e-6

    def curve(self, query: Query) -> Curve:
        r = rounds(query)
        if r.rate >= 1.0:
            return GaussianCurve(math.sqrt(r.count) / r.multiplier)
        return PLDCurve(r.rate, r.multiplier, r.count, query.coarse)


class SubsampledRDP(SubsampledAccountant):
    """Rényi differential privacy."""

    name = "rdp"
    title = "RDP"
    tolerance = 1e-9

    def curve(self, query: Query) -> Curve:
        r = rounds(query)
        return RDPCurve(r.rate, r.multiplier, r.count)


def first_answer(answer: Callable[[], float], coarser: Callable[[], float]) -> float:
    """`answer`, or `coarser` where the library raises (whatever it raises) or has no finite number to give."""
    try:
        with np.errstate(all="ignore"):
            found = float(answer())
    except Exception:
        found = math.nan
    return found if math.isfinite(found) else coarser()


@dataclass(frozen=True)
class RDPCurve:
    """t compositions at rate q, through Rényi divergences."""

    q: float
    sigma: float
    steps: int

    def delta(self, epsilon: float) -> float:
        found = first_answer(
            lambda: _rdp(self.q, self.sigma, self.steps).get_delta(epsilon),
            lambda: gaussian_delta(epsilon, self._shift),
        )
        return min(1.0, max(0.0, found))

    def epsilon(self, delta: float) -> float:
        found = first_answer(
            lambda: _rdp(self.q, self.sigma, self.steps).get_epsilon(delta),
            lambda: gaussian_epsilon(delta, self._shift),
        )
        return max(0.0, found)

    @property
    def _shift(self) -> float:
        """As if the example took part in every step."""
        return math.sqrt(self.steps) / self.sigma


@dataclass(frozen=True)
class PLDCurve:
    """t compositions at rate q, through the privacy loss distribution (and RDP where δ is tiny)."""

    q: float
    sigma: float
    steps: int
    coarse: bool = False

    def delta(self, epsilon: float) -> float:
        delta = FFT_ERROR + first_answer(
            lambda: self._composed().get_delta_for_epsilon(epsilon), lambda: self._rdp.delta(epsilon)
        )
        return min(1.0, delta if delta >= SMALLEST_DELTA else min(delta, self._rdp.delta(epsilon)))

    def epsilon(self, delta: float) -> float:
        if delta < SMALLEST_DELTA:
            return self._rdp.epsilon(delta)
        # The library searches a little beyond its own answer; never take less than 0.
        found = first_answer(
            lambda: self._composed().get_epsilon_for_delta(delta - FFT_ERROR), lambda: self._rdp.epsilon(delta)
        )
        return max(0.0, found)

    @property
    def _rdp(self) -> RDPCurve:
        return RDPCurve(self.q, self.sigma, self.steps)

    def _composed(self) -> Any:
        h = _spacing(self.q, self.sigma, self.steps, COARSE if self.coarse else FINE)
        return _compose(self.q, self.sigma, h, self.steps)


@lru_cache(maxsize=64)
def _rdp(q: float, sigma: float, steps: int) -> Any:
    from absl import logging
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant()
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it says so for every order it leaves out, which is only pessimistic
    try:
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), steps)
    finally:
        logging.set_verbosity(level)
    return accountant


@lru_cache(maxsize=512)
def _spacing(q: float, sigma: float, steps: int, points: int) -> float:
    """The grid's h: one step's standard deviation of the loss (at most 1) over `points`, coarser if too many."""
    mu = 1.0 / sigma
    z = np.linspace(-12.0, 12.0 + mu, 4001)
    # Without the example x ~ N(0, 1), with it (1−q)·N(0, 1) + q·N(μ, 1); ℓ = ln of the ratio.
    loss = np.logaddexp(math.log1p(-q), math.log(q) + mu * z - mu * mu / 2)
    weight = np.exp(-z * z / 2 + loss)  # of the mixture
    weight /= weight.sum()
    mean = float(weight @ loss)
    deviation = math.sqrt(max(float(weight @ np.square(loss - mean)), 1e-24))
    width = float(loss[-1] - loss[0])
    composed = 24 * deviation * math.sqrt(steps)
    largest = LARGEST_GRID if points >= FINE else LARGEST_COARSE_GRID
    return max(min(deviation, 1.0) / points, width / largest, composed / LARGEST_COMPOSED, 1e-9)


@lru_cache(maxsize=16)
def _one_step(q: float, sigma: float, spacing: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=spacing, use_connect_dots=True
    )


@lru_cache(maxsize=32)
def _compose(q: float, sigma: float, spacing: float, steps: int) -> Any:
    return _one_step(q, sigma, spacing).self_compose(steps)
