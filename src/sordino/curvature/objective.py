"""NoiseCurve's workloads: what correlated noise costs when the loss is curved.

For eigenvalues μ of the Hessian of the mean loss, learning rate η, T steps and noise of standard deviation σ in the
averaged gradient, exactly for a quadratic:

    Eq. 1   E[L(w̃_T)] − E[L(w_T)]              = η²σ²/2 · Tr(X⁻¹W),    W = VᵀMV,  V[i,j] = (1−ημ_i)^{T−1−j}
    Eq. 2   1/T Σ_{t=1..T} E‖∇L(w̃_t)‖² − const  = η²σ²  · Tr(X⁻¹W₂),
            W₂[j,l] = 1/T Σ_i μ_i² (1−ημ_i)^{|j−l|} Σ_{s<T−max(j,l)} (1−ημ_i)^{2s}

with X = CᵀC and 0⁰ = 1. (The second is what the paper's derivation gives; the W₂ it prints,
``(T−max(j,l))/T · (VᵀM²V)[j,l]``, is another matrix, offered as "gradient-printed" to compare.)

Eq. 1 holds for momentum β, weight decay and a schedule η_j as well, with V[i,j] what a unit of noise in step j leaves
of itself in coordinate i at the end, in units of −η: V[i,j] = (η_j/η) Π_{s>j} (1−η_sμ_i) without momentum, and with it
a recursion backwards in time (`late_effects`). W has rank 20 to 40 to rounding, so it is handed on as W = QQᵀ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import SordinoError, Unsupported
from .measure import compressed
from .spectrum import Spectrum

if TYPE_CHECKING:
    from ..strategies import Strategy

Equation = Literal["loss", "gradient", "gradient-printed"]
DROPPED = 1e-14  # of the trace of W, when its rank is cut
DENSE = 6000  # steps up to which Eq. 2, which has no low rank, is taken apart


@dataclass(frozen=True, eq=False)
class CurvatureWorkload:
    """One of the objectives, for a spectrum and a learning rate.

    `cap` takes eigenvalues beyond 1/η as 1/η (without it the optimal C may have negative entries, and NoiseCurve's
    Theorem 4.2 does not apply). `schedule` are the learning rates relative to `learning_rate`, one a step.

    >>> curved = CurvatureWorkload(Spectrum.given([2.0, 0.5]), learning_rate=0.5)
    >>> curved.dense(2)
    array([[0.28125, 0.375  ],
           [0.375  , 2.5    ]])
    """

    spectrum: Spectrum
    learning_rate: float
    equation: Equation = "loss"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: tuple[float, ...] | None = None
    cap: bool = True

    def __post_init__(self) -> None:
        for name, high in (("learning_rate", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < high:
                raise SordinoError(f"{name}={value!r} must be a number of at least 0 and below {high:g}")
        if self.learning_rate == 0.0:
            raise SordinoError("learning_rate=0 never moves; the curvature objective needs the rate of the run")
        if self.equation not in ("loss", "gradient", "gradient-printed"):
            raise SordinoError(
                f"equation={self.equation!r} is not known; choose 'loss' (Eq. 1), 'gradient' (Eq. 2) or "
                "'gradient-printed'"
            )
        if self.schedule is not None:
            rates = tuple(float(r) for r in self.schedule)
            if not rates or not all(math.isfinite(r) and r >= 0 for r in rates) or not max(rates) > 0:
                raise SordinoError("schedule must be finite numbers of at least 0, one a step, and not all of them 0")
            object.__setattr__(self, "schedule", rates)
        plain = self.momentum == 0.0 and self.weight_decay == 0.0 and self.schedule is None
        if self.equation != "loss" and not plain:
            raise Unsupported(
                f"equation={self.equation!r} is derived for plain gradient descent at a constant learning rate; use "
                "equation='loss' with momentum, weight decay or a schedule"
            )
        limit, rate = 2.0 * (1.0 + self.momentum), self._highest
        largest = self.spectrum.largest
        if rate * (largest + self.weight_decay) > limit * (1 + 1e-12):
            raise SordinoError(
                f"learning rate {rate:g} times the largest eigenvalue {largest + self.weight_decay:.4g} is "
                f"{rate * (largest + self.weight_decay):.4g}, above {limit:g}: such steps diverge; use a learning rate "
                f"of at most {limit / (largest + self.weight_decay):.4g}"
            )

    @property
    def _highest(self) -> float:
        return self.learning_rate * (1.0 if self.schedule is None else max(self.schedule))

    def rates(self, steps: int) -> np.ndarray:
        """η_j for every step."""
        if self.schedule is None:
            return np.full(steps, float(self.learning_rate))
        if len(self.schedule) < steps:
            raise SordinoError(f"schedule has {len(self.schedule)} entries for {steps} steps; give one for every step")
        return self.learning_rate * np.asarray(self.schedule[:steps])

    def eigenvalues(self) -> np.ndarray:
        """The positive ones, capped at 1/η if so chosen."""
        values = self.spectrum.eigenvalues[self.spectrum.eigenvalues > 0]
        return np.minimum(values, 1.0 / self._highest) if self.cap else values

    # -- matrices ----------------------------------------------------------------------------------------------------

    def points(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """(μ, weights) that stand for the spectrum: ``Σ_i μ_i f(μ_i)``, with μ_i² in Eq. 2."""
        values = self.eigenvalues()
        weights = values if self.equation == "loss" else values**2
        rates = self.rates(steps)
        total, highest = float(rates.sum()) / (1.0 - self.momentum), float(rates.max())
        edge = np.inf if self.cap else 2.0 * (1.0 + self.momentum) / highest
        return compressed(values, weights, 0.25 / total, edge)

    def factor(self, steps: int) -> np.ndarray:
        """Q with ``W = QQᵀ``, T × R; what is left out is below 1e-14 of W's trace."""
        return _factor(self, steps)

    def dense(self, steps: int) -> np.ndarray:
        """W itself, T × T."""
        if self.equation == "loss":
            effects = self.effects(steps)
            return effects.T @ effects
        values, weights = self.points(steps)
        x = 1.0 - self.learning_rate * values
        powers = np.array([weights @ x**n for n in range(2 * steps - 1)])  # Σ μ²xⁿ
        j = np.arange(steps)
        hankel = powers[2 * steps - 2 - np.add.outer(j, j)] / steps
        if self.equation == "gradient-printed":
            return hankel * (steps - np.maximum.outer(j, j))
        for row in range(steps - 2, -1, -1):  # W₂[j,l] − W₂[j+1,l+1] is the Hankel matrix
            hankel[row, :-1] += hankel[row + 1, 1:]
        return hankel

    def effects(self, steps: int) -> np.ndarray:
        """``V`` at the points, its rows times the roots of their weights: ``W = VᵀV``."""
        values, weights = self.points(steps)
        effects = late_effects(values + self.weight_decay, self.rates(steps), self.momentum) / self.learning_rate
        return np.sqrt(weights)[:, None] * effects

    # -- scores ------------------------------------------------------------------------------------------------------

    def score(self, strategy: Strategy, noise_multiplier: float = 1.0) -> float:
        """``σ²·Tr(W (CᵀC)⁻¹) = σ²·‖C⁻ᵀQ‖_F²``: to compare strategies, each with the σ that its accountant asks for."""
        return noise_multiplier**2 * float(np.square(strategy.solve_transposed(self.factor(strategy.steps))).sum())

    def expected(self, strategy: Strategy, noise: float) -> float:
        """The left side of Eq. 1 or 2, in units of the loss (or of its gradient, squared).

        `noise` is the standard deviation of Z's part in the averaged gradient: clip norm · noise multiplier / batch
        size.
        """
        share = 0.5 if self.equation == "loss" else 1.0
        return share * (self.learning_rate * noise) ** 2 * self.score(strategy)


