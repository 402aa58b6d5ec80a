"""The pictures of ``sordino plan`` and ``sordino account``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SordinoError

if TYPE_CHECKING:
    from ..plan import Plan


def figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots(1, columns)


def save(made: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SordinoError(
            f"--picture {str(path)!r} cannot be written: {' '.join(str(error).split())[:150]}"
        ) from error
    return path


def draw_plan(planned: Plan, curve: list[tuple[float, float]], path: Path) -> Path:
    """ε against δ for the whole run, and ε as the steps go by."""
    made, (left, right) = figure(9, 3.8, 2)
    finite = [(delta, epsilon) for delta, epsilon in curve if math.isfinite(epsilon)]
    left.semilogx([d for d, _ in finite], [e for _, e in finite], marker="o")
    left.set(xlabel="δ", ylabel="ε", title="All steps")
    steps = sorted({max(1, round(planned.steps * i / 8)) for i in range(1, 9)})
    right.plot([0, *steps], [0.0, *(planned.epsilon_after(t) for t in steps)], marker="o")
    right.set(
        xlabel="steps released", ylabel=f"ε at δ = {planned.delta:g}", title="As training goes on", ylim=(0, None)
    )
    made.suptitle(f"{planned.strategy.name}, {planned.sampling.name}, σ = {planned.noise_multiplier:.4g}")
    return save(made, path)


def draw_comparison(plans: list[Plan], path: Path) -> Path:
    """The error of each combination, the smallest on top."""
    made, axes = figure(7.5, 1.4 + 0.4 * len(plans))
    samplings = sorted({p.sampling.name for p in plans})
    for i, p in enumerate(reversed(plans)):
        rmse = p.as_dict()["rmse"]
        axes.barh(i, rmse, color=f"C{samplings.index(p.sampling.name)}")
        axes.text(rmse, i, f" {rmse:.4g}", va="center")
    axes.set_yticks(range(len(plans)), [f"{p.strategy.name}, {p.sampling.name}" for p in reversed(plans)])
    axes.set(xlabel="RMSE of the running sum of the noise, in clip norms")
    axes.margins(x=0.15)
    if plans:
        axes.set_title(f"ε = {plans[0].budget.epsilon:g}, δ = {plans[0].delta:g}, {plans[0].steps} steps")
    return save(made, path)
