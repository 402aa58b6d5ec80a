"""The GPU's twin of `cipher` and `boxmuller`: draws, scales and adds in one pass over the tensor.

One program computes `BLOCK` ChaCha20 blocks, a block per lane (or several), all sixteen
words in registers: sixteen normals a lane, which `boxmuller`'s tiles place so that the
lanes of a warp read and write neighbouring elements. Up to two terms (a step and its
predecessor, as DP-λCGD needs) are drawn before memory is touched.

In the exact mode the operations are those of `boxmuller`, with no multiply-add fused and
the root correctly rounded: the normals equal the CPU's to the bit. Under
``TRITON_INTERPRET=1`` the same source runs without a GPU.

Key words are launch arguments that are never specialised on, so that no compiled
kernel, cache or log depends on them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import boxmuller
from .cipher import tensor_words

_LANES = tl.constexpr(boxmuller.LANES)
_TILE = tl.constexpr(boxmuller.TILE)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in boxmuller.LOG)
_S0, _S1, _S2, _S3, _S4 = (tl.constexpr(c) for c in boxmuller.SIN)
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(c) for c in boxmuller.COS)
_LN = tl.constexpr(boxmuller.MINUS_2_LN2)
_ANGLE = tl.constexpr(boxmuller.ANGLE)
_TWO_M32 = tl.constexpr(2.0**-32)
_TWO_M17_LESS_HALF = tl.constexpr(2.0**-17 - 2.0**-41)

EXACT, FUSED, APPROX = 0, 1, 2


@dataclass(frozen=True)
class Variant:
    """How the kernel is compiled. `mode`: 0 equals the CPU to the bit; 1 fuses multiply-adds and takes the approximate
    root; 2 takes the hardware's sine and cosine as well. 1 and 2 agree to rounding; for comparison."""

    block: int = 128  # ChaCha20 blocks of a program, a multiple of 128
    warps: int = 4
    mode: int = EXACT
    unroll: bool = True  # the ten double rounds written out


DEFAULT = Variant()


# -- ChaCha20 (RFC 8439) ---------------------------------------------------------------------------------------------


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _double_round(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
    x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
    x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
    x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
    x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
    x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
    x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
    x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2, UNROLL: tl.constexpr):
    """The sixteen words of the blocks numbered `counter`, each a tensor of counter's shape."""
    o = tl.zeros_like(counter)
    s0 = o + 0x61707865
    s1 = o + 0x3320646E
    s2 = o + 0x79622D32
    s3 = o + 0x6B206574
    s4 = o + k0.to(tl.uint32, bitcast=True)
    s5 = o + k1.to(tl.uint32, bitcast=True)
    s6 = o + k2.to(tl.uint32, bitcast=True)
    s7 = o + k3.to(tl.uint32, bitcast=True)
    s8 = o + k4.to(tl.uint32, bitcast=True)
    s9 = o + k5.to(tl.uint32, bitcast=True)
    s10 = o + k6.to(tl.uint32, bitcast=True)
    s11 = o + k7.to(tl.uint32, bitcast=True)
    s13 = o + n0.to(tl.uint32, bitcast=True)
    s14 = o + n1.to(tl.uint32, bitcast=True)
    s15 = o + n2.to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = (
        s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, counter, s13, s14, s15)  # fmt: skip
    if UNROLL:
        for _ in tl.static_range(10):
            x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _double_round(
                x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)  # fmt: skip
    else:
        for _ in range(10):
            x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _double_round(
                x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)  # fmt: skip
    return (x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7, x8 + s8, x9 + s9, x10 + s10,
            x11 + s11, x12 + counter, x13 + s13, x14 + s14, x15 + s15)  # fmt: skip


# -- two words, two normals: `boxmuller.Scratch.transform`, line by line ---------------------------------------------


