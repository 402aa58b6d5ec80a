"""Per-example gradients of normalisation layers, in one pass over what arrives and what came in.

    layer_norm_sums   Σ_t g_t x̂_t and Σ_t g_t by example
    group_norm_sums   Σ_l g_l x̂_l and Σ_l g_l by row and channel

Each takes several layers of one shape in one launch and fills tensors that lie there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .common import TYPES, aligned, grid, pointer, power_of_two, table

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
    """g and x contiguous, n·T rows of D; mean and rstd by row; weight and bias (n, D), float32."""
    g, x, mean, _, weight, _ = layers[0]
    n, size = weight.shape
    length = g.numel() // weight.numel()
    block = power_of_two(size, 16, 128)
    _layer_norm_kernel[grid(len(layers) * n, triton.cdiv(size, block))](
        table(layers), n, length, size, G=TYPES[g.dtype], X=TYPES[x.dtype], S=TYPES[mean.dtype],
        ALIGNED=aligned(t for layer in layers for t in layer[:2]), BT=16, BD=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _group_norm_kernel(
    table, ROWS, L, EACH, G: tl.constexpr, X: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """A row is one channel of one image; EACH neighbouring channels share their statistics."""
    which = tl.program_id(0)
    at, row = table + (which // ROWS) * 6, (which % ROWS).to(tl.int64)
    g, x = pointer(at, 0, G, ALIGNED), pointer(at, 1, X, ALIGNED)
    m = tl.load(pointer(at, 2, S, False) + row // EACH).to(tl.float32)
    r = tl.load(pointer(at, 3, S, False) + row // EACH).to(tl.float32)
    first = tl.zeros((BLOCK,), dtype=tl.float32)
    second = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, L, BLOCK):
        place = start + tl.arange(0, BLOCK)
        a = tl.load(g + row * L + place, mask=place < L, other=0.0).to(tl.float32)
        b = tl.load(x + row * L + place, mask=place < L, other=0.0).to(tl.float32)
        first += a * (b - m)
        second += a
    tl.store(pointer(at, 4, 0, False) + row, tl.sum(first) * r)
    tl.store(pointer(at, 5, 0, False) + row, tl.sum(second))


def group_norm_sums(layers: Sequence[Layer]) -> None:
    """g and x contiguous (rows, channels, L), mean and rstd (rows, groups); weight and bias (rows, channels)."""
    g, x, mean, _, weight, _ = layers[0]
    rows = weight.numel()
    length = g.numel() // rows
    block = power_of_two(length, 16, 1024)
    _group_norm_kernel[grid(len(layers) * rows)](
        table(layers), rows, length, rows // mean.numel(), G=TYPES[g.dtype], X=TYPES[x.dtype], S=TYPES[mean.dtype],
        ALIGNED=aligned(t for layer in layers for t in layer[:2]), BLOCK=block, num_warps=max(1, min(4, block // 64)),
    )  # fmt: skip
