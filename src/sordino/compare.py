"""Every noise under one budget: planned side by side, with what it costs, and which one to take.

No private data is touched. What has no accountant comes with its reason, and is found out before anything is
optimised. Balls in bins with correlated noise is compared by estimates; what is recommended never is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from .budget import Budget, Schedule
from .cost import StepCost
from .errors import Unsupported
from .plan import Plan, curvature_asked, plan
from .registry import Entry
from .sampling import SAMPLERS
from .strategies import PREFIX_SUM, STRATEGIES, Workload
from .strategies.problem import Objective

if TYPE_CHECKING:
    from .curvature import CurvatureWorkload, Spectrum

BANDWIDTHS = (4, 16, 64)
LAMBDAS = ("", "0.8", "0.9", "0.95")  # "": the best one
SMALL = 8  # a whole number up to this is not a bandwidth but what it is: a number of buffers
WORTH = 0.05  # how much more error is a fair price for a lighter step

CALLED: dict[Objective, str] = {"rmse": "RMSE", "max-se": "largest error", "curvature": "curvature score"}

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Compared:
    """One row: a plan, or the reason there is none."""

    noise: str
    sampling: str
    plan: Plan | None
    reason: str | None

    @property
    def cost(self) -> StepCost:
        assert self.plan is not None
        return StepCost.of(self.plan.strategy)

    @property
    def is_plain(self) -> bool:
        return self.plan is not None and self.plan.strategy.is_identity

    def is_called(self, noise: str, sampling: str) -> bool:
        return self.plan is not None and (self.plan.strategy.name, self.plan.sampling.name) == (noise, sampling)

    def error(self, objective: Objective) -> float:
        assert self.plan is not None
        if objective == "curvature":
            assert self.plan.curvature_score is not None
            return self.plan.curvature_score
        return self.plan.rmse if objective == "rmse" else self.plan.max_se

    def as_dict(self) -> dict[str, Any]:
        if self.plan is None:
            return {"noise": self.noise, "sampling": self.sampling, "reason": self.reason}
        return self.plan.as_dict() | self.cost.as_dict(self.plan.parameters) | {"reason": None}


@dataclass(frozen=True)
class Recommendation:
    noise: str
    sampling: str
    reason: str


def candidates(schedule: Schedule, spectrum: bool = False) -> list[str]:
    """What is worth comparing: every noise with sensible arguments, bandwidths up to T and b.

    What is shaped by the curvature of the loss only where there is a spectrum.

    >>> candidates(Schedule(examples=1000, batch_size=100, epochs=2))[:4]
    ['identity', 'lambda-cgd', 'lambda-cgd:0.8', 'lambda-cgd:0.9']
    """
    return [text for entry in _listed(spectrum) for text in _spelled(entry, schedule)]


def _listed(spectrum: bool) -> list[Entry[Any]]:
    return [entry for entry in STRATEGIES if spectrum or not entry.capabilities.get("needs_spectrum")]


def _spelled(entry: Entry[Any], schedule: Schedule) -> Iterator[str]:
    usual = entry.argument
    if not usual:
        yield entry.name
    elif usual.isdigit() and int(usual) > SMALL:
        largest = min(schedule.steps, schedule.steps_per_epoch)
        fitting = sorted({min(p, largest) for p in BANDWIDTHS})
        yield from (f"{entry.name}:{p}" for p in fitting if p > 1)
    elif usual.isdigit():
        yield entry.spelled()
    elif usual.replace(".", "", 1).isdigit():
        yield from (f"{entry.name}:{lam}" if lam else entry.name for lam in LAMBDAS)
    # Anything else has to be brought by the user: a file, say.


def all_samplings() -> list[str]:
    """Every sampler, and every kind of it that is a choice of its own."""
    return [*SAMPLERS.names(), *(f"{e.name}:{e.optional}" for e in SAMPLERS if e.optional == "fresh")]


def compare(
    budget: Budget,
    *,
    examples: int,
    batch_size: int,
    epochs: int,
    noises: Iterable[str] | None = None,
    samplings: Iterable[str] | None = None,
    parameters: int | None = None,
    workload: Workload | None = None,
    objective: Objective | None = None,
    spectrum: Spectrum | CurvatureWorkload | str | PathLike[str] | None = None,
    learning_rate: float | None = None,
    exact_curvature: bool = False,
    progress: Progress | None = None,
) -> list[Compared]:
    """Every sampling × noise, planned under one budget; the least error first, what has none last.

    With a `spectrum` the error is the curvature score, unless `objective` says otherwise.

    Where the accountant samples the noise is estimated (``plan.estimated``); `decide` settles what matters.
    """
    schedule = Schedule(examples=examples, batch_size=batch_size, epochs=epochs)
    curved = curvature_asked(spectrum, learning_rate, exact_curvature, workload or PREFIX_SUM)
    objective = objective or ("rmse" if curved is None else "curvature")
    names = candidates(schedule, curved is not None) if noises is None else list(noises)
    draws = list(all_samplings() if samplings is None else samplings)
    pairs = [(sampling, noise) for sampling in draws for noise in names]
    rows: dict[tuple[str, str, str], Compared] = {}
    for done, (sampling, noise) in enumerate(pairs):
        if progress is not None:
            progress(done, len(pairs), f"{noise}, {sampling}")
        try:
            planned = plan(
                budget,
                examples=examples,
                batch_size=batch_size,
                epochs=epochs,
                noise=noise,
                sampling=sampling,
                parameters=parameters,
                workload=workload,
                objective=objective,
                spectrum=curved,
                estimated=True,
            )
            row = Compared(noise, sampling, planned, None)
            drawn = "poisson" if planned.sampling.name == "cyclic-poisson:1" else planned.sampling.name
            key = (planned.strategy.name, drawn, "")
        except Unsupported as error:
            row, key = Compared(noise, sampling, None, str(error)), (noise, sampling, "none")
        rows.setdefault(key, row)  # the best λ may be one that is listed anyway; one part is Poisson
    if progress is not None:
        progress(len(pairs), len(pairs), "")
    return sorted(rows.values(), key=lambda row: _order(row, objective))


def decide(
    budget: Budget, rows: Sequence[Compared], objective: Objective = "rmse", progress: Progress | None = None
) -> tuple[list[Compared], Recommendation | None]:
    """`recommend`, with nothing recommended that is only an estimate: what would be is planned properly first."""
    rows = list(rows)
    while True:
        chosen = recommend(rows, objective)
        if chosen is None:
            return rows, None
        at = next(i for i, row in enumerate(rows) if row.is_called(chosen.noise, chosen.sampling))
        guessed = rows[at].plan
        assert guessed is not None
        if not guessed.estimated:
            rows.sort(key=lambda row: _order(row, objective))
            return rows, chosen
        if progress is not None:
            progress(0, 1, f"accounting for {chosen.noise}, {chosen.sampling}")
        planned = plan(
            budget,
            **asdict(guessed.schedule),
            noise=guessed.strategy,
            sampling=guessed.sampling.name,
            parameters=guessed.parameters,
            workload=guessed.workload,
            objective=objective,
            spectrum=guessed.curvature,
        )
        rows[at] = replace(rows[at], plan=planned)


def _order(row: Compared, objective: Objective) -> tuple[bool, float]:
    """The least error first, what has none last."""
    return (True, 0.0) if row.plan is None else (False, row.error(objective))


def recommend(rows: Iterable[Compared], objective: Objective = "rmse") -> Recommendation | None:
    """The least error, unless something within 5 % of it burdens a step less; then that, and the trade."""
    planned = [row for row in rows if row.plan is not None]
    if not planned:
        return None
    curved = objective == "curvature"
    best = min(planned, key=lambda row: row.error(objective))
    least = best.error(objective)
    near = [row for row in planned if row.error(objective) <= (1.0 + WORTH) * least]
    chosen = min(near, key=lambda row: (row.cost.burden, row.error(objective)))
    said = [f"{CALLED[objective]} {chosen.error(objective):.4g}"]
    if chosen is best:
        said[0] += ", the least of all"
        said += [f"each step {_asks(best)}"] if best.cost.burden else []
        light = [row for row in planned if row.cost.stored == 0]
        if best.cost.stored and light:
            other = min(light, key=lambda row: row.error(objective))
            more = other.error(objective) / least - 1.0
            said.append(f"{_named(other)}, the best that keeps none, has {more:.0%} more{'' if curved else ' error'}")
    else:
        more = chosen.error(objective) / least - 1.0
        said[0] += f", {more:.1%} above the least ({_named(best)}, {least:.4g})"
        said.append(f"each step {_asks(chosen)} where that {_asks(best)}")
    plain = [row for row in planned if row.is_plain]
    if plain and not chosen.is_plain:
        other = min(plain, key=lambda row: row.error(objective))
        said.append(f"independent noise at its best ({other.sampling}) has {other.error(objective):.4g}")
    assert chosen.plan is not None
    return Recommendation(chosen.plan.strategy.name, chosen.plan.sampling.name, "; ".join(said))


def _named(row: Compared) -> str:
    assert row.plan is not None
    return f"{row.plan.strategy.name} with {row.plan.sampling.name}"


def _asks(row: Compared) -> str:
    """What a step needs of the past, in words."""
    kept, redrawn = row.cost.stored, row.cost.regenerated
    if kept:
        return f"keeps {kept} vector{'s' if kept > 1 else ''}"
    return f"draws {redrawn} vector{'s' if redrawn > 1 else ''} again" if redrawn else "needs nothing of the past"
