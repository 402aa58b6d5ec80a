"""What the quadrature says about a tail: where it ends, and whether the fitted curve bounds it."""

from __future__ import annotations

import numpy as np
import torch

from .quadrature import Quadrature
from .tail import Tail

Notes = tuple[str, ...]


def tail_end(counted: Quadrature, dtype: torch.dtype, largest: float, smallest: float) -> tuple[Notes, int, float]:
    """p₊, and the eigenvalue at which it is counted: `smallest`, unless rounding hides it."""
    rounding = 30 * torch.finfo(dtype).eps * largest
    notes: Notes = ()
    if smallest < rounding:
        kind = str(dtype).removeprefix("torch.")
        more = "; dtype=torch.float64 can" if dtype == torch.float32 else ""
        text = f"the tail ends at {rounding:.2g}, not {smallest:g}: below, {kind} cannot tell eigenvalues from 0{more}"
        notes, smallest = (text,), rounding
    count = counted.count(smallest)
    return (*notes, f"p₊ = {count} eigenvalues of at least {smallest:.2g}"), round(count.value), smallest


def judged(fitted: Tail, counted: Quadrature | None) -> Notes:
    """Whether the fit bounds what was computed of the tail, and what was counted."""
    half = fitted.fitted // 2
    if fitted.bounds():
        notes: Notes = (f"the fitted tail bounds the computed eigenvalues beyond {half} from above",)
    else:
        notes = (
            f"the fitted tail falls short of a computed eigenvalue beyond {half} by up to {fitted.violation:.1%}; "
            "upper=True lifts it",
        )
    if counted is None:
        return notes
    worst, where = 0.0, 0.0
    for i in np.unique(np.geomspace(fitted.fitted + 1, fitted.last, 20).astype(int))[:-1]:
        threshold = float(fitted(i))
        count = counted.count(threshold)
        short = count.low - 2 * count.deviation - i  # surely more eigenvalues than the curve has
        if short > worst:
            worst, where = short, threshold
    if worst > 0:
        notes += (f"further down it does not: above {where:.2g} it has {worst:,.0f} eigenvalues too few",)
    return notes
