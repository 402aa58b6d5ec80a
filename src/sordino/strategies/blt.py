"""BLT(m), buffered linear Toeplitz: ``c_0 = 1, c_i = Σ_j ω_j θ_j^{i−1}``.

With ``X = C⁻¹Z``, every sum ``v_j = Σ_{s<t} θ_j^{t−1−s} x_s`` is carried along by itself, so the noise of step t is
``x_t = z_t − Σ_j ω_j v_j`` and then ``v_j ← θ_j v_j + x_t``: m kept vectors, however long C's memory is. The decays θ
and the weights ω are optimised for error × sensitivity; with several participations the best weights are not all
positive, for C is to be small again when an example comes back (Dvijotham et al. 2024; McMahan & Pillutla 2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import SordinoError, StateError, Unsupported
from .base import Recurrence
from .blt_optimizing import VERSION, coefficients, optimised
from .cache import cached
from .problem import Problem
from .toeplitz import Toeplitz
from .toeplitz_found import certified, question

NAME = "blt"

_MOST = 64  # buffers; more than about six change nothing


class BLT(Toeplitz):
    """C from its decays θ and weights ω.

    >>> BLT(4, np.array([0.5]), np.array([1.0])).coefficients
    array([1.  , 1.  , 0.5 , 0.25])
    """

    def __init__(
        self, steps: int, decays: np.ndarray, weights: np.ndarray, certificate: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(f"{NAME}:{len(decays)}", steps, coefficients=coefficients(decays, weights, steps))
        self.decays, self.weights = np.array(decays, dtype=np.float64), np.array(weights, dtype=np.float64)
        self.decays.flags.writeable = self.weights.flags.writeable = False  # as the coefficients made of them
        self.certificate = dict(certificate or {})
        self.vectors_stored = 0 if self.is_identity else len(decays)
        self.bands = 1 if self.is_identity else None

    def definition(self) -> dict[str, np.ndarray]:
        return {"decays": self.decays.copy(), "weights": self.weights.copy()}

    def terms(self, step: int) -> list[tuple[int, float]]:
        self.check_step(step)
        if self.vectors_stored:
            raise Unsupported(
                f"noise={self.name!r}: row {step} of C⁻¹ reaches back to step 0; keep its {self.vectors_stored} "
                "buffers instead"
            )
        return [(step, 1.0)]

    def recurrence(self, step: int) -> Recurrence:
        """All buffers decay, and take in every output."""
        if self.vectors_stored == 0:
            return super().recurrence(step)
        self.check_step(step)
        return Recurrence(1.0, tuple((-self.weights).tolist()), tuple(self.decays.tolist()), (1.0,) * len(self.decays))


def blt(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> BLT:
    """The optimum for the problem's workload, objective and participation, or the `definition` given.

    >>> s = blt("2", Problem(100))
    >>> s.vectors_regenerated, s.vectors_stored
    (0, 2)
    """
    buffers = _parse(argument)
    if definition is not None:
        return BLT(problem.steps, *_recalled(definition, buffers))
    inputs = question(problem, buffers) | {"blt": VERSION}
    found = cached(NAME, inputs, lambda: _optimised(problem, buffers))
    return BLT(problem.steps, found["decays"], found["weights"], certified(found))


def _optimised(problem: Problem, buffers: int) -> dict[str, np.ndarray]:
    found = optimised(problem, buffers)
    s = BLT(problem.steps, found["decays"], found["weights"])
    return found | {"loss": np.array(problem.error(s) * s.sensitivity(problem.participations))}


def _parse(argument: str) -> int:
    if argument == "":
        raise SordinoError(f"noise={NAME!r} needs a number of buffers; write for example '{NAME}:4'")
    try:
        buffers = int(argument)
    except ValueError:
        buffers = 0
    if not 1 <= buffers <= _MOST:
        raise SordinoError(f"noise='{NAME}:{argument}': the number of buffers must be a whole number from 1 to {_MOST}")
    return buffers


def _recalled(definition: Mapping[str, np.ndarray], buffers: int) -> tuple[np.ndarray, np.ndarray]:
    decays, weights = (np.asarray(definition.get(key, []), dtype=np.float64) for key in ("decays", "weights"))
    right = decays.shape == weights.shape == (buffers,) and np.isfinite(weights).all()
    if not right or not ((decays >= 0.0) & (decays <= 1.0)).all():
        raise StateError(
            f"the definition of noise='{NAME}:{buffers}' must have {buffers} decays from 0 to 1 and as many finite "
            f"weights; this one has arrays of shapes {decays.shape} and {weights.shape}; load the run's own"
        )
    return decays, weights
