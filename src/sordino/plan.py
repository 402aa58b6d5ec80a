"""Budget + sampling + noise → noise multiplier. Pure: no model, no data, nothing private.

`plan` fixes everything the guarantee depends on before a run; the run then asks the
same object what holds after t steps. The order is: schedule, sampler (cyclic Poisson takes its number of parts
from the bands that the noise's name declares), the `Problem` an optimised strategy answers (who takes part when, what
the noise is summed into), strategy, noise multiplier.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from .accounting import Account, account, calibrate, number, resolve, supported
from .accounting.combinations import Kind, instead
from .accounting.estimates import estimated_noise
from .budget import Budget, Guarantee, Schedule, SordinoWarning
from .errors import SordinoError, Unsupported
from .sampling import BallsInBins, CyclicPoisson, Sampling, make_sampling
from .strategies import PREFIX_SUM, STRATEGIES, Problem, Strategy, Workload, make_strategy
from .strategies.problem import Objective

if TYPE_CHECKING:
    from .curvature import CurvatureWorkload, Spectrum

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
    workload: Workload = PREFIX_SUM  # what the noise is summed into
    objective: Objective = "rmse"  # what an optimised strategy was optimised for
    estimated: bool = False  # the noise multiplier is a guess, to compare by: there is no guarantee to ask for
    curvature: CurvatureWorkload | None = None  # what public data says about the loss
    _known: dict[tuple[int, float], Account] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def steps(self) -> int:
        """T."""
        return self.schedule.steps

    @property
    def delta(self) -> float:
        return self.budget.delta

    @cached_property
    def rmse(self) -> float:
        """Root mean square error of all partial results of the workload, in clip norms."""
        return self.strategy.rmse(self.workload) * self.noise_multiplier

    @cached_property
    def max_se(self) -> float:
        """Error of the worst partial result."""
        return self.strategy.max_se(self.workload) * self.noise_multiplier

    @cached_property
    def curvature_score(self) -> float | None:
        """``σ²·Tr(W (CᵀC)⁻¹)``, where a spectrum was given: in proportion to what the noise adds to the final loss."""
        return None if self.curvature is None else self.curvature.score(self.strategy, self.noise_multiplier)

    def account(self, steps_released: int | None = None, delta: float | None = None) -> Account:
        """(ε, δ) after `steps_released` steps (all, if not said).

        Before the end the accountant may answer quickly and a little loosely, but never with more than
        the whole run costs, of which the steps so far are a part.
        """
        if self.estimated:
            raise SordinoError(
                "the noise multiplier of this plan is an estimate; plan without estimated=True to run it"
            )
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
        """(δ, ε) of the whole run for a list of δ (1e-3 … 1e-9 around the budget's, if not given).

        Where every answer takes an accountant seconds of sampling, three of them, if none are given.
        """
        if deltas is None and self.account().samples:
            deltas = [delta for delta in (10.0 * self.delta, self.delta, self.delta / 10.0) if delta < 1.0]
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
        whole = (
            Account(self.budget.epsilon, self.delta, "estimate", "", 0.0, False) if self.estimated else self.account()
        )
        participation = self.sampling.participation
        sensitivity = self.strategy.sensitivity_bound(participation)
        certificate = dict(self.strategy.certificate)
        lambdas = {"lambda": self.strategy.lam} if hasattr(self.strategy, "lam") else {}
        lambdas |= {
            key: certificate[key] for key in ("lambda_rmse", "lambda_max_se", "lambda_curvature") if key in certificate
        }
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
            "rmse": self.rmse,
            "max_se": self.max_se,
            "curvature_score": self.curvature_score,
            "optimality": certificate.get("optimality"),
            "workload": self.workload_as_dict(),
            "curvature": self.curvature_as_dict(),
            "objective": self.objective,
            "certificate": certificate,
            **lambdas,
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
            "samples": whole.samples,
            "estimated": self.estimated,
            "parameters": self.parameters,
            "tails_included": whole.tails_included,
        }

    def workload_as_dict(self) -> dict[str, Any]:
        """Momentum, the factor of weight decay, and the ends of the learning-rate schedule, if there is one."""
        rates = self.workload.learning_rates
        schedule = None if rates is None else {"first": rates[0], "largest": max(rates), "last": rates[self.steps - 1]}
        return {"momentum": self.workload.momentum, "shrink": self.workload.shrink, "learning_rates": schedule}

    def curvature_as_dict(self) -> dict[str, Any] | None:
        """Whose curvature, and at which learning rate."""
        if self.curvature is None:
            return None
        curved, spectrum = self.curvature, self.curvature.spectrum
        return {
            "spectrum": spectrum.describe(),
            "learning_rate": curved.learning_rate,
            "equation": curved.equation,
            "capped": int((spectrum.eigenvalues > curved.eigenvalues()[0]).sum()),
        }


def plan(
    budget: Budget | None = None,
    *,
    examples: int,
    batch_size: int,
    epochs: int,
    noise: str | Strategy = "identity",
    sampling: str = "poisson",
    noise_multiplier: float | None = None,
    delta: float | None = None,
    parameters: int | None = None,
    accountant: str = "auto",
    workload: Workload | None = None,
    objective: Objective | None = None,
    spectrum: Spectrum | CurvatureWorkload | str | PathLike[str] | None = None,
    learning_rate: float | None = None,
    exact_curvature: bool = False,
    separation: int | None = None,
    estimated: bool = False,
) -> Plan:
    """What a run will use and cost. Give a `budget`, or a `noise_multiplier` (and a `delta` to report ε at).

    `workload` is what the noise is summed into (plain prefix sums if not given), `objective` the error that optimised
    noise minimises. A `spectrum` (or its file) and the run's `learning_rate` say how the loss is curved: `noise-curve`
    needs them, and λ of DP-λCGD is then chosen by the curvature score; eigenvalues beyond 1/η count as 1/η unless
    `exact_curvature`. `separation` only checks: it is the sampler's to say. `estimated` is for comparing: where the
    accountant samples for seconds, the noise multiplier is guessed in a fraction of one.

    >>> run = {"examples": 50_000, "batch_size": 128, "epochs": 10}
    >>> p = plan(Budget(8, 1e-5), **run, noise="lambda-cgd:0.95", sampling="fixed-order")
    >>> p.steps, round(p.noise_multiplier, 3)
    (3910, 6.079)
    """
    schedule = Schedule(examples=examples, batch_size=batch_size, epochs=epochs)
    if parameters is not None and (isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < 0):
        raise SordinoError(f"parameters={parameters!r} must be the number of trainable parameters, a whole number")
    if (budget is None) == (noise_multiplier is None):
        given = "neither was given" if budget is None else "both were given"
        raise SordinoError(f"give either budget=Budget(epsilon, delta) or noise_multiplier=: {given}")
    if budget is not None and not isinstance(budget, Budget):
        raise SordinoError(f"budget={budget!r} must be a Budget; write Budget(epsilon=8, delta=1e-5)")
    noise = _brought(noise, schedule.steps)
    sampler = _sampler(sampling, schedule, noise)
    if separation is not None and separation != sampler.participation.separation:
        raise SordinoError(
            f"separation={separation!r}, but sampling={sampler.name!r} keeps {sampler.participation.separation} steps "
            "between two participations of an example; leave it out"
        )
    guess = False
    if noise_multiplier != 0.0 and (budget is None or math.isfinite(budget.epsilon)):
        found = resolve(_kind(noise, schedule.steps), sampler, accountant)  # refused before anything is optimised
        guess = estimated and budget is not None and found.name == "monte-carlo"
    asked = _workload(workload, schedule)
    curved = curvature_asked(spectrum, learning_rate, exact_curvature, asked)
    objective = objective or ("rmse" if curved is None else "curvature")
    needed = _noise_needed(sampler, schedule.steps, budget)
    problem = Problem(schedule.steps, sampler.participation, asked, objective, needed, curved)
    strategy = make_strategy(noise, problem)
    if budget is not None:
        if delta is not None:
            raise SordinoError(f"delta={delta!r} is given twice; leave it to the budget ({budget.delta:g})")
        _warn_delta(budget.delta, examples)
        if guess and isinstance(sampler, BallsInBins):
            sigma = estimated_noise(strategy, sampler, budget, parameters)
        else:
            sigma = calibrate(strategy, sampler, budget, parameters=parameters, accountant=accountant)
    else:
        sigma = number("noise_multiplier", noise_multiplier, at_least=0.0)
        report_at = min(1e-5, 0.1 / examples) if delta is None else number("delta", delta, above=0.0, below=1.0)
        _warn_delta(report_at, examples)
    planned = Plan(
        budget if budget is not None else Budget(math.inf, report_at),
        schedule,
        strategy,
        sampler,
        sigma,
        parameters or None,
        accountant,
        asked,
        objective,
        guess,
        curved,
    )
    if budget is not None and not guess:
        _warn_reach(planned)
    return planned


def _brought(noise: str | Strategy, steps: int) -> str | Strategy:
    """A matrix from a file is what it is whoever takes part: read now, it tells its bands."""
    if isinstance(noise, str) and STRATEGIES.parse(noise)[0].argument == "PATH":
        return make_strategy(noise, steps)
    return noise


def _sampler(sampling: str, schedule: Schedule, noise: str | Strategy) -> Sampling:
    try:
        return make_sampling(sampling, schedule, declared_bands(noise))
    except Unsupported as error:
        kind = _kind(noise, schedule.steps)
        text = f"sampling={sampling!r} with noise={kind.name!r}: {error}"
        if declared_bands(noise) is None:
            text += f"; {instead(kind, make_sampling('cyclic-poisson:1', schedule), supported)}"
        raise Unsupported(text.replace("'cyclic-poisson:1'", repr(sampling))) from None


def declared_bands(noise: str | Strategy) -> int | None:
    """The number of bands of C, as the name says it, before there is a C; None where it says none.

    >>> declared_bands("identity"), declared_bands("bsr:16"), declared_bands("lambda-cgd:0.9")
    (1, 16, None)
    """
    if isinstance(noise, Strategy):
        return 1 if noise.is_identity else noise.bands
    entry, argument = STRATEGIES.parse(noise)
    declared = entry.capabilities.get("bands")
    if declared == "argument":
        return int(argument) if argument.isdigit() else None
    return 1 if _declares_identity(noise) else declared


def _declares_identity(noise: str) -> bool:
    """`identity`, and λ = 0."""
    entry, argument = STRATEGIES.parse(noise)
    if entry.name in ("lambda-cgd", "lambda-cgd-normalized"):
        return bool(argument) and argument.strip("0") in (".", "")
    return bool(entry.capabilities.get("identity"))


def _kind(noise: str | Strategy, steps: int) -> Strategy:
    if isinstance(noise, Strategy):
        return noise
    return Kind(steps, declared_bands(noise), noise, _declares_identity(noise))


def _workload(workload: Workload | None, schedule: Schedule) -> Workload:
    if workload is None:
        return PREFIX_SUM
    if not isinstance(workload, Workload):
        raise SordinoError(f"workload={workload!r} must be a Workload; write Workload(momentum=0.9)")
    workload.rates(schedule.steps)  # as many as there are steps?
    return workload


def curvature_asked(
    spectrum: Spectrum | CurvatureWorkload | str | PathLike[str] | None,
    learning_rate: float | None,
    exact: bool,
    workload: Workload,
) -> CurvatureWorkload | None:
    if spectrum is None:
        if learning_rate is not None or exact:
            raise SordinoError("learning_rate and exact_curvature go with spectrum=; without one, leave them out")
        return None
    from .curvature import curvature_workload  # only who shapes noise by curvature loads that room

    return curvature_workload(spectrum, learning_rate, exact, workload)


def _noise_needed(sampling: Sampling, steps: int, budget: Budget | None) -> Callable[[Strategy], float] | None:
    """What an optimised strategy's choices are weighed with where the sampler amplifies; None: the sensitivity.

    An estimate will do: what is chosen is accounted for afterwards.
    """
    if isinstance(sampling, CyclicPoisson):
        return lambda strategy: strategy.column_norm()
    if isinstance(sampling, BallsInBins) and sampling.bins > 1 and budget is not None and math.isfinite(budget.epsilon):
        return lambda strategy: estimated_noise(strategy, sampling, budget)
    return None


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
