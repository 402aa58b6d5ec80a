"""What correlated noise costs a step beside independent noise: time for past noise, memory for what is kept.

The constants were measured: on a CPU as processor time of one core of an AMD EPYC with AVX-512 (10 million entries;
1, 2 and 4 rows, 3 and 15 kept vectors), on a GPU as time on an NVIDIA H200 (100 million; 1 and 2 rows, 15 kept
vectors). They serve to compare strategies: another machine moves all of them, and the order of two strategies rarely
with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .strategies import Strategy


@dataclass(frozen=True)
class Device:
    """Nanoseconds per parameter: the first row of noise, every further row drawn again, every kept vector."""

    name: str
    fresh: float
    replay: float
    kept: float


CPU = Device("CPU", fresh=3.3, replay=3.3, kept=0.33)
GPU = Device("GPU", fresh=0.00380, replay=0.00505, kept=0.00293)
BYTES = 4  # of an entry of a kept vector


@dataclass(frozen=True)
class StepCost:
    """Of one step of one strategy, per trainable parameter."""

    regenerated: int  # past rows drawn again
    stored: int  # vectors kept

    @staticmethod
    def of(strategy: Strategy) -> StepCost:
        return StepCost(strategy.vectors_regenerated, strategy.vectors_stored)

    def extra(self, device: Device) -> float:
        """Nanoseconds per parameter more than a step of independent noise.

        >>> StepCost(regenerated=1, stored=0).extra(CPU)
        3.3
        """
        return self.regenerated * device.replay + self.stored * device.kept

    @property
    def burden(self) -> float:
        """Time and memory in one number: draws of fresh noise (on a GPU), plus copies of the model.

        >>> StepCost(regenerated=63, stored=0).burden > StepCost(regenerated=0, stored=15).burden
        True
        """
        return self.extra(GPU) / GPU.fresh + self.stored

    @property
    def bytes(self) -> int:
        """Memory per parameter."""
        return BYTES * self.stored

    def as_dict(self, parameters: int | None) -> dict[str, float]:
        """Extra milliseconds and bytes for a model of so many parameters (without: per 10 million)."""
        count = 10_000_000 if parameters is None else parameters
        unit = "_per_10M" if parameters is None else ""
        return {
            f"extra_ms_cpu{unit}": self.extra(CPU) * count * 1e-6,
            f"extra_ms_gpu{unit}": self.extra(GPU) * count * 1e-6,
            f"noise_bytes_stored{unit}": self.bytes * count,
        }
