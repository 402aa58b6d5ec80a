"""``sordino plan`` and ``sordino account``: from a budget to noise, and back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budget import Budget, Schedule, round_up, significant_up
from ..errors import SordinoError
from ..plan import Compared, Plan, compare, plan
from .output import grid, out, to_json

if TYPE_CHECKING:
    from ..registry import Registry


def schedule(**options: int | None) -> Schedule:
    """The public constants, or an error that names the options that are missing."""
    missing = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is None]
    if missing:
        raise SordinoError(f"{', '.join(missing)} missing; all of --examples, --batch-size and --epochs are needed")
    return Schedule(**{name: value for name, value in options.items() if value is not None})


def budget(epsilon: float | None, delta: float | None) -> Budget:
    if epsilon is None or delta is None:
        missing = [name for name, value in (("--epsilon", epsilon), ("--delta", delta)) if value is None]
        raise SordinoError(f"{' and '.join(missing)} missing; --epsilon 8 --delta 1e-5 is usual")
    return Budget(epsilon, delta)


def show_plan(
    budget: Budget,
    schedule: Schedule,
    noise: str,
    sampling: str,
    parameters: int | None,
    accountant: str,
    picture: Path | None,
    as_json: bool,
) -> None:
    planned = plan(
        budget,
        **dataclasses.asdict(schedule),
        noise=noise,
        sampling=sampling,
        parameters=parameters,
        accountant=accountant,
    )
    _show(planned, planned.as_dict(), picture, as_json)


def show_account(
    noise_multiplier: float | None,
    delta: float | None,
    schedule: Schedule,
    noise: str,
    sampling: str,
    steps: int | None,
    parameters: int | None,
    accountant: str,
    picture: Path | None,
    as_json: bool,
) -> None:
    if noise_multiplier is None:
        raise SordinoError("--noise-multiplier missing; sordino plan finds the one that a budget needs")
    if delta is None:
        raise SordinoError("--delta missing; choose it well under one over the number of examples, such as 1e-5")
    planned = plan(
        **dataclasses.asdict(schedule),
        noise=noise,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        delta=delta,
        parameters=parameters,
        accountant=accountant,
    )
    result = planned.as_dict()
    if steps is not None:
        result |= {"epsilon": planned.account(steps).epsilon, "steps_released": steps}
    _show(planned, result, picture, as_json)


def _show(planned: Plan, result: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    curve = planned.epsilon_curve()
    result["epsilon_curve"] = [{"delta": delta, "epsilon": epsilon} for delta, epsilon in curve]
    if planned.parameters:
        result["noise_bytes_stored"] = 4 * planned.parameters * planned.strategy.vectors_stored
    if picture is not None:
        from .picture import draw_plan

        result["picture"] = str(draw_plan(planned, curve, picture))
    if as_json:
        print(to_json(result))
        return
    from rich.table import Table

    epsilon = result["epsilon"] if result["epsilon"] is not None else math.inf
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "budget": f"ε = {round_up(epsilon)} at δ = {significant_up(result['delta'])}, {result['adjacency']}",
        "noise": f"{result['noise']} with multiplier {result['noise_multiplier']:.6g}",
        "sampling": result["sampling"],
        "accountant": result["accountant"],
        "steps": f"{result['steps']} ({result['epochs']} epochs of {result['steps_per_epoch']}), "
        f"an example at most {result['participations']} times, at least {result['separation']} steps apart",
        "sensitivity": f"{result['sensitivity']:.6g}",
        "error of the prefix sum": f"RMSE {result['rmse']:.6g}, largest {result['max_se']:.6g}",
        "noise vectors": f"{result['noise_vectors_stored']} stored, {result['noise_vectors_regenerated']} drawn again",
    }
    if "steps_released" in result:
        rows["of these"] = f"the first {result['steps_released']} steps"
    if "noise_bytes_stored" in result:
        rows["memory for noise"] = f"{result['noise_bytes_stored'] / 2**20:.1f} MiB"
    if result["failure_probability"]:
        rows["failure probability"] = f"{result['failure_probability']:.1g}, inside δ"
    for name, value in rows.items():
        table.add_row(name, value)
    out().print(table)
    finite = [(delta, epsilon) for delta, epsilon in curve if math.isfinite(epsilon)]
    points = ", ".join(f"({round_up(epsilon)}, {significant_up(delta)})" for delta, epsilon in finite)
    out().print(f"\nAll {result['steps']} steps are (ε, δ)-private for every one of: {points or 'none'}.")


def show_comparison(
    budget: Budget,
    schedule: Schedule,
    sampling: str | None,
    parameters: int | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Every noise with every sampling; what is not supported comes with its reason."""
    rows = compare(
        budget,
        **dataclasses.asdict(schedule),
        samplings=None if sampling is None else [sampling],
        parameters=parameters,
    )
    rows.sort(key=lambda row: row.plan.as_dict()["rmse"] if row.plan else math.inf)
    result: dict[str, Any] = {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        **dataclasses.asdict(schedule),
        "plans": [row.as_dict() for row in rows],
    }
    if picture is not None:
        from .picture import draw_comparison

        result["picture"] = str(draw_comparison([row.plan for row in rows if row.plan], picture))
    if as_json:
        print(to_json(result))
        return
    _comparison_table(budget, rows)


def _comparison_table(budget: Budget, rows: list[Compared]) -> None:
    title = f"Noise that ε = {round_up(budget.epsilon)}, δ = {significant_up(budget.delta)} needs"
    table = grid("noise", "sampling", "multiplier", "RMSE", "max", "stored", "redrawn", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    reasons = []
    for row in rows:
        if row.plan is None:
            reasons.append(f"{row.noise} with {row.sampling}: {row.reason}")
            continue
        it = row.plan.as_dict()
        numbers = [f"{it[key]:.4g}" for key in ("noise_multiplier", "rmse", "max_se")]
        vectors = [str(it["noise_vectors_stored"]), str(it["noise_vectors_regenerated"])]
        table.add_row(it["noise"], it["sampling"], *numbers, *vectors)
    out().print(table)
    out().print(
        "RMSE and max: the error of the running sum of the noise, in clip norms; less is better. "
        "Stored, redrawn: noise vectors kept, or drawn again, at each step."
    )
    for reason in reasons:
        out().print(f"Not here: {reason}")


def choices() -> dict[str, list[dict[str, Any]]]:
    """Every registry, as data."""
    from ..accounting import ACCOUNTANTS
    from ..denoising import DENOISERS
    from ..geometry import GEOMETRIES
    from ..models import MODELS
    from ..sampling import SAMPLERS
    from ..strategies import STRATEGIES

    registries: list[Registry[Any]] = [STRATEGIES, SAMPLERS, GEOMETRIES, DENOISERS, ACCOUNTANTS, MODELS]
    return {
        registry.choice: [
            {
                "name": entry.name,
                "spelled": entry.spelled(),
                "description": entry.description,
                "paper": entry.paper,
                "capabilities": entry.capabilities,
            }
            for entry in registry
        ]
        for registry in registries
    }


def show_choices(as_json: bool) -> None:
    found = choices()
    if as_json:
        print(to_json(found))
        return
    for choice, entries in found.items():
        table = grid("name", "what it is", "paper", title=choice)
        for entry in entries:
            table.add_row(entry["spelled"], entry["description"], entry["paper"])
        out().print(table)
