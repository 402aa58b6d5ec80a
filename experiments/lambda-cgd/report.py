"""Tables, sentences and pictures from the results alone; README.md is filled in between its markers.

A method's best λ is chosen by validation accuracy; what is reported of it is test accuracy.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import Results, Run
from schedule import Method, Schedule, Setting

NOTHING = "*No results are recorded yet.*"
Best = Mapping[str, Mapping[str, float]]  # setting → λ of least RMSE and MaxSE


@dataclass(frozen=True)
class Row:
    """What is known of one method in one setting."""

    method: Method
    rate: float | None
    trials: int
    validation: tuple[float, ...]  # of the final runs, by seed
    test: tuple[float, ...]
    noise_multiplier: float
    rmse: float
    at_edge: bool  # the learning rate chosen is the first or last of the grid

    @property
    def mean(self) -> float:
        return statistics.mean(self.test)

    @property
    def deviation(self) -> float:
        """Of the runs; NaN for one run."""
        return statistics.stdev(self.test) if len(self.test) > 1 else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(len(self.test))


def rows(schedule: Schedule, results: Results, setting: Setting) -> list[Row]:
    """Those that are planned, in the order of the configuration; `test` is empty where no final run is in."""
    found = []
    for method in setting.methods:
        plan = schedule.plan(setting, method)
        if plan is None:
            continue
        _, rate = schedule.tuning(setting, method, results)
        finals = schedule.finals(setting, method, results)
        grid = schedule.config["tuning"]["rates"]
        found.append(
            Row(
                method,
                rate,
                len(schedule.trials(setting, method, results)),
                tuple(f["validation"] for f in finals),
                tuple(f["test"] for f in finals),
                plan["noise_multiplier"],
                plan["rmse"],
                rate in (grid[0], grid[-1]),
            )
        )
    return found


def line(run: Run, result: Mapping[str, Any]) -> str:
    """One run, for the console."""
    what = f"{run['noise']}, {run['sampling']}, ε = {run['epsilon']:g}, rate {run['learning_rate']:g}"
    came = f"validation {result['validation']:.1%}, test {result['test']:.1%}"
    return f"{what}, seed {run['seed']}: {came}, {result['milliseconds_per_step']:.1f} ms a step"


# -- words ---------------------------------------------------------------------------------------


def percent(row: Row) -> str:
    """Test accuracy in words.

    >>> percent(Row(Method("identity", "poisson"), 0.1, 3, (), (0.5, 0.52), 1.0, 1.0, False))
    '51.0 ± 1.4 (2)'
    """
    spread = f" ± {100 * row.deviation:.1f}" if len(row.test) > 1 else ""
    return f"{100 * row.mean:.1f}{spread} ({len(row.test)})"


def table(schedule: Schedule, results: Results) -> str:
    """Every setting's methods: noise, RMSE, learning rate, accuracy."""
    lines = []
    for setting in schedule.settings:
        found = [row for row in rows(schedule, results, setting) if row.trials]
        if not found:
            continue
        lines += [f"**{setting.title}** (δ = {schedule.config['delta']:g})", ""]
        lines += ["| method | noise multiplier | RMSE | learning rate (trials) | validation, % | test, % (runs) |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        for row in found:
            rate = "–" if row.rate is None else f"{row.rate:g}{'*' if row.at_edge else ''}"
            validation = f"{100 * statistics.mean(row.validation):.1f}" if row.test else "–"
            lines.append(
                f"| {row.method.title} | {row.noise_multiplier:.3f} | {row.rmse:.2f} | {rate} ({row.trials}) | "
                f"{validation} | {percent(row) if row.test else '–'} |"
            )
        lines.append("")
        if any(row.at_edge for row in found):
            lines += ["\\* the last of the grid: a rate beyond it might do better.", ""]
    return "\n".join(lines).strip() or NOTHING


def progress(schedule: Schedule, results: Results) -> str:
    """What was run and what was not."""
    lines = []
    seeds = len(schedule.config["final"]["seeds"])
    for setting in schedule.settings:
        found = rows(schedule, results, setting)
        planned = {row.method for row in found}
        lacking = [m.title for m in setting.methods if m not in planned]
        untuned = [row.method.title for row in found if row.rate is None]
        short = [f"{row.method.title} ({len(row.test)})" for row in found if row.rate and len(row.test) < seeds]
        said = [f"not planned: {', '.join(lacking)}"] if lacking else []
        said += [f"not run, or tuning not finished: {', '.join(untuned)}"] if untuned else []
        said += [f"fewer than {seeds} final runs: {', '.join(short)}"] if short else []
        count = sum(row.trials + len(row.test) for row in found)
        lines.append(f"* {setting.title}: {count} runs; {'; '.join(said) or 'complete'}.")
    machines = Counter((result.get("machine", "?"), result.get("torch", "?")) for _, result in results)
    ran = ", ".join(f"{count} on {machine} with torch {torch}" for (machine, torch), count in machines.items())
    lines.append(f"* Runs in the folder: {ran}.")
    return "\n".join(lines) if len(results) else NOTHING


def claims(schedule: Schedule, results: Results, best: Best) -> str:
    """The paper's claims, each with its figures and a verdict. A difference counts from two standard errors on."""
    lines = []
    winners: dict[str, Row] = {}
    for setting in schedule.settings:
        found = [row for row in rows(schedule, results, setting) if len(row.test) > 1]
        family = [row for row in found if row.method.lam is not None and row.method.sampling == setting.sampling]
        correlated = [row for row in family if row.method.lam]
        if not correlated:
            continue
        winner = max(correlated, key=lambda row: statistics.mean(row.validation))
        winners[setting.name] = max(family, key=lambda row: statistics.mean(row.validation))
        said = []
        for row in found:
            if row.method.noise == "identity":
                verdict, figures = compared(winner, row)
                held = {1: "held", -1: "did not hold", 0: "was not decided"}[verdict]
                said.append(f"that λCGD beats {row.method.title} {held} ({winner.method.title}: {figures} points)")
            elif row.method.lam is None:
                verdict, figures = compared(winner, row)
                word = {1: "is better than", -1: "is worse than", 0: "cannot be told from"}[verdict]
                said.append(f"λCGD {word} {row.method.title} ({figures})")
        if setting.name in best and len(family) > 2:
            said.append(_below(family, winners[setting.name], best[setting.name]["rmse"]))
        if said:
            lines.append(f"* **{setting.title}**: {'; '.join(said)}.")
    lines += _across(schedule, best, winners)
    return "\n".join(lines) or NOTHING


def compared(a: Row, b: Row) -> tuple[int, str]:
    """(1, 0 or −1: a is better, cannot be told, is worse; the difference of the means in points, ± its error)."""
    difference, error = a.mean - b.mean, math.hypot(a.error, b.error)
    verdict = 0 if abs(difference) < 2 * error else 1 if difference > 0 else -1
    return verdict, f"{100 * difference:+.1f} ± {100 * error:.1f}"


def _below(family: Sequence[Row], winner: Row, rmse_best: float) -> str:
    """Whether the λ that trains best lies below the λ of least RMSE."""
    position = {row.method: scale(row.method.lam or 0.0) for row in family}
    nearest = min(family, key=lambda row: abs(position[row.method] - scale(rmse_best)))
    text = f"the λ that trains best is {winner.method.lam:g}, that of least RMSE {rmse_best:.3f}: "
    if position[winner.method] >= position[nearest.method]:
        return text + "that it is smaller did not hold"
    verdict, figures = compared(winner, nearest)
    held = {1: "held", 0: "was not decided", -1: "did not hold"}[verdict]
    return text + f"that it is smaller {held} ({figures} over λ = {nearest.method.lam:g})"


def _across(schedule: Schedule, best: Best, winners: Mapping[str, Row]) -> list[str]:
    lines = []
    amplified = [s for s in schedule.settings if s.sampling != "fixed-order" and s.name in best]
    fixed = [s for s in schedule.settings if s.sampling == "fixed-order" and s.name in best]
    if amplified and fixed:
        text = ", ".join(f"{best[s.name]['rmse']:.3f} ({s.title})" for s in [*fixed, *amplified])
        held = all(best[a.name]["rmse"] < best[f.name]["rmse"] for a in amplified for f in fixed)
        lines.append(
            f"* That amplification makes the λ of least RMSE smaller {'held' if held else 'did not hold'}: {text}."
        )
    if len(winners) > 1:
        text = ", ".join(f"{winners[s.name].method.lam:g} ({s.title})" for s in schedule.settings if s.name in winners)
        lines.append(f"* The λ that trains best, DP-SGD counted as 0: {text}.")
    return lines


# -- pictures ------------------------------------------------------------------------------------


def scale(lam: float) -> float:
    """Where λ lies on the axis: each halving of 1−λ is one further.

    >>> [scale(lam) for lam in (0.0, 0.5, 0.75)]
    [0.0, 1.0, 2.0]
    """
    return -math.log2(1 - lam)


def draw_lambda(schedule: Schedule, results: Results, best: Best, path: Path) -> None:
    """Figures 3 and 4 in kind: accuracy over λ, with the λ of least RMSE, and the RMSE below."""
    import matplotlib

    settings = schedule.settings
    figure, axes = _figure(4.6 * len(settings), 6.0, 2, len(settings), sharex="col")
    shown = ["BISR", "BandInvMF", "BLT", "DP-SGD, Poisson"]
    for column, setting in enumerate(settings):
        top, bottom = axes[0][column], axes[1][column]
        found = rows(schedule, results, setting)
        family = [r for r in found if r.method.lam is not None and r.method.sampling == setting.sampling]
        done = [r for r in family if r.test]
        if done:
            spread = [0.0 if len(r.test) < 2 else 100 * r.deviation for r in done]
            at = [scale(r.method.lam or 0.0) for r in done]
            top.errorbar(at, [100 * r.mean for r in done], spread, marker="o", capsize=3, color="C0", label="λCGD")
        else:
            _empty(top)
        for row in found:
            if row.test and row not in family:
                i = next((i for i, name in enumerate(shown) if row.method.title.startswith(name)), 4)
                top.axhline(100 * row.mean, color=f"C{i + 1}", linestyle="--", linewidth=1.2, label=row.method.title)
        if family:
            at = [scale(r.method.lam or 0.0) for r in family]
            bottom.semilogy(at, [r.rmse for r in family], marker="o", color="C0")
            bottom.set_xticks(at, [f"{r.method.lam:g}" for r in family])
            bottom.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
            bottom.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            bottom.yaxis.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1, 2, 5)))
        if setting.name in best:
            lam = best[setting.name]["rmse"]
            for one in (top, bottom):
                one.axvline(scale(lam), color="0.3", linestyle=":", label=f"least RMSE, λ = {lam:.3f}")
        top.set_title(setting.title)
        bottom.set_xlabel("λ (1−λ on a logarithmic scale)")
        if top.get_legend_handles_labels()[0]:
            bottom.legend(*top.get_legend_handles_labels(), fontsize=8, loc="upper right")  # where it hides nothing
    axes[0][0].set_ylabel("test accuracy, %")
    axes[1][0].set_ylabel("RMSE")
    figure.savefig(path, dpi=120)


