"""λ of DP-λCGD found rather than given: the one of the smallest error × noise.

`lambda-cgd` and `lambda-cgd-normalized` without a value mean this. The noise is the sensitivity, or what an amplifying
sampler's accountant asks for (``problem.noise_needed``): amplification wants a smaller λ. The name of what is found
spells λ, so that it builds the same matrix again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .base import Strategy
from .lambda_cgd import LambdaCGD, NormalizedLambdaCGD, parse_lambda
from .problem import OBJECTIVES, Objective, Problem

DIGITS = 6  # of λ
_ASKED = 0.02  # how finely an accountant is asked, relative to the bracket the scan leaves: the loss is flat there

Family = Callable[[float, int], "LambdaCGD | NormalizedLambdaCGD"]


def lambda_cgd(argument: str, problem: Problem) -> Strategy:
    """λ as written, or found.

    >>> lambda_cgd("", Problem(100)).name
    'lambda-cgd:0.867609'
    """
    if argument:
        return LambdaCGD(parse_lambda(argument, "lambda-cgd"), problem.steps)
    return found(LambdaCGD, problem)


def normalized_lambda_cgd(argument: str, problem: Problem) -> Strategy:
    if argument:
        return NormalizedLambdaCGD(parse_lambda(argument, "lambda-cgd-normalized"), problem.steps)
    return found(NormalizedLambdaCGD, problem)


def found(family: Family, problem: Problem) -> Strategy:
    """The member with the λ that is best for the problem; its certificate has the λ of every objective."""
    needed: dict[float, float] = {}  # by λ: an accountant is asked once, not once for each objective

    def noise(candidate: Strategy) -> float:
        assert isinstance(candidate, (LambdaCGD, NormalizedLambdaCGD))
        if candidate.lam not in needed:
            needed[candidate.lam] = problem.noise(candidate)
        return needed[candidate.lam]

    def best_for(objective: Objective) -> float:
        asked = replace(problem, objective=objective, noise_needed=noise)
        cheap = problem.noise_needed is None
        return best_lambda(lambda lam: asked.loss(family(lam, problem.steps)), problem.steps, cheap)

    asked: list[Objective] = [o for o in OBJECTIVES if o != "curvature" or problem.curvature is not None]
    best = {objective: best_for(objective) for objective in asked}
    strategy = family(best[problem.objective], problem.steps)
    strategy.certificate = {
        **{f"lambda_{objective.replace('-', '_')}": lam for objective, lam in best.items()},
        "loss": problem.error(strategy) * noise(strategy),
    }
    return strategy


def best_lambda(loss: Callable[[float], float], steps: int, cheap: bool = True) -> float:
    """The minimiser over [0, 1], both ends included: a scan in ``log(1 − λ)``, then Brent's method around its best."""
    from scipy.optimize import minimize_scalar

    count = math.ceil(math.log2(4 * steps)) * (4 if cheap else 1) + 1
    grid = [*(1.0 - np.exp2(-np.arange(count) / (4 if cheap else 1))).round(DIGITS).tolist(), 1.0]
    grid = sorted(set(grid))
    losses = np.array([loss(lam) for lam in grid])
    i = int(np.argmax(losses <= np.min(losses) * (1.0 + 1e-12)))  # the smallest λ, where many are as good
    low, high = grid[max(0, i - 1)], grid[min(len(grid) - 1, i + 1)]
    refined = minimize_scalar(
        loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9 if cheap else _ASKED * (high - low)}
    )
    rounded = round(float(refined.x), DIGITS)
    return rounded if loss(rounded) < losses[i] * (1.0 - 1e-9) else grid[i]
