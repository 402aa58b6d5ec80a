"""Pictures of a spectrum (eigenvalue against place, computed and fitted parts apart) and of dominance along a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SordinoError
from .spectrum import Spectrum
from .tail import Tail


def draw_spectrum(spectrum: Spectrum, path: str | os.PathLike[str], true: np.ndarray | None = None) -> Path:
    """Draw `spectrum`, and over it `true`, all eigenvalues, where they are known (NoiseCurve's Figure 4)."""
    made, axes = _figure()
    values, computed = spectrum.eigenvalues, spectrum.computed or len(spectrum)
    place = np.arange(1, len(values) + 1)
    positive = values > 0
    if true is not None:
        ordered = np.sort(np.asarray(true))[::-1]
        ordered = ordered[ordered > 0]
        axes.plot(np.arange(1, len(ordered) + 1), ordered, color="0.55", lw=3, label=f"all {len(ordered):,} positive")
    head = positive & (place <= computed)
    label = "as given" if spectrum.source == "given" else f"computed ({int(head.sum()):,})"
    axes.plot(place[head], values[head], color="C0", lw=1.6, label=label, marker="." if computed < 100 else None)
    rest = positive & (place > computed)
    if rest.any():
        axes.plot(place[rest], values[rest], color="C1", lw=1.6, label=f"fitted tail ({int(rest.sum()):,})")
    if numbers := spectrum.details.get("tail"):
        tail = Tail(**{name: numbers[name] for name in ("c", "alpha", "last", "smallest")})
        axes.plot(place[head], tail(place[head]), color="C1", lw=1, ls="--", label="the fit, where it was fitted")
    axes.set(xscale="log", yscale="log", xlabel="place i", ylabel="eigenvalue $\\mu_i$")
    floor = max(float(values[positive][-1]), 1e-12 * spectrum.largest)
    axes.set_ylim(floor / 5, 3 * spectrum.largest)  # what rounding left of zeros is not shown
    axes.set_title(spectrum.description or "spectrum", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _save(made, Path(path))


def draw_dominance(
    tracks: Mapping[str, Sequence[tuple[int, float]]], path: str | os.PathLike[str], private: bool = True
) -> Path:
    """ρ(H, Ĥ) against the step, one line for each run (NoiseCurve's Figure 2), and the line below which Ĥ bounds H."""
    made, axes = _figure()
    for label, track in tracks.items():
        axes.plot([step for step, _ in track], [value for _, value in track], marker=".", label=label)
    axes.axhline(1.0, color="0.4", lw=1, ls="--")
    axes.set(xlabel="step", ylabel="$\\rho(H, \\hat{H})$", ylim=(0, None))
    axes.set_title("private: from private data without noise, not to be released" if private else "", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _save(made, Path(path))


def _figure() -> tuple[Any, Any]:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots()


def _save(made: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SordinoError(
            f"the picture {str(path)!r} cannot be written: {' '.join(str(error).split())[:150]}"
        ) from error
    return path