@triton.jit
def _pair(a, b, MODE: tl.constexpr):
    s = a.to(tl.int32, bitcast=True).to(tl.float32) * _TWO_M32
    low = ((b & 0xFF) | 0x37000000).to(tl.float32, bitcast=True)  # 2^-17, low in its last bits
    s = s + (low - _TWO_M17_LESS_HALF)
    one = ((s.to(tl.int32, bitcast=True) >> 31) & 0x3F800000).to(tl.float32, bitcast=True)
    u = s + one
    rest = s - (u - one)
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    f = ((bits - exponent).to(tl.float32, bitcast=True) - 1.0) + rest
    t = ((((f * _L8 + _L7) * f + _L6) * f + _L5) * f + _L4) * f + _L3
    t = (((t * f + _L2) * f + _L1) * f + _L0) * f + exponent.to(tl.float32) * _LN
    if MODE == 0:
        r = tl.sqrt_rn(t)
    else:
        r = tl.sqrt(t)
    r = (r.to(tl.uint32, bitcast=True) ^ ((b << 23) & 0x80000000)).to(tl.float32, bitcast=True)
    phi = ((b.to(tl.int32, bitcast=True) >> 8) | 1).to(tl.float32) * _ANGLE
    if MODE == 2:
        c = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [phi], dtype=tl.float32, is_pure=True, pack=1)
        v = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [phi], dtype=tl.float32, is_pure=True, pack=1)
    else:
        z = phi * phi
        c = (((z * _C4 + _C3) * z + _C2) * z + _C1) * z + _C0
        v = ((((z * _S4 + _S3) * z + _S2) * z + _S1) * z + _S0) * phi
    return c * r, v * r


# -- one program -----------------------------------------------------------------------------------------------------


@triton.jit
def _row(out, base, place, low, high, x, J: tl.constexpr):
    at = place + J * _LANES
    mask = (at >= low) & (at < high)
    pointers = out + base + at
    tl.store(pointers, tl.load(pointers, mask=mask) + x, mask=mask)


@triton.jit
def _program(
    out, count, skip, first_tile, program, n1, n2, a0, a1, a2, a3, a4, a5, a6, a7, step_a, coef_a,
    b0, b1, b2, b3, b4, b5, b6, b7, step_b, coef_b,
    TERMS: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Tiles program*(BLOCK/128)... of a tensor of `count` elements whose first is `skip` into tile `first_tile`."""
    tile = program.to(tl.int64) * (BLOCK // _LANES)
    lane = tl.arange(0, BLOCK)
    counter = ((tile + first_tile) * _LANES + lane).to(tl.uint32)
    base = tile * _TILE - skip  # the element of the program's first normal; negative before a cut-off beginning
    place = (lane // _LANES) * _TILE + lane % _LANES
    low = tl.where(base < 0, -base, 0).to(tl.int32)
    left = count - base
    high = tl.where(left < BLOCK * 16, left, BLOCK * 16).to(tl.int32)
    w = _chacha(a0, a1, a2, a3, a4, a5, a6, a7, counter, step_a, n1, n2, UNROLL)
    if TERMS == 2:
        v = _chacha(b0, b1, b2, b3, b4, b5, b6, b7, counter, step_b, n1, n2, UNROLL)
    for j in tl.static_range(8):
        x, y = _pair(w[j], w[j + 8], MODE)
        x = x * coef_a
        y = y * coef_a
        if TERMS == 2:
            x2, y2 = _pair(v[j], v[j + 8], MODE)
            x = x + x2 * coef_b
            y = y + y2 * coef_b
        _row(out, base, place, low, high, x, j)
        _row(out, base, place, low, high, y, j + 8)


_SECRET = [f"{t}{i}" for t in "ab" for i in range(8)] + ["step_a", "step_b", "n1", "n2", "coef_a", "coef_b"]


@triton.jit(do_not_specialize=[*_SECRET, "count", "skip", "first_tile"])
def _add_one(
    out, count, skip, first_tile, n1, n2, a0, a1, a2, a3, a4, a5, a6, a7, step_a, coef_a,
    b0, b1, b2, b3, b4, b5, b6, b7, step_b, coef_b,
    TERMS: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    _program(
        out, count, skip, first_tile, tl.program_id(0), n1, n2, a0, a1, a2, a3, a4, a5, a6, a7, step_a, coef_a,
        b0, b1, b2, b3, b4, b5, b6, b7, step_b, coef_b, TERMS, BLOCK, MODE, UNROLL,
    )  # fmt: skip


@triton.jit(do_not_specialize=_SECRET[:18] + ["coef_a", "coef_b"])
def _add_many(
    table, owner, a0, a1, a2, a3, a4, a5, a6, a7, step_a, coef_a, b0, b1, b2, b3, b4, b5, b6, b7, step_b, coef_b,
    TERMS: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`table` has a row per tensor: address, count, skip, first tile, two words of the nonce, first program."""
    row = table + tl.load(owner + tl.program_id(0)).to(tl.int64) * 7
    out = tl.load(row).to(tl.pointer_type(tl.float32))
    n1 = tl.load(row + 4).to(tl.int32)
    n2 = tl.load(row + 5).to(tl.int32)
    program = tl.program_id(0) - tl.load(row + 6)
    _program(
        out, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), program, n1, n2,
        a0, a1, a2, a3, a4, a5, a6, a7, step_a, coef_a, b0, b1, b2, b3, b4, b5, b6, b7, step_b, coef_b,
        TERMS, BLOCK, MODE, UNROLL,
    )  # fmt: skip


