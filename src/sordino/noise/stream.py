"""Seekable secure randomness: pure functions of (key, step, name, offset, length).

Contract: the keystream is the same on every machine and for every split of a
tensor; normals are bit-identical for every split, and on every CPU (see
`boxmuller`). One key serves one purpose: `words` and `normals` of one
(key, step, name) are made of the same bits, so no key may be used for both.

`add_normals_` adds without ever holding the normals of a whole tensor: in chunks
that fit a cache on the CPU, in registers on a GPU.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import SordinoError
from .boxmuller import LANES, R_MAX, TILE, Scratch
from .cipher import (
    BLOCK_WORDS,
    check_blocks,
    check_key,
    check_step,
    keystream,
    nonce,
    open_stream,
    tensor_words,
    zeros,
)

#: (key, step, coefficient): adds ``coefficient * normal(key, step, ...)``.
Term = tuple[bytes, int, float]
Part = tuple[np.ndarray, str, int]  # a flat tensor, its name, the offset of its first element
Span = tuple[Part, int, int]  # of one tensor, tiles from the first on, so many

# Each of the ~60 vector operations on a chunk gives the interpreter's lock away and takes it back: chunks long enough
# that two threads rarely meet there, short enough for the second-level cache. No chunk size changes a bit.
CHUNK_TILES = 48
MAX_THREADS = 4

_local = threading.local()
_pool: ThreadPoolExecutor | None = None
_pool_guard = threading.Lock()


class Stream:
    """The randomness under one sub-key.

    >>> stream = Stream(bytes(32))
    >>> bool((stream.words(3, "batch", 5, 4) == stream.words(3, "batch", 0, 9)[5:]).all())
    True
    >>> bool((stream.normals(3, "weight", 100, 50) == stream.normals(3, "weight", 0, 150)[100:]).all())
    True
    """

    def __init__(self, key: bytes) -> None:
        check_key(key)
        self._key = key

    def __repr__(self) -> str:
        return "<Stream>"

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("a Stream holds its key, so it is not pickled or copied; make it from the key again")

    __copy__ = __deepcopy__ = __reduce_ex__

    def words(self, step: int, name: str, offset: int, length: int) -> np.ndarray:
        """Uniform 32-bit words, in the keystream's own order."""
        _check_range(offset, length)
        first, last = offset // BLOCK_WORDS, -(-(offset + length) // BLOCK_WORDS)
        words = keystream(self._key, nonce(step, name), first, last - first)
        return words[offset - first * BLOCK_WORDS :][:length]

    def normals(self, step: int, name: str, offset: int, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Standard normals, float32. (To add them to something, `add_normals_` does not hold them.)"""
        _check_range(offset, length)
        term = _check_term((self._key, step, 1.0))
        if torch.device(device).type == "cpu":
            drawn = np.empty(length, np.float32)
            _add_cpu([(drawn, name, int(offset))] if length else [], [term], replace=True)
            return torch.from_numpy(drawn)
        out = torch.zeros(length, dtype=torch.float32, device=device)
        add_normals_(out, [term], name, offset)
        return out


def add_normals_(out: Tensor, terms: Sequence[Term], name: str, offset: int = 0) -> None:
    """``out[i] += sum over terms of coefficient * normal(key, step, name, offset + i)``, in place.

    `i` counts the elements of `out` in logical (row-major) order. The normals are float32;
    products and sums are in `out`'s dtype, float32 or float64, two terms at a time:
    ``out += c0 n0 + c1 n1``, then the next two.
    """
    add_many_normals_({name: out}, terms, {name: offset})


def add_many_normals_(
    outs: Mapping[str, Tensor], terms: Sequence[Term], offsets: Mapping[str, int] | None = None
) -> None:
    """`add_normals_` for several tensors by name: small ones share a chunk, or on a GPU a launch."""
    checked = [_check_term(term) for term in terms]
    on_cpu: list[Part] = []
    on_gpu: dict[torch.device, list[tuple[str, Tensor, int]]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, out in outs.items():
        offset = 0 if offsets is None else int(offsets.get(name, 0))
        _check_out(name, out)
        _check_range(offset, out.numel())
        if out.numel() == 0 or not checked:
            continue
        out = out.detach()
        flat = out.view(-1) if out.is_contiguous() else out.reshape(-1)
        if not out.is_contiguous():
            copies.append((out, flat))
        if flat.device.type == "cpu":
            on_cpu.append((flat.numpy(), name, offset))
        elif flat.device.type == "cuda" and flat.dtype == torch.float32 and _has_triton():
            on_gpu.setdefault(flat.device, []).append((name, flat, offset))
        else:
            _add_elsewhere(flat, checked, name, offset)
    _add_cpu(on_cpu, checked)
    for group in on_gpu.values():
        from . import triton_kernel

        triton_kernel.add_normals_(group, checked)
    for out, flat in copies:
        out.copy_(flat.view(out.shape))


def check_names(names: Iterable[str]) -> None:
    """Refuse a run in which two tensors would get the same noise."""
    seen: dict[tuple[int, int], str] = {}
    for name in names:
        if not isinstance(name, str):
            raise SordinoError(f"a tensor's name must be text, not {name!r}")
        words = tensor_words(name)
        if words in seen:
            raise SordinoError(f"{seen[words]!r} and {name!r} would share one noise stream; rename one of them")
        seen[words] = name


# -- the CPU ---------------------------------------------------------------------------------------------------------


def _add_cpu(parts: list[Part], terms: list[Term], replace: bool = False) -> None:
    """Cut all tiles that the tensors touch into chunks, and share the chunks out among threads.

    With `replace`, what was there is written over instead of added to (at most two terms).
    """
    spans = [(part, part[2] // TILE, -(-(part[2] + part[0].size) // TILE)) for part in parts]
    tiles = sum(end - first for _, first, end in spans)
    threads = max(1, min(MAX_THREADS, torch.get_num_threads(), tiles // CHUNK_TILES))
    rounds = -(-tiles // (CHUNK_TILES * threads))
    size = -(-tiles // max(1, rounds * threads))  # equal chunks, as many for each thread
    chunks: list[list[Span]] = []
    room = 0
    for part, first, end in spans:
        while first < end:
            if room == 0:
                chunks.append([])
                room = size
            count = min(room, end - first)
            chunks[-1].append((part, first, count))
            first, room = first + count, room - count

    def work(mine: list[list[Span]]) -> None:
        scratch = _scratch()
        with np.errstate(all="ignore"):
            for chunk in mine:
                _add_chunk(scratch, chunk, terms, replace)

    waiting = [_threads().submit(work, chunks[k::threads]) for k in range(1, threads)]
    work(chunks[::threads])
    for future in waiting:
        future.result()


def _add_chunk(scratch: Scratch, chunk: list[Span], terms: list[Term], replace: bool) -> None:
    raw = memoryview(scratch.raw)
    nothing = memoryview(zeros(len(raw)))
    for pair in (terms[k : k + 2] for k in range(0, len(terms), 2)):
        drawn = []
        for which, (key, step, _) in enumerate(pair):
            place = 0
            for (_, name, _), tile, count in chunk:
                size = count * TILE * 4
                stream = open_stream(key, nonce(step, name), tile * LANES)
                stream.update_into(nothing[:size], raw[place : place + size])
                place += size
            drawn.append(scratch.transform(place // (TILE * 4), which))
        place = 0
        for (out, _, offset), tile, count in chunk:
            origin = tile * TILE - offset  # the index in `out` of the span's first normal
            low, high = max(0, origin), min(out.size, origin + count * TILE)
            mine = slice(place + low - origin, place + high - origin)
            total = _product(drawn[0][mine], pair[0][2], out.dtype)
            for normals, (_, _, coefficient) in zip(drawn[1:], pair[1:], strict=True):
                total += _product(normals[mine], coefficient, out.dtype)
            if replace:
                out[low:high] = total
            else:
                out[low:high] += total
            place += count * TILE


def _product(normals: np.ndarray, coefficient: float, dtype: Any) -> np.ndarray:
    if dtype == np.float32:
        if coefficient == 1.0:
            return normals
        return np.multiply(normals, np.array(coefficient, np.float32), out=normals)
    return np.multiply(normals, np.array(coefficient, np.float64), dtype=np.float64)


def _add_elsewhere(flat: Tensor, terms: list[Term], name: str, offset: int) -> None:
    """A device without a kernel of ours, or float64 on one with: a chunk at a time."""
    chunk = 1 << 22
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        if part.device.type == "cuda" and _has_triton():
            from . import triton_kernel

            for pair in (terms[k : k + 2] for k in range(0, len(terms), 2)):
                total = torch.zeros_like(part)
                for key, step, coefficient in pair:
                    normals = torch.zeros(part.numel(), dtype=torch.float32, device=part.device)
                    triton_kernel.add_normals_([(name, normals, offset + start)], [(key, step, 1.0)])
                    total += normals.to(part.dtype) * coefficient
                part += total
        else:
            host = part.cpu()
            _add_cpu([(host.numpy(), name, offset + start)], terms)
            part.copy_(host)


def _scratch() -> Scratch:
    scratch: Scratch | None = getattr(_local, "scratch", None)
    if scratch is None:
        scratch = _local.scratch = Scratch(CHUNK_TILES)
    return scratch


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_guard:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="sordino-noise")
        return _pool


def _forget_threads() -> None:
    """In a forked child: the parent's threads are not there."""
    global _pool, _pool_guard
    _pool, _pool_guard = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


# -- what may be asked -----------------------------------------------------------------------------------------------


def _check_term(term: Term) -> Term:
    key, step, coefficient = term
    check_key(key)
    check_step(step)
    if isinstance(coefficient, bool) or not math.isfinite(coefficient):
        raise SordinoError(f"a noise coefficient must be a finite number, not {coefficient!r}")
    return bytes(key), int(step), float(coefficient)


def _check_range(offset: int, length: int) -> None:
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)) or offset < 0:
        raise SordinoError(f"offset={offset!r} must be a whole number from 0 on")
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
        raise SordinoError(f"length={length!r} must be a whole number from 0 on")
    check_blocks(0, -(-(int(offset) + int(length)) // BLOCK_WORDS))


def _check_out(name: str, out: Tensor) -> None:
    if out.dtype == torch.float32 and out.is_cuda and out.is_contiguous() and isinstance(name, str):
        return  # the usual case, of which there are hundreds in a step
    if not isinstance(name, str):
        raise SordinoError(f"a tensor's name must be text, not {name!r}")
    if out.dtype not in (torch.float32, torch.float64):
        raise SordinoError(f"noise for {name!r}: the sum is {out.dtype}; sums are kept in float32 or float64")
    if out.layout != torch.strided or out.device.type == "meta":
        raise SordinoError(f"noise for {name!r}: the sum must be a dense tensor with storage, on a CPU or a GPU")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise SordinoError(f"noise for {name!r}: the sum is an expanded tensor whose elements share memory; clone it")


_triton: bool | None = None


def _has_triton() -> bool:
    global _triton
    if _triton is None:
        try:
            import triton  # noqa: F401

            _triton = True
        except ImportError:
            _triton = False
            warnings.warn("triton is not installed: noise for the GPU is drawn on the CPU, slowly", stacklevel=3)
    return _triton


__all__ = ["R_MAX", "Stream", "Term", "add_many_normals_", "add_normals_", "check_names"]
