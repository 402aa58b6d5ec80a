"""Kept vectors: m vectors as large as the model, and the way moves are carried out over them.

Each tensor lies in whole tiles, one after another, in the order of the sums, so that a
chunk of tiles is a chunk of memory. Several moves in one call are done chunk by chunk: a
long replay stays in the cache (or, with vectors on the host, passes the bus once).

Whoever has these vectors can remove noise. They are never saved; `wipe` overwrites them.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import SordinoError
from .boxmuller import TILE, Scratch
from .chunks import CHUNK_TILES, Chunk, Part, share
from .gpu import has_kernels
from .moves import Move, move_on_cpu
from .storage import Storage
from .streaming import Pipeline, pinned, unpin

Tick = Callable[[int], None]  # takes the number of (tile, move) pairs done
CACHED = 1 << 20  # bytes of kept vectors to a chunk that several moves go over


def layout(tensors: Mapping[str, Tensor], offsets: Mapping[str, int] | None = None) -> tuple[Part, ...]:
    """What the kept vectors stand for; tensors without elements have no place."""
    found = (Part(None, name, int((offsets or {}).get(name, 0)), t.numel()) for name, t in tensors.items())
    return tuple(part for part in found if part.length)


class Kept:
    """The vectors of one layout, all zero at first."""

    def __init__(self, parts: Sequence[Part], storage: Storage) -> None:
        self.parts, self.storage = tuple(parts), storage
        self.tiles = sum(part.tiles for part in self.parts)
        self.on_gpu = storage.device.type == "cuda" and has_kernels()
        if storage.device.type == "cuda" and not self.on_gpu:
            warnings.warn("noise kept for a GPU is made on the CPU, slowly: install triton 3.3 or later", stacklevel=5)
        shape = (storage.vectors, self.tiles * TILE)
        self.pipeline: Pipeline | None = None
        if self.on_gpu and storage.kind == "host":
            self.vectors = pinned(*shape)
            self._unpin = weakref.finalize(self, unpin, self.vectors, storage.device, os.getpid())
            self._unpin.atexit = False
            self.pipeline = Pipeline(self.vectors, self.parts, storage.device)
        else:
            self.vectors = torch.zeros(shape, dtype=torch.float32, device=storage.home)

    def run(self, moves: Sequence[Move], flat: Mapping[str, Tensor] | None, anew: bool, tick: Tick | None) -> None:
        """All `moves` in turn; `flat` are the sums, contiguous and flat. With `anew`, the vectors begin at zero."""
        if not self.on_gpu:
            self._run_on_cpu(moves, flat, anew, tick)
        elif self.pipeline is None:
            self._run_on_gpu(self.vectors, self.parts, flat, moves, anew, tick)
        else:
            reads = {i for move in moves for i in move.touched}
            changes = {i for move in moves for i in move.changed}
            self.pipeline.run(
                lambda stage, parts, sums: self._run_on_gpu(stage, parts, sums, moves, anew, tick),
                flat,
                () if anew else sorted(reads),
                range(len(self.vectors)) if anew else sorted(changes),
            )

    @staticmethod
    def _run_on_gpu(
        vectors: Tensor,
        parts: Sequence[Part],
        sums: Mapping[str, Tensor] | None,
        moves: Sequence[Move],
        anew: bool,
        tick: Tick | None,
    ) -> None:
        from .triton_moves import run_move

        if anew:
            vectors.zero_()
        for move in moves:
            run_move(move, parts, sums, vectors)
            if tick is not None:
                tick(vectors.shape[1] // TILE)

    def _run_on_cpu(
        self, moves: Sequence[Move], flat: Mapping[str, Tensor] | None, anew: bool, tick: Tick | None
    ) -> None:
        """On a device without kernels of ours, the sums make a round trip."""
        flat = flat or {}
        here = {name: t if t.device.type == "cpu" else t.cpu() for name, t in flat.items()}
        parts = [p._replace(out=here[p.name].numpy()) if p.name in here else p for p in self.parts]
        kept = self.vectors.numpy()

        def work(scratch: Scratch, chunk: Chunk) -> None:
            tiles = sum(span.tiles for span in chunk.spans)
            mine = kept[:, chunk.place * TILE : (chunk.place + tiles) * TILE]
            if anew:
                mine[...] = np.float32(0)
            for move in moves:
                move_on_cpu(move, scratch, chunk, mine)
                if tick is not None:
                    tick(tiles)

        largest = max(8, CACHED // (4 * TILE * max(1, len(kept)))) if len(moves) > 4 else CHUNK_TILES
        share(parts, work, largest)
        for name, t in flat.items():
            if here[name] is not t:
                t.copy_(here[name])

    def wipe(self) -> None:
        """Overwrite the vectors and let go of them."""
        if self.pipeline is not None:
            self.pipeline.wipe()
        self.vectors.zero_()
        if self.pipeline is not None:
            self._unpin()
        self.vectors, self.pipeline = torch.empty(0), None

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("kept noise is not pickled or copied: it is made anew from the key")

    def drop(self) -> None:
        """In a forked child, let go of what is the parent's. (What CUDA allocated is out of reach there.)"""
        if not self.on_gpu:
            self.vectors = torch.empty(0)
