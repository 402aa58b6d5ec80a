"""What a run costs, and how much noise a budget needs.

`account` goes from the noise multiplier to (ε, δ); `calibrate` inverts it by search, so the
two cannot disagree. Each accountant says which combinations of sampling and strategy it has a proof
for; the rest is `Unsupported`, naming the part. ``ACCOUNTANTS`` is the registry: the first that supports
a combination is what ``accountant="auto"`` means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..budget import Budget
from ..errors import SordinoError, Unsupported
from ..registry import Entry, Registry
from ..sampling import Sampling
from ..strategies import Strategy
from .balls_in_bins import BallsInBinsConvolution
from .base import Accountant, Answer, AnyAccountant, Query
from .combinations import instead
from .fresh_bins import FreshBinsPLD
from .gaussian import FixedOrderGaussian, gaussian_delta, gaussian_epsilon, gaussian_sigma
from .monte_carlo import MonteCarlo, estimate_noise
from .subsampled import SubsampledPLD, SubsampledRDP

ACCOUNTANTS: Registry[AnyAccountant] = Registry("accountant")
ACCOUNTANTS.add(Entry("gaussian", FixedOrderGaussian, "exact, for fixed order and any C", paper="Balle & Wang 2018"))
ACCOUNTANTS.add(
    Entry(
        "pld",
        SubsampledPLD,
        "tight, for Poisson sampling with independent noise and cyclic Poisson with banded noise",
        paper="Doroshenko et al. 2022",
    )
)
ACCOUNTANTS.add(Entry("rdp", SubsampledRDP, "looser, for the same", paper="Mironov et al. 2019"))
ACCOUNTANTS.add(
    Entry(
        "convolution",
        BallsInBinsConvolution,
        "certified upper bound, for balls in bins with independent noise",
        paper="Choquette-Choo et al. 2024; Chua et al. 2024",
    )
)
ACCOUNTANTS.add(
    Entry(
        "monte-carlo",
        MonteCarlo,
        "upper confidence bound, for balls in bins with any noise",
        paper="Choquette-Choo et al. 2024",
    )
)
ACCOUNTANTS.add(
    Entry(
        "bins-pld",
        FreshBinsPLD,
        "certified upper bound, for balls in fresh bins with independent noise",
        paper="Doroshenko et al. 2022",
    )
)


@dataclass(frozen=True)
class Account:
    """What `account` found; `delta` has the tails and the failure probability inside."""

    epsilon: float
    delta: float
    accountant: str
    title: str
    failure_probability: float
    tails_included: bool
    samples: int = 0  # of a Monte Carlo answer


def resolve(strategy: Strategy, sampling: Sampling, accountant: str = "auto") -> AnyAccountant:
    """The accountant for a combination, or `Unsupported` saying which part has none and what there is instead."""
    candidates = [e.build() for e in ([ACCOUNTANTS.find(accountant)] if accountant != "auto" else ACCOUNTANTS)]
    reasons = []
    for candidate in candidates:
        reason = candidate.reason(strategy, sampling)
        if reason is None:
            return candidate
        reasons.append(reason)
    if accountant != "auto" and supported(strategy, sampling):
        raise Unsupported(reasons[0])
    # An accountant of this sampler knows best what is missing.
    near = [reason for reason in reasons if reason.startswith(f"sampling={sampling.name!r}")]
    reason = near[0] if near else f"sampling={sampling.name!r} with noise={strategy.name!r} has no accountant"
    raise Unsupported(f"{reason}; {instead(strategy, sampling, supported)}")


def supported(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether any accountant has a proof for the combination."""
    return any(entry.build().reason(strategy, sampling) is None for entry in ACCOUNTANTS)


def account(
    strategy: Strategy,
    sampling: Sampling,
    noise_multiplier: float,
    *,
    steps: int | None = None,
    delta: float | None = None,
    epsilon: float | None = None,
    parameters: int | None = None,
    accountant: str = "auto",
    coarse: bool = False,
) -> Account:
    """(ε, δ) of the first `steps` steps (all, if not said), for one of `delta` and `epsilon`.

    `parameters` is the number of trainable parameters: the finite reach of the noise then counts in δ.
    `coarse` asks for a quick answer (a thousandth looser), for progress; it is an upper bound like any other.

    >>> from sordino.budget import Schedule
    >>> from sordino.sampling import make_sampling
    >>> from sordino.strategies import make_strategy
    >>> sampling = make_sampling("fixed-order", Schedule(examples=1000, batch_size=100, epochs=4))
    >>> round(account(make_strategy("identity", 40), sampling, 1.2005, delta=1e-5).epsilon, 2)
    8.0
    """
    if (delta is None) == (epsilon is None):
        raise SordinoError(f"delta={delta}, epsilon={epsilon}: give one of the two, and the other is the answer")
    number("noise_multiplier", noise_multiplier, at_least=0.0)
    count = _steps(strategy, sampling, steps)
    if noise_multiplier == 0.0:  # nothing to prove about any combination
        spent = count > 0
        if delta is None:
            return Account(float(epsilon or 0.0), 1.0 if spent else 0.0, "none", "none", 0.0, False)
        return Account(math.inf if spent else 0.0, delta, "none", "none", 0.0, False)
    chosen = resolve(strategy, sampling, accountant)
    query = Query(strategy, sampling, float(noise_multiplier), count, coarse)
    if delta is not None:
        answer = chosen.answer_epsilon(query, number("delta", delta, above=0.0, below=1.0), parameters)
    else:
        answer = chosen.answer_delta(query, number("epsilon", epsilon, at_least=0.0), parameters)
    return Account(
        answer.epsilon,
        answer.delta,
        chosen.name,
        chosen.title,
        answer.failure_probability,
        bool(parameters),
        answer.samples,
    )


def calibrate(
    strategy: Strategy,
    sampling: Sampling,
    budget: Budget,
    *,
    steps: int | None = None,
    parameters: int | None = None,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier that keeps `account` within the budget (to a tolerance, from above)."""
    count = _steps(strategy, sampling, steps)
    if budget.epsilon == math.inf or count == 0:
        return 0.0
    query = Query(strategy, sampling, math.nan, count)
    return resolve(strategy, sampling, accountant).calibrate(query, budget, parameters)


def _steps(strategy: Strategy, sampling: Sampling, steps: int | None) -> int:
    planned = sampling.schedule.steps
    if strategy.steps != planned:
        raise SordinoError(f"{strategy.name!r} was built for {strategy.steps} steps, the schedule has {planned}")
    if steps is None:
        return planned
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= planned:
        raise SordinoError(f"steps={steps!r} must be a whole number from 0 to the {planned} planned")
    return steps


def number(
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """`value` as a float, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SordinoError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    if math.isnan(value) or value < at_least or value <= above or value >= below:
        limits = [f"at least {at_least:g}"] if at_least > -math.inf else []
        limits += [f"more than {above:g}"] if above > -math.inf else []
        limits += [f"less than {below:g}"] if below < math.inf else ["finite"]
        raise SordinoError(f"{name}={value!r} must be {' and '.join(limits)}")
    return float(value)


__all__ = [
    "ACCOUNTANTS",
    "Account",
    "Accountant",
    "Answer",
    "AnyAccountant",
    "Query",
    "account",
    "calibrate",
    "estimate_noise",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "resolve",
    "supported",
]
