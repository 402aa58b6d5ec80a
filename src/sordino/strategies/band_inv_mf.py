"""BandInvMF(p): C⁻¹ is Toeplitz with p bands, its coefficients optimised for the error (Kalinin et al. 2025).

Minimised is error × sensitivity over ``w_1, …, w_{p−1}``, w_0 = 1, from BISR(p) on; the error may be the root of the
curvature score. The sensitivity in the loss bounds that of every C (the leftmost columns of a majorant of |C|): the
leftmost columns of C itself do not, and an optimiser would find out, as ``C⁻¹ = (1, 0, 0, −.9)`` shows. The last p−1
rows of Z are drawn again at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .bisr import inverse_square_root
from .cache import cached
from .problem import Problem
from .toeplitz import Toeplitz, parse_bandwidth
from .toeplitz_constrained import constrained
from .toeplitz_found import certified, question, recalled
from .toeplitz_optimizing import Optimum, PartialSums, goldstein, inverse_banded_loss

NAME = "band-inv-mf"
_FLAT = 1e-3  # a gradient above this is a kink's
_ITERATIONS = 1000
_CERTIFIED = 256  # bands up to which kinks are certified as kinks
_AFFORDABLE = 2**20  # T·p up to which the conditions themselves are taken for constraints there


class BandInvMF(Toeplitz):
    """``C⁻¹_ij = w_{i−j}``, p bands, w as given or found."""

    def __init__(self, bands: int, steps: int, w: np.ndarray, certificate: Mapping[str, float] | None = None) -> None:
        super().__init__(f"{NAME}:{bands}", steps, inverse=w)
        self._w, self.certificate = w, dict(certificate or {})

    def definition(self) -> dict[str, np.ndarray]:
        return {"inverse_coefficients": self._w.copy()}


def band_inv_mf(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> BandInvMF:
    """The optimum for the problem's workload, objective and participation, or the `definition` given.

    >>> s = band_inv_mf("2", Problem(100))
    >>> s.vectors_regenerated, s.vectors_stored
    (1, 0)
    """
    bands = parse_bandwidth(argument, NAME, problem.steps)
    if definition is not None:
        return BandInvMF(bands, problem.steps, recalled(definition, "inverse_coefficients", f"{NAME}:{bands}", bands))
    found = cached(NAME, question(problem, bands), lambda: _optimised(problem, bands))
    s = BandInvMF(bands, problem.steps, found["inverse_coefficients"], certified(found))
    if problem.objective == "curvature" and problem.curvature is not None:
        s.certificate = {**s.certificate, "curvature_score": problem.curvature.score(s)}
    return s


def _optimised(problem: Problem, bands: int) -> dict[str, np.ndarray]:
    loss, sums = inverse_banded_loss(problem), PartialSums(problem.steps, bands)

    def worth(optimum: Optimum) -> float:
        return loss(optimum.x)[0]

    tried = [sums.minimise(loss, inverse_square_root(bands)[1:], iterations=_ITERATIONS)]
    if tried[0].gradient > _FLAT:  # the bound has kinks, where a search may end early: then from elsewhere, too
        tried.append(replace(tried[0], x=np.zeros(bands - 1), iterations=0))  # C = I, a kink itself
        fewer = band_inv_mf(str(-(-bands // 4)), problem).definition()["inverse_coefficients"]
        tried.append(
            sums.minimise(loss, np.concatenate([fewer, np.zeros(bands - len(fewer))])[1:], iterations=_ITERATIONS)
        )
        if bands * problem.steps <= _AFFORDABLE:
            tried.append(constrained(problem, min(tried, key=worth).x))
            tried.append(sums.minimise(loss, tried[-1].x, iterations=_ITERATIONS))
    found = min(tried, key=worth)
    gradient = float(np.abs(loss(found.x)[1]).max(initial=0.0))
    if _FLAT < gradient and bands <= _CERTIFIED:
        gradient = min(gradient, goldstein(loss, found.x))
    found = replace(found, gradient=gradient, iterations=sum(optimum.iterations for optimum in tried))
    w = np.concatenate([[1.0], found.x])
    s = BandInvMF(bands, problem.steps, w)
    value = problem.error(s) * s.sensitivity(problem.participations)
    return {"inverse_coefficients": w, "loss": np.array(value)} | found.arrays()
