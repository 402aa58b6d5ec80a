# mypy: disable-error-code="no-untyped-def"
"""`checksum.fold` on a GPU: all tensors in one launch, each word read once.

A program folds `ROWS` rows with the multipliers in registers. They are data, not launch arguments, so no compiled
kernel depends on them. Integer arithmetic: equal to `fold` to the bit. Under ``TRITON_INTERPRET=1`` the same source
runs without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4


@triton.jit
def _fold(table, owner, multipliers, out, ROW: tl.constexpr, ROWS: tl.constexpr):
    """`table` has a row per tensor: address, 32-bit words, first program, first row of the result."""
    program = tl.program_id(0)
    entry = table + tl.load(owner + program).to(tl.int64) * 4
    words = tl.load(entry).to(tl.pointer_type(tl.int32))
    count = tl.load(entry + 1)
    first = (program - tl.load(entry + 2)).to(tl.int64) * ROWS
    result = out + 2 * tl.load(entry + 3)
    place = tl.arange(0, ROW)
    m0 = tl.load(multipliers + place)
    m1 = tl.load(multipliers + ROW + place)
    for k in tl.static_range(ROWS):
        row = first + k
        if row * ROW < count:
            at = row * ROW + place
            x = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
            tl.store(result + 2 * row, tl.sum(x * m0))
            tl.store(result + 2 * row + 1, tl.sum(x * m1))


def fold(tensors: Sequence[Tensor], multipliers: Tensor) -> Tensor:
    """The tensors are flat, contiguous and not empty, on one device; `multipliers` is (2, words of a row)."""
    row = multipliers.shape[1]
    counts = tuple(t.numel() * t.element_size() // 4 for t in tensors)
    device = multipliers.device
    owner, programs, rows, size = _owners(counts, row, device)
    entries = [[t.data_ptr(), *rest] for t, *rest in zip(tensors, counts, programs, rows, strict=True)]
    table = torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True)
    out = torch.empty((size, 2), dtype=torch.int64, device=device)
    _fold[(owner.numel(),)](table, owner, multipliers, out, ROW=row, ROWS=ROWS, num_warps=8)
    return out


@functools.lru_cache(maxsize=4)
def _owners(
    counts: tuple[int, ...], row: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int]:
    """For every program its tensor, for every tensor its first program and first row: the same in every step."""
    rows = torch.tensor([-(-count // row) for count in counts])
    programs = -(-rows // ROWS)
    owner = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), programs)
    starts = [tuple((torch.cumsum(n, 0) - n).tolist()) for n in (programs, rows)]
    return owner.to(device), starts[0], starts[1], int(rows.sum())