# -- launching -------------------------------------------------------------------------------------------------------


def add_normals_(
    parts: Sequence[tuple[str, Tensor, int]],
    terms: Sequence[tuple[bytes, int, float]],
    variant: Variant = DEFAULT,
) -> None:
    """Each part is (name, flat float32 tensor, offset), all on one device; terms as in `stream.add_normals_`."""
    shapes = tuple((tensor.numel(), offset) for _, tensor, offset in parts)
    device = parts[0][1].device
    options: dict[str, Any] = {
        "BLOCK": variant.block,
        "MODE": variant.mode,
        "UNROLL": variant.unroll,
        "num_warps": variant.warps,
        "enable_fp_fusion": variant.mode != EXACT,
    }
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for pair in (terms[k : k + 2] for k in range(0, len(terms), 2)):
            secret = _arguments(pair)
            options["TERMS"] = len(pair)
            if len(parts) == 1:
                name, tensor, offset = parts[0]
                programs = _programs(tensor.numel(), offset, variant.block)
                n1, n2 = (signed(w) for w in tensor_words(name))
                first, skip = divmod(offset, boxmuller.TILE)
                _add_one[(programs,)](tensor, tensor.numel(), skip, first, n1, n2, *secret, **options)
            else:
                owner, starts = _owners(shapes, variant.block, device)
                places = tuple((name, tensor.data_ptr(), tensor.numel(), offset) for name, tensor, offset in parts)
                table = _table(places, starts, device)
                _add_many[(owner.numel(),)](table, owner, *secret, **options)


def _programs(count: int, offset: int, block: int) -> int:
    tiles = -(-(offset + count) // boxmuller.TILE) - offset // boxmuller.TILE
    return -(-tiles * boxmuller.LANES // block)


@functools.lru_cache(maxsize=4)
def _owners(shapes: tuple[tuple[int, int], ...], block: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """For every program its tensor, and for every tensor its first program: the same in every step."""
    counts = torch.tensor([_programs(count, offset, block) for count, offset in shapes])
    owner = torch.repeat_interleave(torch.arange(len(shapes), dtype=torch.int32), counts)
    starts = (torch.cumsum(counts, 0) - counts).tolist()
    return owner.to(device), tuple(starts)


@functools.lru_cache(maxsize=8)
def _table(places: tuple[tuple[str, int, int, int], ...], starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where every tensor lies and which words it takes; the allocator mostly gives the same places step after step."""
    rows = []
    for (name, address, count, offset), start in zip(places, starts, strict=True):
        first, skip = divmod(offset, boxmuller.TILE)
        n1, n2 = tensor_words(name)
        rows.append([address, count, skip, first, signed(n1), signed(n2), start])
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _arguments(pair: Sequence[tuple[bytes, int, float]]) -> list[int | float]:
    arguments: list[int | float] = []
    for key, step, coefficient in pair:
        arguments += [*key_words(key), signed(step), coefficient]
    return arguments if len(pair) == 2 else arguments + [0] * 9 + [0.0]


def key_words(key: bytes) -> list[int]:
    return [signed(int.from_bytes(key[i : i + 4], "little")) for i in range(0, 32, 4)]


def signed(word: int) -> int:
    """32 bits as the int32 that Triton takes for every value, so that no key needs a kernel of its own."""
    return word - 2**32 if word >= 2**31 else word