def curvature_score(
    strategy: Strategy, spectrum: Spectrum, learning_rate: float, noise_multiplier: float = 1.0, **options: object
) -> float:
    """``σ²(C)·Tr(W (CᵀC)⁻¹)`` of Eq. 1: the lower, the less the noise is expected to cost at the end of training.

    >>> from sordino.strategies import make_strategy
    >>> curved = Spectrum.given([1.0, 0.1])
    >>> strategies = [make_strategy(name, 50) for name in ("identity", "lambda-cgd-normalized:0.5")]
    >>> [round(curvature_score(s, curved, 0.5), 3) for s in strategies]
    [2.353, 1.384]
    """
    return CurvatureWorkload(spectrum, learning_rate, **options).score(strategy, noise_multiplier)  # type: ignore[arg-type]


def late_effects(curvatures: np.ndarray, rates: np.ndarray, momentum: float = 0.0) -> np.ndarray:
    """``−∂w_T/∂z_j`` of ``m_t = β m_{t−1} + κ w_t + z_t``, ``w_{t+1} = w_t − η_t m_t``: (len(κ), T).

    Backwards: with p_t = ∂w_T/∂w_t and q_t = ∂w_T/∂m_t, p_T = 1, q_T = 0, q_t = β q_{t+1} − η_t p_{t+1},
    p_t = p_{t+1} + κ q_t.

    >>> late_effects(np.array([0.5]), np.full(3, 1.0))
    array([[0.25, 0.5 , 1.  ]])
    """
    steps = len(rates)
    if momentum == 0.0 and (rates == rates[0]).all():
        x = rates[0] * curvatures
        late = np.arange(steps - 1, -1, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.exp(np.multiply.outer(np.log1p(-np.minimum(x, 1.0)), late))
        exact = (x >= 0.5)[:, None]  # no cancellation in 1 − x there; and 0⁰ = 1
        return rates[0] * np.where(exact, (1.0 - x)[:, None] ** late, powers)
    out = np.empty((len(curvatures), steps))
    p, q = np.ones(len(curvatures)), np.zeros(len(curvatures))
    for t in range(steps - 1, -1, -1):
        q = momentum * q - rates[t] * p
        p = p + curvatures * q
        out[:, t] = -q
    return out


@lru_cache(maxsize=8)
def _factor(workload: CurvatureWorkload, steps: int) -> np.ndarray:
    from scipy.linalg import eigh, svd

    if workload.equation == "loss":
        left, sizes, _ = svd(workload.effects(steps).T, full_matrices=False)
        kept = _rank(np.square(sizes))
        found = left[:, :kept] * sizes[:kept]
    else:
        if steps > DENSE:
            raise Unsupported(
                f"equation={workload.equation!r} over {steps} steps: its matrix has no low rank, so at most {DENSE} "
                "are possible; use equation='loss'"
            )
        values, vectors = eigh(workload.dense(steps))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        kept = _rank(values)
        found = vectors[:, :kept] * np.sqrt(values[:kept])
    found = np.ascontiguousarray(found)
    found.flags.writeable = False
    return found


def _rank(values: np.ndarray) -> int:
    """How many of the largest, in decreasing order, leave no more than `DROPPED` of the sum."""
    rest = np.cumsum(values[::-1])[::-1]  # rest[r]: the sum from r on
    return max(1, int((rest > DROPPED * rest[0]).sum()))
