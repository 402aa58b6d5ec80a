"""Per-example gradients of LayerNorm, Σ_t g_t x̂_t and Σ_t g_t, in one pass over what arrives and what came in."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .common import TYPES, aligned, grid, pointer, power_of_two, table, where

Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # g, x, mean, rstd; to be filled: weight, bias


@triton.jit
def _layer_norm_kernel(
    table, N, T, D, G: tl.constexpr, X: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    at, n = table + (row // N) * 6, (row % N).to(tl.int64)
    g, x = pointer(at, 0, G, ALIGNED), pointer(at, 1, X, ALIGNED)
    mean, rstd = pointer(at, 2, S, False), pointer(at, 3, S, False)
    first = tl.zeros((BT, BD), dtype=tl.float32)
    second = tl.zeros((BT, BD), dtype=tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        place = (n * T + t[:, None]) * D + d[None, :]
        inside = (t[:, None] < T) & (d[None, :] < D)
        a = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(mean + n * T + t, mask=t < T, other=0.0).to(tl.float32)
        r = tl.load(rstd + n * T + t, mask=t < T, other=0.0).to(tl.float32)
        first += a * ((b - m[:, None]) * r[:, None])
        second += a
    tl.store(pointer(at, 4, 0, False) + n * D + d, tl.sum(first, 0), mask=d < D)
    tl.store(pointer(at, 5, 0, False) + n * D + d, tl.sum(second, 0), mask=d < D)


def layer_norm_sums(layers: Sequence[Layer]) -> None:
    """Layers of one shape, in one launch; weight and bias lie there already and are filled.

    g and x contiguous, n·T rows of D; mean and rstd by row; weight and bias (n, D), float32.
    """
    g, x, mean, _, weight, _ = layers[0]
    n, size = weight.shape
    length = g.numel() // weight.numel()
    block = power_of_two(size, 16, 128)
    with where(g):
        _layer_norm_kernel[grid(len(layers) * n, triton.cdiv(size, block))](
            table(layers), n, length, size, G=TYPES[g.dtype], X=TYPES[x.dtype], S=TYPES[mean.dtype],
            ALIGNED=aligned(t for layer in layers for t in layer[:2]), BT=16, BD=block, num_warps=4,
        )  # fmt: skip
