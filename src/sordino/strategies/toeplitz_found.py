"""What an optimised strategy was asked, what its search is certified by, and how it is read from an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..errors import StateError
from .problem import Problem

if TYPE_CHECKING:
    from ..curvature import CurvatureWorkload

VERSION = 1  # of what is searched and how: part of the key of what is kept on disk


def participations(problem: Problem) -> int:
    """How often one example takes part at most."""
    p = problem.participations
    return max(1, min(p.epochs, -(-problem.steps // p.separation)))


def question(problem: Problem, bands: int) -> dict[str, float | int | str | np.ndarray]:
    """What the answer depends on. Not on `noise_needed`: these strategies are optimised for their sensitivity."""
    k, workload = participations(problem), problem.workload
    curved = problem.curvature if problem.objective == "curvature" else None
    return {
        **({} if curved is None else public_curvature(curved, problem.steps)),
        "version": VERSION,
        "steps": problem.steps,
        "bands": bands,
        "participations": k,
        "separation": problem.participations.separation if k > 1 else problem.steps,
        "fixed": int(problem.participations.fixed and k > 1),
        "objective": problem.objective,
        "momentum": float(workload.momentum),
        "shrink": float(workload.shrink),
        "rates": np.ones(1) if workload.is_toeplitz else workload.rates(problem.steps),
    }


def public_curvature(curved: CurvatureWorkload, steps: int) -> dict[str, float | int | str | np.ndarray]:
    """What an answer depends on that curvature decides."""
    return {
        "equation": curved.equation,
        "eigenvalues": curved.eigenvalues(),
        "curved_rates": np.array([curved.learning_rate]) if curved.schedule is None else curved.rates(steps),
        "curved_momentum": float(curved.momentum),
        "weight_decay": float(curved.weight_decay),
        "cap": int(curved.cap),
    }


def certified(found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What a plan prints of a search."""
    names = ("loss", "projected_gradient", "iterations", "schedule_ignored")
    return {name: float(found[name]) for name in names if name in found}


def recalled(definition: Mapping[str, np.ndarray], key: str, name: str, bands: int) -> np.ndarray:
    """The coefficients that an earlier run found."""
    c = np.array(definition.get(key, []), dtype=np.float64)
    if c.ndim != 1 or not 1 <= len(c) <= bands or not np.isfinite(c).all() or c[0] <= 0.0:
        raise StateError(
            f"the definition of noise={name!r} must have 1 to {bands} finite {key}, the first above 0; this one has "
            f"{c.tolist() if c.ndim == 1 and len(c) < 5 else f'an array of shape {c.shape}'}; load the run's own"
        )
    return c
