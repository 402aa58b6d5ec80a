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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import SordinoError
from .boxmuller import R_MAX, TILE, Scratch
from .chunks import Chunk, Part, draw, share
from .cipher import BLOCK_WORDS, check_blocks, check_key, check_step, keystream, nonce, tensor_words
from .gpu import has_kernels, has_triton
from .keys import SubKey

#: (key, step, coefficient): adds ``coefficient * normal(key, step, ...)``.
Term = tuple[bytes, int, float]


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
            _add_cpu([Part(drawn, name, int(offset), length)] if length else [], [term], replace=True)
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
    with flattened(outs, offsets) as parts:
        for name, flat in parts.items() if checked else ():
            offset = 0 if offsets is None else int(offsets.get(name, 0))
            if flat.device.type == "cpu":
                on_cpu.append(Part(flat.numpy(), name, offset, flat.numel()))
            elif flat.device.type == "cuda" and flat.dtype == torch.float32 and has_triton():
                on_gpu.setdefault(flat.device, []).append((name, flat, offset))
            else:
                _add_elsewhere(flat, checked, name, offset)
        _add_cpu(on_cpu, checked)
        for group in on_gpu.values():
            _add_on_gpu(group, checked)


@contextmanager
def flattened(outs: Mapping[str, Tensor], offsets: Mapping[str, int] | None = None) -> Iterator[dict[str, Tensor]]:
    """Sums that are known to be fit for noise, as flat tensors: views, or copies that are put back at the end."""
    flat: dict[str, Tensor] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, out in outs.items():
        _check_out(name, out)
        _check_range(0 if offsets is None else offsets.get(name, 0), out.numel())
        if out.numel() == 0:
            continue
        out = out.detach()
        flat[name] = out.view(-1) if out.is_contiguous() else out.reshape(-1)
        if not out.is_contiguous():
            copies.append((out, flat[name]))
    yield flat
    for out, copied in copies:
        out.copy_(copied.view(out.shape))


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
    """With `replace`, what was there is written over instead of added to (at most two terms)."""
    share(parts, lambda scratch, chunk: _add_chunk(scratch, chunk, terms, replace))


def _add_chunk(scratch: Scratch, chunk: Chunk, terms: list[Term], replace: bool) -> None:
    for pair in (terms[k : k + 2] for k in range(0, len(terms), 2)):
        drawn = [draw(scratch, chunk, key, step, which) for which, (key, step, _) in enumerate(pair)]
        place = 0
        for span in chunk.spans:
            out, (low, high, begin) = span.part.out, span.window()
            assert out is not None
            mine = slice(place + begin, place + begin + high - low)
            total = _product(drawn[0][mine], pair[0][2], out.dtype)
            for normals, (_, _, coefficient) in zip(drawn[1:], pair[1:], strict=True):
                total += _product(normals[mine], coefficient, out.dtype)
            if replace:
                out[low:high] = total
            else:
                out[low:high] += total
            place += span.tiles * TILE


def _product(normals: np.ndarray, coefficient: float, dtype: Any) -> np.ndarray:
    if dtype == np.float32:
        if coefficient == 1.0:
            return normals
        return np.multiply(normals, np.array(coefficient, np.float32), out=normals)
    return np.multiply(normals, np.array(coefficient, np.float64), dtype=np.float64)


def _add_on_gpu(group: list[tuple[str, Tensor, int]], terms: list[Term]) -> None:
    if len(terms) > 2 and len({key for key, _, _ in terms}) <= 2 and has_kernels():
        from . import triton_moves

        triton_moves.add_terms_(group, terms)
    else:
        from . import triton_kernel

        triton_kernel.add_normals_(group, terms)


def _add_elsewhere(flat: Tensor, terms: list[Term], name: str, offset: int) -> None:
    """A device without a kernel of ours, or float64 on one with: a chunk at a time."""
    chunk = 1 << 22
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        if part.device.type == "cuda" and has_triton():
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
            _add_cpu([Part(host.numpy(), name, offset + start, host.numel())], terms)
            part.copy_(host)


# -- what may be asked -----------------------------------------------------------------------------------------------


def _check_term(term: Term) -> Term:
    key, step, coefficient = term
    check_key(key)
    check_step(step)
    if isinstance(coefficient, bool) or not math.isfinite(coefficient):
        raise SordinoError(f"a noise coefficient must be a finite number, not {coefficient!r}")
    return SubKey(key), int(step), float(coefficient)


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


__all__ = ["R_MAX", "Stream", "Term", "add_many_normals_", "add_normals_", "check_names"]
