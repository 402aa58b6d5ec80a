"""The options that say what the noise is summed into: momentum, weight decay, a schedule of learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SordinoError
from ..strategies import PREFIX_SUM, Workload

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2.0,
}


def workload(
    momentum: float, weight_decay: float, learning_rate: float | None, rates: str | None, steps: int
) -> Workload:
    """The workload of SGD with these options; weight decay shrinks the weights by 1 − η·decay a step."""
    shrink = 1.0
    if weight_decay:
        if learning_rate is None:
            raise SordinoError(
                f"--weight-decay {weight_decay:g} needs --learning-rate: each step shrinks the weights by their product"
            )
        if not 0.0 <= learning_rate * weight_decay <= 1.0:
            raise SordinoError(
                f"--weight-decay {weight_decay:g} times --learning-rate {learning_rate:g} must be from 0 to 1"
            )
        shrink = 1.0 - learning_rate * weight_decay
    if not momentum and shrink == 1.0 and rates is None:
        return PREFIX_SUM
    return Workload(momentum, shrink, None if rates is None else learning_rates(rates, steps))


def curvature(
    spectrum: Path | None, learning_rate: float | None, exact: bool, summed: Workload
) -> CurvatureWorkload | None:
    """What ``--spectrum`` says about the loss."""
    if spectrum is None:
        if exact:
            raise SordinoError("--exact-curvature goes with --spectrum")
        return None
    if learning_rate is None:
        raise SordinoError("--spectrum needs --learning-rate: how fast curved directions forget is their product")
    from ..curvature import curvature_workload

    return curvature_workload(spectrum, learning_rate, exact, summed)


def learning_rates(text: str, steps: int) -> tuple[float, ...]:
    """A schedule by name (``cosine``, or ``cosine:0.1`` to end at a tenth), or a file with one number a step.

    >>> learning_rates("linear", 4)
    (1.0, 0.75, 0.5, 0.25)
    """
    name, _, floor = text.partition(":")
    if name in SCHEDULES:
        try:
            least = float(floor) if floor else 0.0
        except ValueError:
            least = math.nan
        if not 0.0 <= least <= 1.0:
            raise SordinoError(f"--learning-rates {text!r}: what follows the colon is where it ends, from 0 to 1")
        return tuple(least + (1.0 - least) * SCHEDULES[name](step / steps) for step in range(steps))
    path = Path(text)
    if not path.is_file():
        names = ", ".join(SCHEDULES)
        raise SordinoError(f"--learning-rates {text!r} is neither a schedule ({names}) nor a file with a number a step")
    try:
        found = tuple(float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split())
    except (OSError, ValueError) as error:
        raise SordinoError(f"--learning-rates {text!r} cannot be read: {' '.join(str(error).split())[:120]}") from error
    if len(found) != steps:
        raise SordinoError(f"--learning-rates {text!r} has {len(found)} numbers for {steps} steps; give one a step")
    return found
