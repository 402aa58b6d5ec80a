"""A convolution's per-example weight gradients, or only their norms, with the patches cut out on the fly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import power_of_two, precision, where


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
    products = precision(x) if exact or x.dtype != torch.float32 else "tf32"
    with where(x):
        _conv_kernel[(n, tiles)](
            x, g, out, squares, rows // n, cin, height, width, cout, oh, ow, *stride, *padding, *dilation, tiles,
            KH=kernel[0], KW=kernel[1], BM=bm, BN=bn, BK=32, KEEP=keep, PRECISION=products, num_warps=4, num_stages=3,
        )  # fmt: skip
    return squares.sum(1), out if keep else None
