"""What the kernels share: which tensors they take, sizes of tiles, and tables of addresses.

A launch costs the host tens of microseconds, much more than a small kernel takes. So
kernels that many layers need take a table of addresses, one row a layer, and do all
layers of one shape at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `pointer` knows them


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors."""
    for t in tensors:
        if not (t.is_cuda or INTERPRETED) or t.dtype not in TYPES or t.numel() >= 2**31:
            return False
    return True


def power_of_two(size: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(size)))


def precision(tensor: Tensor) -> str:
    """How a matrix product takes these: float32 by three TF32 products, halves exactly."""
    return "tf32x3" if tensor.dtype == torch.float32 else "ieee"


def aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether all of them begin where 16 bytes can be read at once."""
    bits = 0
    for t in tensors:
        bits |= t.data_ptr()
    return bits % 16 == 0


def table(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The addresses of the tensors, (rows, columns). Nothing here keeps the tensors alive until the kernel has run:
    on one stream, whatever gets their memory next comes after it."""
    return _table(tuple([t.data_ptr() for row in rows for t in row]), rows[0][0].device)


@functools.lru_cache(maxsize=256)  # the allocator mostly gives the same places step after step
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    pinned = device.type == "cuda"  # a copy from other memory waits for the device
    found = torch.tensor(addresses, dtype=torch.int64, pin_memory=pinned)
    return found.to(device, non_blocking=pinned)


@triton.jit
def pointer(table, at, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address at a place of the table, as a pointer."""
    address = tl.load(table + at)
    if TYPE == 0:
        found = address.to(tl.pointer_type(tl.float32))
    elif TYPE == 1:
        found = address.to(tl.pointer_type(tl.bfloat16))
    else:
        found = address.to(tl.pointer_type(tl.float16))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


def grid(*sizes: int) -> Any:
    return sizes


def where(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one where the tensors lie."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
