"""The strategies that the shared suite goes through: add a line, and every test of the suite holds for it.

`EXAMPLES` has what follows the colon for every registered name; `build` makes the strategy over so many steps,
for one participation or for the one the table below gives an optimised strategy.
"""

from __future__ import annotations

import numpy as np

from sordino.budget import Participation
from sordino.curvature import CurvatureWorkload, Spectrum
from sordino.strategies import Problem, Strategy, make_strategy

# name -> what follows the colon ("" for nothing)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "identity": ("",),
    "lambda-cgd": ("0", "0.5", "0.95", "1", ""),
    "lambda-cgd-normalized": ("0", "0.5", "0.95", "1", ""),
    "bisr": ("1", "2", "5", "1000"),
    "bsr": ("1", "2", "5", "1000"),
    "band-inv-mf": ("1", "2", "4", "1000"),
    "band-mf": ("1", "2", "4", "1000"),
    "band-mf-general": ("1", "2", "4"),
    "noise-curve": ("1", "2", "4"),
    "blt": ("1", "2", "4"),
    "diagonal": ("",),
    "dense": ("PATH",),
}
# Here the argument is a number of bands, cut to the number of steps.
BANDWIDTHS = {"bisr", "bsr", "band-inv-mf", "band-mf", "band-mf-general", "noise-curve"}
UNIT = {"band-mf-general", "noise-curve"}  # columns of norm 1, no more bands than steps between participations
CURVED = CurvatureWorkload(Spectrum.given(1.0 / np.arange(1.0, 30.0) ** 2), learning_rate=0.5)
SPELLED = [f"{name}:{argument}".rstrip(":") for name, arguments in EXAMPLES.items() for argument in arguments]


def participation(steps: int) -> Participation:
    """What optimised strategies of the suite are optimised for."""
    separation = max(1, steps // 3)
    return Participation(steps=steps, epochs=-(-steps // separation), separation=separation)


def brought(steps: int) -> np.ndarray:
    """A matrix a user might bring: any signs, three bands."""
    c = np.eye(steps) - 0.4 * np.eye(steps, k=-1) + 0.3 * np.eye(steps, k=-2)
    return np.asarray(c * (1.0 + 0.1 * np.cos(np.arange(steps))))


def build(spelled: str, steps: int, problem: Problem | None = None) -> Strategy:
    name, _, argument = spelled.partition(":")
    if name == "dense":
        return make_strategy("dense", problem or steps, {"matrix": brought(steps)})
    if name in BANDWIDTHS:
        most = participation(steps).separation if name in UNIT and problem is None else steps
        spelled = f"{name}:{min(int(argument), most)}"
    return make_strategy(spelled, problem or Problem(steps, participation=participation(steps), curvature=CURVED))
