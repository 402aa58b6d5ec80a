# mypy: disable-error-code="no-untyped-def"
"""The GPU's twin of `moves`, and of `add_many_normals_` for many terms: one launch, one pass over the tensors.

A program computes one tile: 2048 elements, sixteen to a lane, held as a tuple of the
tile's rows. `_move` draws z, reads the kept vectors, writes those that change and adds to
the sums; sixteen loads are under way in each lane at a time. `_add_terms` draws row after
row with the sums in registers. The loops over vectors and terms are loops, not written
out: one compiled kernel serves any number of them, and slots, steps and coefficients come
from a small table.

Operations and their order are those of the CPU, none of them fused: the same bits. Key
words are launch arguments that are never specialised on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import boxmuller
from .chunks import Part
from .cipher import tensor_words
from .moves import Move
from .triton_kernel import _chacha, _pair, key_words, signed

_LANES = tl.constexpr(boxmuller.LANES)
_TILE = tl.constexpr(boxmuller.TILE)

# -- a tile: sixteen rows of 128 -------------------------------------------------------------------------------------


@triton.jit
def _draw(k0, k1, k2, k3, k4, k5, k6, k7, counter, step, n1, n2, UNROLL: tl.constexpr):
    w = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, step, n1, n2, UNROLL)
    z0, z8 = _pair(w[0], w[8], 0)
    z1, z9 = _pair(w[1], w[9], 0)
    z2, z10 = _pair(w[2], w[10], 0)
    z3, z11 = _pair(w[3], w[11], 0)
    z4, z12 = _pair(w[4], w[12], 0)
    z5, z13 = _pair(w[5], w[13], 0)
    z6, z14 = _pair(w[6], w[14], 0)
    z7, z15 = _pair(w[7], w[15], 0)
    return z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15


@triton.jit
def _times(v, c, D: tl.constexpr):
    """v·c in the dtype D."""
    c = c.to(D)
    return (v[0].to(D) * c, v[1].to(D) * c, v[2].to(D) * c, v[3].to(D) * c, v[4].to(D) * c, v[5].to(D) * c,
            v[6].to(D) * c, v[7].to(D) * c, v[8].to(D) * c, v[9].to(D) * c, v[10].to(D) * c, v[11].to(D) * c,
            v[12].to(D) * c, v[13].to(D) * c, v[14].to(D) * c, v[15].to(D) * c)  # fmt: skip


@triton.jit
def _plus(a, b):
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
            a[8] + b[8], a[9] + b[9], a[10] + b[10], a[11] + b[11], a[12] + b[12], a[13] + b[13], a[14] + b[14],
            a[15] + b[15])  # fmt: skip


@triton.jit
def _row(p, low, high, J: tl.constexpr):
    at = tl.arange(0, _LANES) + J * _LANES
    return tl.load(p + at, mask=(at >= low) & (at < high), other=0.0)


@triton.jit
def _load(p, low, high):
    """Where low ≤ place in the tile < high; 0 elsewhere."""
    return (_row(p, low, high, 0), _row(p, low, high, 1), _row(p, low, high, 2), _row(p, low, high, 3),
            _row(p, low, high, 4), _row(p, low, high, 5), _row(p, low, high, 6), _row(p, low, high, 7),
            _row(p, low, high, 8), _row(p, low, high, 9), _row(p, low, high, 10), _row(p, low, high, 11),
            _row(p, low, high, 12), _row(p, low, high, 13), _row(p, low, high, 14), _row(p, low, high, 15))  # fmt: skip


@triton.jit
def _load_whole(p):
    p += tl.arange(0, _LANES)
    return (tl.load(p), tl.load(p + 1 * _LANES), tl.load(p + 2 * _LANES), tl.load(p + 3 * _LANES),
            tl.load(p + 4 * _LANES), tl.load(p + 5 * _LANES), tl.load(p + 6 * _LANES), tl.load(p + 7 * _LANES),
            tl.load(p + 8 * _LANES), tl.load(p + 9 * _LANES), tl.load(p + 10 * _LANES), tl.load(p + 11 * _LANES),
            tl.load(p + 12 * _LANES), tl.load(p + 13 * _LANES), tl.load(p + 14 * _LANES),
            tl.load(p + 15 * _LANES))  # fmt: skip


@triton.jit
def _store(p, low, high, v):
    for j in tl.static_range(16):
        at = tl.arange(0, _LANES) + j * _LANES
        tl.store(p + at, v[j], mask=(at >= low) & (at < high))


@triton.jit
def _place(table, owner):
    """The tensor's row of the table, the tile's number in it, its first element, where the tensor lies, its blocks."""
    row = table + tl.load(owner + tl.program_id(0)).to(tl.int64) * 8
    tile = tl.program_id(0).to(tl.int64) - tl.load(row + 6)
    base = tile * _TILE - tl.load(row + 2)  # negative before a cut-off beginning
    left = tl.load(row + 1) - base
    low = tl.where(base < 0, -base, 0).to(tl.int32)
    high = tl.where(left < _TILE, left, _TILE).to(tl.int32)
    counter = ((tile + tl.load(row + 3)) * _LANES + tl.arange(0, _LANES)).to(tl.uint32)
    return row, tile, base, low, high, counter


# -- the two kernels -------------------------------------------------------------------------------------------------

_KEYS = [f"{t}{i}" for t in "ab" for i in range(8)]


@triton.jit(do_not_specialize=[*_KEYS, "terms"])
def _add_terms(
    table, owner, plan, terms, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7,
    KEYS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``sum += c0 n0 + c1 n1``, then the next two. `plan` has a row per term: coefficient, step, which key."""
    row, tile, base, low, high, counter = _place(table, owner)
    out = tl.load(row).to(tl.pointer_type(tl.float32)) + base
    n1 = tl.load(row + 4).to(tl.int32)
    n2 = tl.load(row + 5).to(tl.int32)
    total = _load(out, low, high)
    two = total  # what is added next; its first value is not used
    for k in range(terms):
        step = tl.load(plan + 3 * k + 1).to(tl.int64).to(tl.uint32)
        if KEYS == 1:
            z = _draw(a0, a1, a2, a3, a4, a5, a6, a7, counter, step, n1, n2, UNROLL)
        else:
            b = tl.load(plan + 3 * k + 2) != 0.0
            z = _draw(
                tl.where(b, b0, a0), tl.where(b, b1, a1), tl.where(b, b2, a2), tl.where(b, b3, a3),
                tl.where(b, b4, a4), tl.where(b, b5, a5), tl.where(b, b6, a6), tl.where(b, b7, a7),
                counter, step, n1, n2, UNROLL,
            )  # fmt: skip
        z = _times(z, tl.load(plan + 3 * k), tl.float32)
        if k % 2 == 0:
            two = z
        else:
            total = _plus(total, _plus(two, z))
    if terms % 2 == 1:
        total = _plus(total, two)
    _store(out, low, high, total)


