"""What the noise is summed into: the workload A, whose partial results ``A C⁻¹ Z`` are to be accurate.

Plain gradient descent moves by ``−η Σ_{s≤t} u_s``: A is the prefix sum. With momentum β and weight decay
(each step multiplies the weights by α = 1 − η·decay), A is Toeplitz with coefficients ``Σ_{j≤i} α^{i−j} β^j``; a
schedule multiplies column s by ``η_s``. All of it is applied in O(T). (SGD as PyTorch writes it applies η after the
momentum, not before: the same for a rate that hardly changes within 1/(1 − β) steps.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..errors import SordinoError


@dataclass(frozen=True)
class Workload:
    """Momentum β, the factor α by which weight decay shrinks the weights each step, relative learning rates.

    >>> Workload(momentum=0.5).coefficients(3)
    array([1.  , 1.5 , 1.75])
    """

    momentum: float = 0.0
    shrink: float = 1.0  # α = 1 − η·decay
    learning_rates: tuple[float, ...] | None = None  # η_s; only ratios matter for comparing

    def __post_init__(self) -> None:
        for name, low, high in (("momentum", 0.0, 1.0), ("shrink", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise SordinoError(f"{name}={value!r} must be a number from {low:g} to {high:g}")
        if self.momentum == 1.0:
            raise SordinoError("momentum=1 never forgets a gradient; use a value below 1")
        if self.learning_rates is not None:
            rates = tuple(float(rate) for rate in self.learning_rates)
            if not rates or not all(math.isfinite(rate) and rate >= 0.0 for rate in rates) or not any(rates):
                raise SordinoError(
                    "learning_rates must be finite numbers of at least 0, one a step, and not all of them 0"
                )
            object.__setattr__(self, "learning_rates", rates)

    @property
    def is_toeplitz(self) -> bool:
        return self.learning_rates is None or len(set(self.learning_rates)) == 1

    @property
    def is_prefix_sum(self) -> bool:
        return self.momentum == 0.0 and self.shrink == 1.0 and self.learning_rates is None

    def coefficients(self, steps: int) -> np.ndarray:
        """The first column of A without the schedule: ``Σ_{j≤i} α^{i−j} β^j``."""
        impulse = np.zeros(steps)
        impulse[0] = 1.0
        return self.sums(impulse)

    def rates(self, steps: int) -> np.ndarray:
        """η_s for `steps` steps."""
        if self.learning_rates is None:
            return np.ones(steps)
        if len(self.learning_rates) < steps:
            raise SordinoError(
                f"learning_rates has {len(self.learning_rates)} entries for {steps} steps; give one for every step"
            )
        return np.asarray(self.learning_rates[:steps])

    def apply(self, x: np.ndarray) -> np.ndarray:
        """``A x`` along the first axis."""
        return self.sums(self._scaled(x))

    def apply_transposed(self, x: np.ndarray) -> np.ndarray:
        """``Aᵀ x`` along the first axis."""
        return self._scaled(self.sums_transposed(np.asarray(x, dtype=np.float64)))

    def sums(self, x: np.ndarray) -> np.ndarray:
        """A without its schedule, times x: ``1/((1 − βq)(1 − αq))``, q the shift by one step."""
        return self._filter(x)

    def sums_transposed(self, x: np.ndarray) -> np.ndarray:
        return self._filter(x[::-1])[::-1]

    def dense(self, steps: int) -> np.ndarray:
        return self.apply(np.eye(steps))

    def scaled(self, weights: np.ndarray) -> Workload:
        """``A·diag(weights)``: what the columns of A are multiplied with joins the schedule."""
        return replace(self, learning_rates=tuple((self.rates(len(weights)) * weights).tolist()))

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        if self.learning_rates is None:
            return x
        return x * self.rates(len(x)).reshape(-1, *[1] * (x.ndim - 1))

    def _filter(self, x: np.ndarray) -> np.ndarray:
        if self.shrink == 1.0:
            x = np.cumsum(x, axis=0)
        elif self.shrink > 0.0:
            x = _decay(x, self.shrink)
        if self.momentum > 0.0:
            x = _decay(x, self.momentum)
        return x


def _decay(x: np.ndarray, factor: float) -> np.ndarray:
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], [1.0, -factor], x, axis=0))


PREFIX_SUM = Workload()
