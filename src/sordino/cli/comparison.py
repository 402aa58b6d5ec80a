"""``sordino plan`` without ``--noise``: every noise under one budget, and which one to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budget import Budget, Schedule, round_up, significant_up
from ..compare import Compared, compare, decide
from .output import grid, out, to_json
from .waiting import waiting

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload
    from ..strategies import Workload

SHOWN = 30  # rows of the table
WIDE = 112  # columns of text that all of it needs


def show_comparison(
    budget: Budget,
    schedule: Schedule,
    sampling: str | None,
    parameters: int | None,
    workload: Workload,
    objective: str | None,
    curved: CurvatureWorkload | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    objective = objective or ("rmse" if curved is None else "curvature")
    with waiting("comparing") as progress:
        rows = compare(
            budget,
            **dataclasses.asdict(schedule),
            samplings=None if sampling is None else [sampling],
            parameters=parameters,
            workload=workload,
            objective=objective,  # type: ignore[arg-type]
            spectrum=curved,
            progress=progress,
        )
        rows, chosen = decide(budget, rows, objective, progress)  # type: ignore[arg-type]
    result: dict[str, Any] = {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        **dataclasses.asdict(schedule),
        "objective": objective,
        "recommendation": None if chosen is None else dataclasses.asdict(chosen),
        "plans": [row.as_dict() for row in rows],
    }
    if picture is not None:
        from .picture import draw_comparison

        result["picture"] = str(draw_comparison(rows, objective, picture))  # type: ignore[arg-type]
    if as_json:
        print(to_json(result))
        return
    out().print(_table(budget, rows, parameters, objective))
    model = "10M" if parameters is None else f"{parameters:,}"
    out().print(
        "σ: the noise multiplier. RMSE, max: the error of the sum of the noise, in clip norms; less is better. Kept, "
        "redrawn: noise vectors each step needs. ms, MB: time and memory beyond independent noise, for "
        f"{model} parameters. fixed-order is about zeroing out an example, the others about adding or removing one."
    )
    if curved is not None:
        out().print(f"score: what the noise adds to the final loss, in proportion. {curved.spectrum.describe()}.")
    planned = sum(row.plan is not None for row in rows)
    if planned > SHOWN:
        out().print(f"These are the best {SHOWN} of {planned}; --sampling shows those of one sampler, --json all.")
    if any(row.plan is not None and row.plan.estimated for row in rows):
        out().print("~: estimated, to within a per cent or two; sordino plan --noise … --sampling … accounts for it.")
    if chosen is not None:
        out().print(f"\nRecommended: --noise {chosen.noise} --sampling {chosen.sampling}. {chosen.reason}.")
    for line in _missing(rows):
        out().print(line)


def _table(budget: Budget, rows: list[Compared], parameters: int | None, objective: str) -> Any:
    """On a narrow terminal without the costs in time and memory, and with the one error that is compared."""
    wide = out().width >= WIDE
    title = f"Noise that ε = {round_up(budget.epsilon)}, δ = {significant_up(budget.delta)} needs"
    short = {"rmse": "RMSE", "max-se": "max", "curvature": "score"}
    errors = ("RMSE", "max") if wide else (short[objective],)
    errors = ("score", *errors) if wide and objective == "curvature" else errors
    costs = ("ms CPU", "ms GPU", "MB") if wide else ()
    table = grid("noise", "sampling", "σ", *errors, "kept", "redrawn", *costs, title=title)
    for column in table.columns[1:]:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for row in [row for row in rows if row.plan is not None][:SHOWN]:
        assert row.plan is not None
        about = "~" if row.plan.estimated else ""
        cost = {key.removesuffix("_per_10M"): value for key, value in row.cost.as_dict(parameters).items()}
        cells = {
            "σ": f"{about}{row.plan.noise_multiplier:.4g}",
            "RMSE": f"{about}{row.plan.rmse:.4g}",
            "max": f"{about}{row.plan.max_se:.4g}",
            "score": f"{about}{row.plan.curvature_score or 0.0:.4g}",
            "kept": str(row.cost.stored),
            "redrawn": str(row.cost.regenerated),
            "ms CPU": f"{cost['extra_ms_cpu']:.3g}",
            "ms GPU": f"{cost['extra_ms_gpu']:.2g}",
            "MB": f"{cost['noise_bytes_stored'] / 1e6:.0f}",
        }
        chosen = [cells[str(column.header)] for column in table.columns[2:]]
        table.add_row(row.plan.strategy.name, row.plan.sampling.name, *chosen)
    return table


def _missing(rows: list[Compared]) -> Iterator[str]:
    """One line for each sampler and reason, with the noises it holds for."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.plan is None and row.reason is not None:
            why = row.reason.partition(": ")[2].partition("; ")[0] or row.reason
            names = grouped.setdefault((row.sampling, why), [])
            name = row.noise.partition(":")[0]
            if name not in names:
                names.append(name)
    for (sampling, why), names in grouped.items():
        yield f"Not with {sampling}: {', '.join(names)} ({why})"
