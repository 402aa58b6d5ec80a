"""‖Σ_t l_t r_tᵀ‖² = Σ_{s,t} ⟨l_s, l_t⟩⟨r_s, r_t⟩, from tiles of both Gram matrices, none of which is ever written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import TYPES, aligned, grid, pointer, power_of_two, precision, table, where


@triton.jit
def _half(
    x, rows, columns, T, P, stride_t, stride_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAME: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of one Gram matrix; SAME if the columns are the rows."""
    ks = tl.arange(0, BK)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, P, BK):
        inside = ks + k < P
        a = tl.load(
            x + rows[:, None].to(tl.int64) * stride_t + (ks[None, :] + k) * stride_p,
            mask=(rows[:, None] < T) & inside[None, :],
            other=0.0,
        )
        if SAME:
            b = tl.trans(a)
        else:
            b = tl.load(
                x + columns[None, :].to(tl.int64) * stride_t + (ks[:, None] + k) * stride_p,
                mask=(columns[None, :] < T) & inside[:, None],
                other=0.0,
            )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _tile(
    left, right, i, j, T, P, Q, lt, lp, rt, rq, margin,
    BT: tl.constexpr, COLUMNS: tl.constexpr, SAME: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    rows, columns = i * BT + tl.arange(0, BT), j * BT + tl.arange(0, COLUMNS)
    both = _half(left, rows, columns, T, P, lt, lp, BT, COLUMNS, SAME, BK, LEFT)
    both = both * _half(right, rows, columns, T, Q, rt, rq, BT, COLUMNS, SAME, BK, RIGHT)
    found = tl.sum(both)
    if i == j:  # ‖l_t‖‖r_t‖ stands on the diagonals
        product = tl.sum(tl.where(rows[:, None] == columns[None, :], both, 0.0), 0)
        spread = tl.sum(tl.sqrt(tl.maximum(product, 0.0)))
        found = found + margin * spread * spread
    else:
        found = 2.0 * found
    return found


@triton.jit
def _gram_kernel(
    table, out, N, T, P, Q, ln, lt, lp, rn, rt, rq, TILES, PAIRS, margin,
    LEFT_TYPE: tl.constexpr, RIGHT_TYPE: tl.constexpr, ALIGNED: tl.constexpr, SINGLE: tl.constexpr,
    BT: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """One tile of one example of one layer. The last tile has only TAIL columns, if T leaves no more; SINGLE if the
    first tile is all there is."""
    row, pair = tl.program_id(0), tl.program_id(1)
    layer, n = row // N, (row % N).to(tl.int64)
    j = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
    j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
    i = pair - j * (j + 1) // 2
    left = pointer(table, 2 * layer, LEFT_TYPE, ALIGNED) + n * ln
    right = pointer(table, 2 * layer + 1, RIGHT_TYPE, ALIGNED) + n * rn
    if TAIL < BT:
        if j == TILES - 1:
            found = _tile(left, right, i, j, T, P, Q, lt, lp, rt, rq, margin, BT, TAIL, False, BK, LEFT, RIGHT)
        else:
            found = _tile(left, right, i, j, T, P, Q, lt, lp, rt, rq, margin, BT, BT, False, BK, LEFT, RIGHT)
    else:
        found = _tile(left, right, i, j, T, P, Q, lt, lp, rt, rq, margin, BT, BT, SINGLE, BK, LEFT, RIGHT)
    tl.store(out + row.to(tl.int64) * PAIRS + pair, found)


Variant = tuple[int, int, int, int]  # rows of a tile, columns at once, warps, stages


def variant(length: int) -> Variant:
    """What is quick for so many positions; `python benchmarks/gram.py` compares."""
    return 64, 32, 4, 3


def gram_norms(
    factors: Sequence[tuple[Tensor, Tensor]], margin: float = 0.0, how: Variant | None = None
) -> list[Tensor]:
    """For each pair (n, T, p), (n, T, q) its norms, (n,); any strides. A launch for all pairs of one shape.

    At least margin · (Σ_t ‖l_t‖‖r_t‖)² is added. That is done tile by tile: (Σ over k tiles)² ≤ k · Σ of their squares.
    """
    groups: dict[Any, list[int]] = {}
    for at, (left, right) in enumerate(factors):
        kind = (left.shape, right.shape, left.stride(), right.stride(), left.dtype, right.dtype, aligned((left, right)))
        groups.setdefault(kind, []).append(at)
    found: list[Any] = [None] * len(factors)
    for kind, places in groups.items():
        norms = _launch([factors[at] for at in places], margin, kind[-1], how)
        for at, norm in zip(places, norms.unbind(), strict=True):
            found[at] = norm
    return found


def _launch(factors: Sequence[tuple[Tensor, Tensor]], margin: float, wide: bool, how: Variant | None) -> Tensor:
    left, right = factors[0]
    n, length, p = left.shape
    most, columns, warps, stages = how or variant(length)
    block = power_of_two(length, 16, most)
    tiles = triton.cdiv(length, block)
    tail = power_of_two(length - (tiles - 1) * block, 16, block)
    pairs = tiles * (tiles + 1) // 2
    rows = len(factors) * n
    out = torch.empty(rows, pairs, device=left.device, dtype=torch.float32)
    with where(left):
        _gram_kernel[grid(rows, pairs)](
            table(factors), out, n, length, p, right.shape[2], *left.stride(), *right.stride(), tiles, pairs,
            margin * tiles, LEFT_TYPE=TYPES[left.dtype], RIGHT_TYPE=TYPES[right.dtype], ALIGNED=wide, SINGLE=tiles == 1,
            BT=block, TAIL=tail, BK=columns, LEFT=precision(left), RIGHT=precision(right),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return (out.sum(1) if pairs > 1 else out[:, 0]).view(len(factors), n)
