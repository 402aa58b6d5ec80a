"""The pictures of ``sordino plan`` and ``sordino account``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SordinoError

if TYPE_CHECKING:
    from ..compare import Compared
    from ..plan import Plan
    from ..strategies import Strategy
    from ..strategies.problem import Objective


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


def draw_comparison(rows: Sequence[Compared], objective: Objective, path: Path) -> Path:
    """How noise is taken back, error against bandwidth, and ε against δ."""
    planned = [row for row in rows if row.plan is not None]
    shown = _representatives(planned, objective)
    made, (left, middle, right) = figure(15, 4.6, 3)
    _draw_rows(left, shown)
    _draw_errors(middle, planned, objective)
    _draw_curves(right, shown)
    if planned and planned[0].plan is not None:
        p = planned[0].plan
        made.suptitle(f"ε = {p.budget.epsilon:g}, δ = {p.delta:g}, {p.steps} steps, {p.schedule.epochs} epochs")
    return save(made, path)


def _representatives(planned: Sequence[Compared], objective: Objective) -> list[Compared]:
    """The best of each family of noise, at most six, independent noise among them."""
    best: dict[str, Compared] = {}
    for row in sorted(planned, key=lambda row: row.error(objective)):
        best.setdefault(row.noise.partition(":")[0], row)
    rows = list(best.values())
    plain = [row for row in rows if row.plan is not None and row.plan.strategy.is_identity]
    return [row for row in rows if row not in plain][: 6 - len(plain)] + plain


def _label(row: Compared) -> str:
    assert row.plan is not None
    return f"{row.plan.strategy.name}, {row.plan.sampling.name}"


def _draw_rows(axes: Any, shown: Sequence[Compared]) -> None:
    """The middle row of C⁻¹ by lag: what a step takes of the noise of the steps before."""
    import numpy as np

    for i, row in enumerate(shown):
        assert row.plan is not None
        c = middle_row(row.plan.strategy, 64)
        lag = np.flatnonzero(np.abs(c) > 1e-9)
        lag = lag[lag > 0]
        if lag.size:
            marker = "o" if lag.size == 1 else "."
            axes.loglog(lag, np.abs(c[lag]), marker=marker, ms=4, lw=1, color=f"C{i}", label=_label(row))
        else:
            axes.plot([], [], color=f"C{i}", label=f"{_label(row)} (none)")
    axes.set(
        xlabel="steps back",
        ylabel="|coefficient|, relative to the step's own",
        title="What a step takes back: a row of C⁻¹",
    )
    axes.set_ylim(bottom=max(1e-5, axes.get_ylim()[0]))
    axes.legend(fontsize=7, loc="lower left")


def middle_row(strategy: Strategy, lags: int) -> Any:
    """``(C⁻¹)_{t, t−lag}``, lag = 0 … , over that of lag 0, for a step t in the middle of the run."""
    import numpy as np

    unit = np.zeros(strategy.steps)
    t = max(strategy.steps // 2, min(strategy.steps, lags) - 1)
    unit[t] = 1.0
    row = strategy.solve_transposed(unit)[t::-1][:lags]
    return row / row[0]


def _draw_errors(axes: Any, planned: Sequence[Compared], objective: Objective) -> None:
    """Error against how many rows or outputs a step reads; a family and sampler to a line."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in planned:
        assert row.plan is not None
        width = 1 + row.cost.regenerated + row.cost.stored
        drawn, _, how = row.plan.sampling.name.partition(":")
        name = f"{drawn}:fresh" if how == "fresh" else drawn
        lines.setdefault((row.noise.partition(":")[0], name), []).append((width, row.error(objective)))
    samplers = sorted({sampler for _, sampler in lines})
    families = list(dict.fromkeys(family for family, _ in lines))
    styles: list[Any] = ["-", "--", ":", "-.", (0, (1, 1))]
    for (family, sampler), points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        colour = f"C{families.index(family) % 10}"
        axes.plot(x, y, ls=styles[samplers.index(sampler) % 5], marker="o", ms=4, color=colour)
    for family in families:
        axes.plot([], [], color=f"C{families.index(family) % 10}", label=family)
    for sampler in samplers:
        axes.plot([], [], ls=styles[samplers.index(sampler) % 5], color="0.4", label=sampler)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:.3g}")
    axes.xaxis.set_major_formatter("{x:.0f}")
    from ..compare import CALLED

    label = CALLED[objective] + (", in clip norms" if objective != "curvature" else "")
    axes.set(xlabel="vectors of noise a step reads (bands, buffers)", ylabel=label, title="Error")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend
    axes.legend(fontsize=7, ncols=2, loc="upper right")


def _draw_curves(axes: Any, shown: Sequence[Compared]) -> None:
    for i, row in enumerate(shown):
        assert row.plan is not None
        if row.plan.estimated:
            continue
        curve = [(delta, epsilon) for delta, epsilon in row.plan.epsilon_curve() if math.isfinite(epsilon)]
        if curve:
            axes.semilogx(*zip(*curve, strict=True), marker=".", lw=1, color=f"C{i}", label=_label(row))
    axes.set(xlabel="δ", ylabel="ε", title="All steps: ε(δ)")
    if shown:
        axes.legend(fontsize=7)