def draw_methods(schedule: Schedule, results: Results, path: Path) -> None:
    """Figure 5 in kind: the methods side by side, λCGD with the λ that its validation accuracy chose."""
    settings = schedule.settings
    figure, axes = _figure(4.6 * len(settings), 3.6, 1, len(settings))
    for column, setting in enumerate(settings):
        one = axes[0][column]
        found = [r for r in rows(schedule, results, setting) if r.test]
        correlated = [r for r in found if r.method.lam]
        best = max(correlated, key=lambda r: statistics.mean(r.validation)) if correlated else None
        shown = [r for r in found if not r.method.lam or r is best]
        for i, row in enumerate(shown):
            color = "C0" if row is best else "0.55" if row.method.noise == "identity" else "C2"
            spread = 0.0 if len(row.test) < 2 else 100 * row.deviation
            one.errorbar(i, 100 * row.mean, spread, marker="o", markersize=7, capsize=4, color=color)
            one.annotate(f"{100 * row.mean:.1f}", (i, 100 * row.mean), (7, 3), textcoords="offset points", fontsize=8)
        names = [f"λCGD({r.method.lam:g})" if r is best else r.method.title.replace(", ", ",\n") for r in shown]
        one.set_xticks(range(len(shown)), names, rotation=25, fontsize=8)
        if not shown:
            _empty(one)
        one.margins(x=0.12, y=0.12)
        one.grid(axis="y", alpha=0.3)
        one.set_title(setting.title)
    axes[0][0].set_ylabel("test accuracy, %")
    figure.savefig(path, dpi=120)


