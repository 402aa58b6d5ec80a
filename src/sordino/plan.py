"""Budget + sampling + noise → noise multiplier. Pure: no model, no data, nothing private.

`plan` fixes everything the guarantee depends on before a run; the run then asks the
same object what holds after t steps. `compare` plans every combination there is, with the reason
where one has no accountant.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .accounting import Account, account, calibrate, number
from .budget import Budget, Guarantee, Schedule, SordinoWarning
from .errors import SordinoError, Unsupported
from .sampling import SAMPLERS, Sampling, make_sampling
from .strategies import STRATEGIES, Strategy, make_strategy

PROGRESS_POINTS = 64  # how many different prefixes a progress bar costs at most


@dataclass(frozen=True)
class Plan:
    """One run's public constants, its sampler and strategy, and the noise they need."""

    budget: Budget  # epsilon=inf where a noise multiplier stands in for it
    schedule: Schedule
    strategy: Strategy
    sampling: Sampling
    noise_multiplier: float
    parameters: int | None = None  # trainable parameters; None: the noise's finite reach is left out
    accountant: str = "auto"
    _known: dict[tuple[int, float], Account] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def steps(self) -> int:
        """T."""
        return self.schedule.steps

    @property
    def delta(self) -> float:
        return self.budget.delta

    def account(self, steps_released: int | None = None, delta: float | None = None) -> Account:
        """(ε, δ) after `steps_released` steps (all, if not said).

        Before the end the accountant may answer quickly and a little loosely, but never with more than
        the whole run costs, of which the steps so far are a part.
        """
        key = (self.steps if steps_released is None else steps_released, self.delta if delta is None else delta)
        if key not in self._known:
            self._known[key] = account(
                self.strategy,
                self.sampling,
                self.noise_multiplier,
                steps=key[0],
                delta=key[1],
                parameters=self.parameters,
                accountant=self.accountant,
                coarse=key[0] < self.steps,
            )
            if key[0] < self.steps:
                found, whole = self._known[key], self.account(delta=key[1])
                self._known[key] = replace(found, epsilon=min(found.epsilon, whole.epsilon))
        return self._known[key]

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps."""
        return self.account(steps).epsilon

    def epsilon_progress(self, steps: int) -> float:
        """ε of the first `steps` steps or a few more: an upper bound, cheap enough to show at every step."""
        stride = -(-self.steps // PROGRESS_POINTS)
        return self.epsilon_after(min(self.steps, -(-steps // stride) * stride))

    def epsilon_curve(self, deltas: Sequence[float] | None = None) -> list[tuple[float, float]]:
        """(δ, ε) of the whole run for a list of δ (1e-3 … 1e-9 around the budget's, if not given)."""
        grid = [10.0**-e for e in (3, 4, 5, 6, 7, 8, 9)] if deltas is None else list(deltas)
        if deltas is None and not any(math.isclose(self.delta, d) for d in grid):
            grid = sorted([*grid, self.delta], reverse=True)
        return [(delta, self.account(delta=delta).epsilon) for delta in grid]

    def guarantee(
        self,
        steps_released: int | None = None,
        *,
        clip_norm: float | None = None,
        examples_stated: bool = True,
        seeded: bool = False,
        remarks: tuple[str, ...] = (),
    ) -> Guarantee:
        """What holds once `steps_released` steps are out (all, if not said)."""
        released = self.steps if steps_released is None else steps_released
        whole = self.account()
        spent = whole if released == self.steps else self.account(released)
        return Guarantee(
            epsilon=spent.epsilon,
            delta=spent.delta,
            adjacency=self.sampling.adjacency,
            sampling=self.sampling.describe(),
            noise=self.strategy.name,
            accountant=whole.title,
            noise_multiplier=self.noise_multiplier,
            steps_released=released,
            steps_planned=self.steps,
            planned_epsilon=whole.epsilon,
            examples=self.schedule.examples,
            batch_size=self.schedule.batch_size,
            epochs=self.schedule.epochs,
            examples_stated=examples_stated,
            clip_norm=clip_norm,
            failure_probability=whole.failure_probability,
            tails_included=whole.tails_included,
            seeded=seeded,
            remarks=tuple(remarks),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON object; an infinite ε is None."""
        whole = self.account()
        participation = self.sampling.participation
        sensitivity = self.strategy.sensitivity_bound(participation)
        return {
            "noise": self.strategy.name,
            "sampling": self.sampling.name,
            "adjacency": self.sampling.adjacency.value,
            "accountant": whole.accountant,
            "epsilon": whole.epsilon if math.isfinite(whole.epsilon) else None,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": sensitivity.value,
            "sensitivity_route": sensitivity.route,
            "sensitivity_exact": sensitivity.exact,
            "rmse": self.strategy.rmse() * self.noise_multiplier,
            "max_se": self.strategy.max_se() * self.noise_multiplier,
            "examples": self.schedule.examples,
            "batch_size": self.schedule.batch_size,
            "epochs": self.schedule.epochs,
            "steps_per_epoch": self.schedule.steps_per_epoch,
            "steps": self.steps,
            "rate": self.sampling.rate,
            "separation": participation.separation,
            "participations": participation.epochs,
            "noise_vectors_stored": self.strategy.vectors_stored,
            "noise_vectors_regenerated": self.strategy.vectors_regenerated,
            "failure_probability": whole.failure_probability,
            "parameters": self.parameters,
            "tails_included": whole.tails_included,
        }


def plan(
    budget: Budget | None = None,
    *,
    examples: int,
    batch_size: int,
    epochs: int,
    noise: str = "identity",
    sampling: str = "poisson",
    noise_multiplier: float | None = None,
    delta: float | None = None,
    parameters: int | None = None,
    accountant: str = "auto",
) -> Plan:
    """What a run will use and cost. Give a `budget`, or a `noise_multiplier` (and a `delta` to report ε at).

    >>> run = {"examples": 50_000, "batch_size": 128, "epochs": 10}
    >>> p = plan(Budget(8, 1e-5), **run, noise="lambda-cgd:0.95", sampling="fixed-order")
    >>> p.steps, round(p.noise_multiplier, 3)
    (3910, 6.079)
    """
    schedule = Schedule(examples=examples, batch_size=batch_size, epochs=epochs)
    if parameters is not None and (isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < 0):
        raise SordinoError(f"parameters={parameters!r} must be the number of trainable parameters, a whole number")
    strategy = make_strategy(noise, schedule.steps)
    try:
        sampler = make_sampling(sampling, schedule, 1 if strategy.is_identity else strategy.bands)
    except Unsupported as error:
        raise Unsupported(f"noise={strategy.name!r}: {error}") from None
    if (budget is None) == (noise_multiplier is None):
        given = "neither was given" if budget is None else "both were given"
        raise SordinoError(f"give either budget=Budget(epsilon, delta) or noise_multiplier=: {given}")
    if budget is not None:
        if not isinstance(budget, Budget):
            raise SordinoError(f"budget={budget!r} must be a Budget; write Budget(epsilon=8, delta=1e-5)")
        if delta is not None:
            raise SordinoError(f"delta={delta!r} is given twice; leave it to the budget ({budget.delta:g})")
        _warn_delta(budget.delta, examples)
        sigma = calibrate(strategy, sampler, budget, parameters=parameters, accountant=accountant)
        planned = Plan(budget, schedule, strategy, sampler, sigma, parameters or None, accountant)
        _warn_reach(planned)
        return planned
    else:
        sigma = number("noise_multiplier", noise_multiplier, at_least=0.0)
        report_at = min(1e-5, 0.1 / examples) if delta is None else number("delta", delta, above=0.0, below=1.0)
        _warn_delta(report_at, examples)
        budget = Budget(math.inf, report_at)
        account(strategy, sampler, sigma, steps=0, delta=report_at, accountant=accountant)  # supported at all?
    return Plan(budget, schedule, strategy, sampler, sigma, parameters or None, accountant)


def _warn_delta(delta: float, examples: int) -> None:
    if delta >= 1.0 / examples:
        warnings.warn(
            f"delta={delta:g} is not below 1/N = {1 / examples:.3g}: publishing an example at random would do; "
            f"use at most {0.1 / examples:.1g}",
            SordinoWarning,
            stacklevel=3,
        )


def _warn_reach(planned: Plan) -> None:
    """Where the noise's finite reach decides, a small δ buys noise and not ε: nobody should have to guess why."""
    epsilon, wanted = planned.account().epsilon, planned.budget.epsilon
    if math.isfinite(wanted) and epsilon < 0.9 * wanted:
        warnings.warn(
            f"delta={planned.delta:g} is so small for {planned.parameters} parameters and {planned.steps} steps that "
            f"the noise's finite reach (7.5 deviations) decides: noise multiplier {planned.noise_multiplier:.4g} "
            f"and epsilon {epsilon:.3g} instead of {wanted:g}; a larger delta would need less",
            SordinoWarning,
            stacklevel=3,
        )


@dataclass(frozen=True)
class Compared:
    """One row of `compare`: a plan, or the reason there is none."""

    noise: str
    sampling: str
    plan: Plan | None
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        if self.plan is None:
            return {"noise": self.noise, "sampling": self.sampling, "reason": self.reason}
        return self.plan.as_dict() | {"reason": None}


def compare(
    budget: Budget,
    *,
    examples: int,
    batch_size: int,
    epochs: int,
    noises: Iterable[str] | None = None,
    samplings: Iterable[str] | None = None,
    parameters: int | None = None,
) -> list[Compared]:
    """Every sampling × noise (each with its usual argument), planned under one budget."""
    rows = []
    for sampling in SAMPLERS.names() if samplings is None else samplings:
        for noise in [e.spelled() for e in STRATEGIES] if noises is None else noises:
            try:
                planned = plan(
                    budget,
                    examples=examples,
                    batch_size=batch_size,
                    epochs=epochs,
                    noise=noise,
                    sampling=sampling,
                    parameters=parameters,
                )
                rows.append(Compared(noise, sampling, planned, None))
            except Unsupported as error:
                rows.append(Compared(noise, sampling, None, str(error)))
    return rows