@triton.jit(do_not_specialize=[*_KEYS[:8], "step", "stride", "reads", "writes"])
def _move(
    table, owner, kept, stride, plan, reads, writes, step, a0, a1, a2, a3, a4, a5, a6, a7,
    REPLAY: tl.constexpr, ADDS: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One `Move`. `plan`: fresh, scale, then (slot, read) for the reads, then (slot, keep, put) for the writes."""
    row, tile, base, low, high, counter = _place(table, owner)
    out = tl.load(row).to(tl.pointer_type(D)) + base
    vectors = kept + (tl.load(row + 7) + tile) * _TILE
    changes = plan + 2 + 2 * reads
    n1 = tl.load(row + 4).to(tl.int32)
    n2 = tl.load(row + 5).to(tl.int32)
    z = _draw(a0, a1, a2, a3, a4, a5, a6, a7, counter, step, n1, n2, UNROLL)
    if REPLAY:
        if ADDS:
            total = _load(out, low, high)
            two = _times(z, tl.load(plan), D)
            for k in range(reads):
                slot = tl.load(plan + 2 + 2 * k).to(tl.int64)
                v = _times(_load_whole(vectors + slot * stride), tl.load(plan + 3 + 2 * k), D)
                if k % 2 == 0:
                    total = _plus(total, _plus(two, v))
                else:
                    two = v
            if reads % 2 == 0:
                total = _plus(total, two)
            _store(out, low, high, total)
        for k in range(writes):
            _store(vectors + tl.load(changes + 3 * k).to(tl.int64) * stride, 0, _TILE, z)
    else:
        x = _times(z, tl.load(plan), tl.float32)
        for k in range(reads):
            slot = tl.load(plan + 2 + 2 * k).to(tl.int64)
            x = _plus(x, _times(_load_whole(vectors + slot * stride), tl.load(plan + 3 + 2 * k), tl.float32))
        for k in range(writes):
            at = vectors + tl.load(changes + 3 * k).to(tl.int64) * stride
            keep = tl.load(changes + 3 * k + 1)
            y = _times(x, tl.load(changes + 3 * k + 2), tl.float32)
            if keep != 0.0:
                y = _plus(_times(_load_whole(at), keep, tl.float32), y)
            _store(at, 0, _TILE, y)
        if ADDS:
            _store(out, low, high, _plus(_load(out, low, high), _times(x, tl.load(plan + 1), D)))


# -- launching -------------------------------------------------------------------------------------------------------

# The ten double rounds as a loop: it is compiled in a second or two rather than in ten to thirty.
_OPTIONS: dict[str, Any] = {"UNROLL": False, "num_warps": 4, "enable_fp_fusion": False}


def add_terms_(
    parts: Sequence[tuple[str, Tensor, int]], terms: Sequence[tuple[bytes, int, float]], **options: Any
) -> None:
    """As `triton_kernel.add_normals_`, for terms under at most two keys."""
    device = parts[0][1].device
    keys = list(dict.fromkeys(key for key, _, _ in terms))
    plan = _floats(tuple(x for key, step, c in terms for x in (c, step, keys.index(key))), device)
    tensors = [tensor for _, tensor, _ in parts]
    table, owner = _tables([Part(None, name, offset, t.numel()) for name, t, offset in parts], tensors, device)
    with _on(device):
        _add_terms[(owner.numel(),)](
            table, owner, plan, len(terms), *key_words(keys[0]), *key_words(keys[-1]), KEYS=len(keys),
            **{**_OPTIONS, **options},
        )  # fmt: skip


def run_move(move: Move, parts: Sequence[Part], flat: Mapping[str, Tensor] | None, kept: Tensor) -> None:
    """Carry out a move over `kept`, (m, tiles·TILE), in which the parts lie one after another."""
    device = kept.device
    sums = flat if move.adds and flat is not None else {}
    values = [move.fresh, move.scale or 0.0]
    values += [x for read in move.reads for x in read] + [x for write in move.writes for x in write]
    plan = _floats(tuple(values), device)
    kinds = list(dict.fromkeys(t.dtype for t in sums.values())) or [torch.float32]
    places = itertools.accumulate((part.tiles for part in parts), initial=0)
    placed = list(zip(parts, places, strict=False))  # the end of the last is the place of nothing
    for kind in kinds:
        mine = [(part, place) for part, place in placed if not sums or sums[part.name].dtype == kind]
        tensors = [sums.get(part.name) for part, _ in mine]
        table, owner = _tables([part for part, _ in mine], tensors, device, [place for _, place in mine])
        with _on(device):
            _move[(owner.numel(),)](
                table, owner, kept, kept.stride(0), plan, len(move.reads), len(move.writes), signed(move.row),
                *key_words(move.key), REPLAY=move.replay, ADDS=bool(sums),
                D=tl.float64 if kind == torch.float64 else tl.float32, **_OPTIONS,
            )  # fmt: skip


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.lru_cache(maxsize=64)
def _floats(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


def _tables(
    parts: Sequence[Part], tensors: Sequence[Tensor | None], device: torch.device, places: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """For every tensor where it lies and which words it takes; for every program its tensor."""
    owner, starts = _owners(tuple(part.tiles for part in parts), device)
    rows = []
    for k, (part, tensor) in enumerate(zip(parts, tensors, strict=True)):
        address = 0 if tensor is None else tensor.data_ptr()
        rows.append((part.name, address, part.length, part.offset, starts[k], places[k] if places else 0))
    return _table(tuple(rows), device), owner


@functools.lru_cache(maxsize=256)
def _owners(tiles: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    counts = torch.tensor(tiles)
    owner = torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), counts)
    return owner.to(device), tuple((torch.cumsum(counts, 0) - counts).tolist())


@functools.lru_cache(maxsize=256)
def _table(rows: tuple[tuple[str, int, int, int, int, int], ...], device: torch.device) -> Tensor:
    """A row: address, length, skip, first tile, two words of the nonce, first program, place among the kept tiles."""
    found = []
    for name, address, length, offset, start, place in rows:
        first, skip = divmod(offset, boxmuller.TILE)
        n1, n2 = tensor_words(name)
        found.append([address, length, skip, first, signed(n1), signed(n2), start, place])
    return torch.tensor(found, dtype=torch.int64).to(device, non_blocking=True)
