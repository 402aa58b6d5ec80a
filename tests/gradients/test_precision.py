"""Where TF32 may lengthen a contribution, its weight is that much shorter; nowhere else."""

from __future__ import annotations

import torch

from sordino.gradients.precision import shortened


class OnGPU:
    """Weights that say they lie on a GPU."""

    device = torch.device("cuda")

    def __mul__(self, factor: float) -> float:
        return factor


def test_weights_are_shortened_by_what_rounding_both_factors_can_add() -> None:
    worst = (1 + 2**-11) ** 2  # each factor rounded to ten bits of mantissa, away from zero
    assert worst * shortened(OnGPU(), tf32=True) <= 1  # type: ignore[arg-type, operator]


def test_exact_sums_keep_their_weights() -> None:
    weights = torch.rand(4)
    assert shortened(weights, tf32=True) is weights  # a CPU has no TF32
    gpu = OnGPU()
    assert shortened(gpu, tf32=False) is gpu  # type: ignore[arg-type, comparison-overlap]