def _empty(axes: Any) -> None:
    axes.set_yticks([])
    axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="0.5")


def _figure(width: float, height: float, count: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(count, columns, squeeze=False, **options)


# -- the page ------------------------------------------------------------------------------------


def filled(text: str, parts: Mapping[str, str]) -> str:
    """`text` with what lies between ``<!-- name -->`` and ``<!-- end of name -->`` replaced.

    >>> filled("a <!-- x --> old <!-- end of x --> b", {"x": "new"}).split()
    ['a', '<!--', 'x', '-->', 'new', '<!--', 'end', 'of', 'x', '-->', 'b']
    """
    for name, part in parts.items():
        marks = re.compile(f"(<!-- {name} -->).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marks.sub(lambda found, part=part: f"{found[1]}\n\n{part}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


def parts(schedule: Schedule, results: Results, best: Best) -> dict[str, str]:
    return {
        "claims": claims(schedule, results, best),
        "results": table(schedule, results),
        "progress": progress(schedule, results),
    }


def write(schedule: Schedule, results: Results, best: Best, out: Path) -> None:
    """The pictures, and README.md of `out` if it has one."""
    draw_lambda(schedule, results, best, out / "lambda.png")
    draw_methods(schedule, results, out / "methods.png")
    page = out / "README.md"
    if page.exists():
        page.write_text(filled(page.read_text(encoding="utf-8"), parts(schedule, results, best)), encoding="utf-8")
    else:
        print(table(schedule, results))
        print(claims(schedule, results, best))
