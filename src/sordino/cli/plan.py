"""``sordino plan`` and ``sordino account``: from a budget to noise, and back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budget import Budget, Schedule, round_up, significant_up
from ..cost import StepCost
from ..errors import SordinoError
from ..plan import Plan, plan
from .output import grid, out, to_json
from .waiting import waiting

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload
    from ..registry import Registry
    from ..strategies import Workload


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
    workload: Workload,
    objective: str | None,
    curved: CurvatureWorkload | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    with waiting(f"{noise}, {sampling}"):
        planned = plan(
            budget,
            **dataclasses.asdict(schedule),
            noise=noise,
            sampling=sampling,
            parameters=parameters,
            accountant=accountant,
            workload=workload,
            objective=objective,  # type: ignore[arg-type]  # looked at where it is used
            spectrum=curved,
        )
        result = planned.as_dict() | _curve(planned)
    _show(planned, result, picture, as_json)


def show_account(
    noise_multiplier: float | None,
    delta: float | None,
    schedule: Schedule,
    noise: str,
    sampling: str,
    steps: int | None,
    parameters: int | None,
    accountant: str,
    workload: Workload,
    objective: str | None,
    curved: CurvatureWorkload | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    if noise_multiplier is None:
        raise SordinoError("--noise-multiplier missing; sordino plan finds the one that a budget needs")
    if delta is None:
        raise SordinoError("--delta missing; choose it well under one over the number of examples, such as 1e-5")
    with waiting(f"{noise}, {sampling}"):
        planned = plan(
            **dataclasses.asdict(schedule),
            noise=noise,
            sampling=sampling,
            noise_multiplier=noise_multiplier,
            delta=delta,
            parameters=parameters,
            accountant=accountant,
            workload=workload,
            objective=objective,  # type: ignore[arg-type]
            spectrum=curved,
        )
        result = planned.as_dict() | _curve(planned)
        if steps is not None:
            result |= {"epsilon": planned.account(steps).epsilon, "steps_released": steps}
    _show(planned, result, picture, as_json)


def _curve(planned: Plan) -> dict[str, Any]:
    return {"epsilon_curve": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in planned.epsilon_curve()]}


def _show(planned: Plan, result: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    curve = [(point["delta"], point["epsilon"]) for point in result["epsilon_curve"]]
    result |= StepCost.of(planned.strategy).as_dict(planned.parameters)
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
        "error": f"RMSE {result['rmse']:.6g}, largest {result['max_se']:.6g}, of {_described(planned)}",
        **_curvature(result),
        "noise vectors": f"{result['noise_vectors_stored']} stored, {result['noise_vectors_regenerated']} drawn again",
    }
    if "steps_released" in result:
        rows["of these"] = f"the first {result['steps_released']} steps"
    if "lambda_rmse" in result:
        rows["best λ"] = f"{result['lambda_rmse']:g} for the RMSE, {result['lambda_max_se']:g} for the largest error"
    if "lambda_curvature" in result:
        rows["best λ"] += f", {result['lambda_curvature']:g} for the curvature score"
    for key in ("optimality", "residual"):
        if key in result["certificate"]:
            rows["optimality"] = f"within {result['certificate'][key]:.1e} of the optimum, relatively"
    if "noise_bytes_stored" in result:
        rows["memory for noise"] = f"{result['noise_bytes_stored'] / 2**20:.1f} MiB"
    if result["failure_probability"]:
        rows["failure probability"] = f"{result['failure_probability']:.1g}, inside δ ({result['samples']} samples)"
    for name, value in rows.items():
        table.add_row(name, value)
    out().print(table)
    finite = [(delta, epsilon) for delta, epsilon in curve if math.isfinite(epsilon)]
    points = ", ".join(f"({round_up(epsilon)}, {significant_up(delta)})" for delta, epsilon in finite)
    out().print(f"\nAll {result['steps']} steps are (ε, δ)-private for every one of: {points or 'none'}.")


def _curvature(result: dict[str, Any]) -> dict[str, str]:
    """The score, and whose curvature it is."""
    found = result["curvature"]
    if found is None:
        return {}
    capped = f"; {found['capped']} eigenvalues beyond 1/η count as 1/η" if found["capped"] else ""
    return {
        "curvature score": f"{result['curvature_score']:.6g}",
        "curvature": f"{found['spectrum']}, at learning rate {found['learning_rate']:g}{capped}",
    }


def _described(planned: Plan) -> str:
    """The workload in words."""
    w = planned.workload
    if w.is_prefix_sum:
        return "the prefix sum"
    parts = [f"momentum {w.momentum:g}"] if w.momentum else []
    parts += [f"weights shrunk by {w.shrink:.6g} a step"] if w.shrink != 1.0 else []
    parts += ["a learning-rate schedule"] if w.learning_rates is not None else []
    return "the sum with " + " and ".join(parts)


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
