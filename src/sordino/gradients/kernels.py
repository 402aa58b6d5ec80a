"""GPU kernels for per-example norms and gradients, each with a twin in plain torch beside its caller.

    gram_norms        ‖Σ_t l_t r_tᵀ‖² from tiles of both Gram matrices, none of which is ever written
    conv_gradients    a convolution's per-example weight gradients (or only their norms), patches cut out on the fly
    row_sums          Σ g and Σ g·x along contiguous rows, in one pass (GroupNorm)
    layer_norm_sums   Σ_t g_t x̂_t and Σ_t g_t per example, in one pass (LayerNorm)

Norms are formed in float32: float32 products go through three TF32 products
("tf32x3", relative error about 1e-7), half-precision ones are exact. Partial sums
are written out and added in a fixed order, so results do not change from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return all((t.is_cuda or INTERPRETED) and t.dtype in kinds and t.numel() < 2**31 for t in tensors)


def power_of_two(size: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(size)))


# -- ‖Σ_t l_t r_tᵀ‖² = Σ_{s,t} ⟨l_s, l_t⟩⟨r_s, r_t⟩ ----------------------------------------------------------


@triton.jit
def _half(x, n, i, j, T, P, stride_n, stride_t, stride_p, BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns, ks = i * BT + tl.arange(0, BT), j * BT + tl.arange(0, BT), tl.arange(0, BK)
    base = x + n.to(tl.int64) * stride_n
    acc = tl.zeros((BT, BT), dtype=tl.float32)
    for k in range(0, P, BK):
        inside = ks + k < P
        a = tl.load(
            base + rows[:, None].to(tl.int64) * stride_t + (ks[None, :] + k) * stride_p,
            mask=(rows[:, None] < T) & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            base + columns[None, :].to(tl.int64) * stride_t + (ks[:, None] + k) * stride_p,
            mask=(columns[None, :] < T) & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gram_kernel(
    left, right, out, T, P, Q, ln, lt, lp, rn, rt, rq, PAIRS, margin,
    BT: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    n, pair = tl.program_id(0), tl.program_id(1)
    j = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
    j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
    i = pair - j * (j + 1) // 2
    a = _half(left, n, i, j, T, P, ln, lt, lp, BT, BK, LEFT)
    b = _half(right, n, i, j, T, Q, rn, rt, rq, BT, BK, RIGHT)
    found = tl.sum(a * b)
    if i == j:  # ‖l_t‖‖r_t‖ stands on the diagonals
        t = tl.arange(0, BT)
        product = tl.sum(tl.where(t[:, None] == t[None, :], a * b, 0.0), 1)
        spread = tl.sum(tl.sqrt(tl.maximum(product, 0.0)))
        found = found + margin * spread * spread
    else:
        found = 2.0 * found
    tl.store(out + n.to(tl.int64) * PAIRS + pair, found)


GRAM = (64, 32, 4, 3)  # rows of a tile, columns at once, warps, stages


def _precision(tensor: Tensor) -> str:
    return "tf32x3" if tensor.dtype == torch.float32 else "ieee"


def gram_norms(left: Tensor, right: Tensor, margin: float = 0.0) -> Tensor:
    """(n, T, p), (n, T, q) -> (n,); any strides. At least margin · (Σ_t ‖l_t‖‖r_t‖)² is added.

    That is done tile by tile: (Σ over k tiles)² ≤ k · Σ of their squares.
    """
    n, length, p = left.shape
    most, columns, warps, stages = GRAM
    block = power_of_two(length, 16, most)
    tiles = triton.cdiv(length, block)
    pairs = tiles * (tiles + 1) // 2
    out = torch.empty(n, pairs, device=left.device, dtype=torch.float32)
    _gram_kernel[(n, pairs)](
        left, right, out, length, p, right.shape[2], *left.stride(), *right.stride(), pairs,
        margin * tiles, BT=block, BK=columns, LEFT=_precision(left), RIGHT=_precision(right),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.sum(1)


# -- convolutions --------------------------------------------------------------------------------------------


@triton.jit
def _conv_kernel(
    x, g, out, squares, M, CIN, H, W, COUT, OH, OW, SH, SW, PH, PW, DH, DW, TILES,
    KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, tile = tl.program_id(0), tl.program_id(1)
    columns_tiles = tl.cdiv(CIN * KH * KW, BN)
    co = (tile // columns_tiles) * BM + tl.arange(0, BM)
    column = (tile % columns_tiles) * BN + tl.arange(0, BN)
    ci, kh, kw = column // (KH * KW), (column // KW) % KH, column % KW
    space, plane = OH * OW, H * W
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, M * space, BK):
        l = start + tl.arange(0, BK)
        row = n.to(tl.int64) * M + l // space
        at = l % space
        oh, ow = at // OW, at % OW
        inside = l < M * space
        a = tl.load(
            g + (row[None, :] * COUT + co[:, None]) * space + at[None, :],
            mask=(co[:, None] < COUT) & inside[None, :],
            other=0.0,
        )
        h = oh[:, None] * SH + kh[None, :] * DH - PH
        w = ow[:, None] * SW + kw[None, :] * DW - PW
        b = tl.load(
            x + (row[:, None] * CIN + ci[None, :]) * plane + h * W + w,
            mask=inside[:, None] & (column[None, :] < CIN * KH * KW) & (h >= 0) & (h < H) & (w >= 0) & (w < W),
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(squares + n.to(tl.int64) * TILES + tile, tl.sum(acc * acc))
    if KEEP:
        where = (n.to(tl.int64) * COUT + co[:, None]) * (CIN * KH * KW) + column[None, :]
        tl.store(out + where, acc, mask=(co[:, None] < COUT) & (column[None, :] < CIN * KH * KW))


def conv_gradients(
    x: Tensor, g: Tensor, n: int, kernel: tuple[int, int], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], keep: bool, exact: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Squared norms (n,) and, if `keep`, the gradients (n, out, in, kh, kw) of a two-dimensional convolution.

    Kept gradients may be formed in TF32 (`exact` false): the norms are those of the very numbers that are summed.
    """
    x, g = x.contiguous(), g.contiguous()
    rows, cin, height, width = x.shape
    cout, oh, ow = g.shape[1:]
    columns = cin * kernel[0] * kernel[1]
    bm, bn = power_of_two(cout, 16, 64), power_of_two(columns, 16, 64)
    tiles = triton.cdiv(cout, bm) * triton.cdiv(columns, bn)
    squares = torch.empty(n, tiles, device=x.device, dtype=torch.float32)
    out = torch.empty(n, cout, cin, *kernel, device=x.device, dtype=torch.float32) if keep else squares
    precision = _precision(x) if exact or x.dtype != torch.float32 else "tf32"
    _conv_kernel[(n, tiles)](
        x, g, out, squares, rows // n, cin, height, width, cout, oh, ow, *stride, *padding, *dilation, tiles,
        KH=kernel[0], KW=kernel[1], BM=bm, BN=bn, BK=32, KEEP=keep, PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    return squares.sum(1), out if keep else None


# -- normalisation layers ------------------------------------------------------------------------------------


@triton.jit
def _row_kernel(g, x, sum_g, sum_gx, L, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.zeros((BLOCK,), dtype=tl.float32)
    second = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(g + row * L + at, mask=at < L, other=0.0).to(tl.float32)
        b = tl.load(x + row * L + at, mask=at < L, other=0.0).to(tl.float32)
        first += a
        second += a * b
    tl.store(sum_g + row, tl.sum(first))
    tl.store(sum_gx + row, tl.sum(second))


def row_sums(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(R, L) contiguous -> Σ g (R,), Σ g·x (R,)."""
    rows, length = g.shape
    sum_g, sum_gx = (torch.empty(rows, device=g.device, dtype=torch.float32) for _ in range(2))
    block = power_of_two(length, 16, 1024)
    _row_kernel[(rows,)](g, x, sum_g, sum_gx, length, BLOCK=block, num_warps=max(1, min(4, block // 64)))
    return sum_g, sum_gx


@triton.jit
def _layer_norm_kernel(g, x, mean, rstd, weight, bias, T, D, BT: tl.constexpr, BD: tl.constexpr):
    n, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.zeros((BT, BD), dtype=tl.float32)
    second = tl.zeros((BT, BD), dtype=tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        at = (n * T + t[:, None]) * D + d[None, :]
        inside = (t[:, None] < T) & (d[None, :] < D)
        a = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(mean + n * T + t, mask=t < T, other=0.0).to(tl.float32)
        r = tl.load(rstd + n * T + t, mask=t < T, other=0.0).to(tl.float32)
        first += a * ((b - m[:, None]) * r[:, None])
        second += a
    tl.store(weight + n * D + d, tl.sum(first, 0), mask=d < D)
    tl.store(bias + n * D + d, tl.sum(second, 0), mask=d < D)


def layer_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, n: int, size: int) -> tuple[Tensor, Tensor]:
    """Contiguous (n·T, D) in memory -> Σ_t g x̂ and Σ_t g, (n, D) each; D is `size`."""
    length = g.numel() // (n * size)
    weight, bias = (torch.empty(n, size, device=g.device, dtype=torch.float32) for _ in range(2))
    block = power_of_two(size, 16, 128)
    grid: Any = (n, triton.cdiv(size, block))
    _layer_norm_kernel[grid](g, x, mean, rstd, weight, bias, length, size, BT=16, BD=block, num_warps=4)
    return weight, bias
