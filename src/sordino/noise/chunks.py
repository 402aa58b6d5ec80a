"""The CPU's way over tensors: cut into chunks of tiles that fit a cache, shared out among threads.

Tensors follow one another in whole tiles (see `boxmuller`), each from the first tile that
it touches to the last, so a chunk is a run of tiles: `place` says how many come before it.
No chunk size and no number of threads changes a bit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch

from .boxmuller import LANES, TILE, Scratch
from .cipher import nonce, open_stream, zeros

# Each of the ~60 vector operations on a chunk gives the interpreter's lock away and takes it back: chunks long enough
# that two threads rarely meet there, short enough for the second-level cache.
CHUNK_TILES = 48
MAX_THREADS = 4

_local = threading.local()
_pool: ThreadPoolExecutor | None = None
_pool_guard = threading.Lock()


class Part(NamedTuple):
    """Elements `offset` … `offset + length` of the tensor `name`; `out` is flat, or None if nothing is added to it."""

    out: np.ndarray | None
    name: str
    offset: int
    length: int

    @property
    def first(self) -> int:
        """The first tile of the tensor's stream that it touches."""
        return self.offset // TILE

    @property
    def tiles(self) -> int:
        return -(-(self.offset + self.length) // TILE) - self.first


class Span(NamedTuple):
    """So many tiles of one tensor's stream, from `tile` on."""

    part: Part
    tile: int
    tiles: int

    def window(self) -> tuple[int, int, int]:
        """Elements low … high of the part, and where in the span the first of them lies."""
        origin = self.tile * TILE - self.part.offset  # the part's index of the span's first normal
        low, high = max(0, origin), min(self.part.length, origin + self.tiles * TILE)
        return low, high, low - origin


class Chunk(NamedTuple):
    place: int
    spans: list[Span]


def cut(parts: Sequence[Part], threads: int, largest: int) -> list[Chunk]:
    """Chunks of at most `largest` tiles, equal ones, as many for each thread."""
    tiles = sum(part.tiles for part in parts)
    rounds = -(-tiles // (largest * threads))
    size = -(-tiles // max(1, rounds * threads))
    chunks: list[Chunk] = []
    place = room = 0
    for part in parts:
        first, end = part.first, part.first + part.tiles
        while first < end:
            if room == 0:
                chunks.append(Chunk(place, []))
                room = size
            count = min(room, end - first)
            chunks[-1].spans.append(Span(part, first, count))
            first, room, place = first + count, room - count, place + count
    return chunks


def share(parts: Sequence[Part], work: Callable[[Scratch, Chunk], None], largest: int | None = None) -> None:
    """Call `work` on every chunk; no thread is still at it when this returns or raises."""
    largest = CHUNK_TILES if largest is None else min(largest, CHUNK_TILES)
    tiles = sum(part.tiles for part in parts)
    threads = max(1, min(MAX_THREADS, torch.get_num_threads(), tiles // largest))
    chunks = cut(parts, threads, largest)
    stopped = threading.Event()

    def several(mine: list[Chunk]) -> None:
        scratch = _scratch()
        with np.errstate(all="ignore"):
            for chunk in mine:
                if stopped.is_set():
                    return
                work(scratch, chunk)

    waiting = [_threads().submit(several, chunks[k::threads]) for k in range(1, threads)]
    try:
        several(chunks[::threads])
    except BaseException:
        stopped.set()
        raise
    finally:
        wait(waiting)
    for future in waiting:
        future.result()


def draw(scratch: Scratch, chunk: Chunk, key: bytes, step: int, which: int = 0) -> np.ndarray:
    """The normals of all of the chunk's tiles, in the scratch's output buffer `which`."""
    raw = memoryview(scratch.raw)
    nothing = memoryview(zeros(len(raw)))
    place = 0
    for (_, name, _, _), tile, count in chunk.spans:
        size = count * TILE * 4
        open_stream(key, nonce(step, name), tile * LANES).update_into(nothing[:size], raw[place : place + size])
        place += size
    return scratch.transform(place // (TILE * 4), which)


def _scratch() -> Scratch:
    scratch: Scratch | None = getattr(_local, "scratch", None)
    if scratch is None or scratch.tiles < CHUNK_TILES:
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
