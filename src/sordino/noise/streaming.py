"""Vectors in main memory, streamed past the device that works on them.

The model is cut into chunks of tiles. While the device works on one, the next comes in and
the one before goes out, each on a stream of its own, through two stages in the device's
memory. Only what is read comes in, only what is changed goes out. The last copies of a step
go on while the caller's next work begins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .boxmuller import TILE
from .chunks import Part, cut

STAGES = 1 << 27  # bytes of both stages together
LARGEST = 1 << 24  # bytes of one vector in a stage: enough for the bus's full speed, few enough to overlap
Worker = Callable[[Tensor, list[Part], dict[str, Tensor]], None]


def pinned(*shape: int) -> Tensor:
    """Zeros in page-locked memory, of this size and no larger (torch's own allocator rounds up to a power of two)."""
    found = torch.zeros(shape, dtype=torch.float32, device="cpu")
    size = found.numel() * found.element_size()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size, 0))
    return found


def unpin(tensor: Tensor, device: torch.device, process: int) -> None:
    """Before its memory is given back; a forked child has no part in it."""
    if os.getpid() == process:
        torch.cuda.synchronize(device)  # copies may be under way
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class Pipeline:
    """Two stages for the `vectors`, (m, tiles·TILE) in pinned memory, of these parts."""

    def __init__(self, vectors: Tensor, parts: Sequence[Part], device: torch.device) -> None:
        self.vectors, self.cuda = vectors, device.type == "cuda"
        tiles = max(1, min(STAGES // (8 * TILE * len(vectors)), LARGEST // (4 * TILE), vectors.shape[1] // TILE))
        self.chunks = cut(parts, 1, tiles)
        self.stages = [torch.empty(len(vectors), tiles * TILE, dtype=torch.float32, device=device) for _ in range(2)]
        if self.cuda:
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.inward.wait_stream(torch.cuda.current_stream(device))  # what lay in the stages' memory before
            self.loaded, self.done, self.free = ([torch.cuda.Event() for _ in range(2)] for _ in range(3))

    def run(
        self, work: Worker, flat: Mapping[str, Tensor] | None, comes_in: Iterable[int], goes_out: Iterable[int]
    ) -> None:
        """Call `work` with each chunk's stage, parts and sums."""
        flat, comes_in, goes_out = flat or {}, list(comes_in), list(goes_out)
        if self.cuda:
            here = torch.cuda.current_stream(self.stages[0].device)
            self.inward.wait_stream(self.outward)  # the copies of the step before
        for number, (place, spans) in enumerate(self.chunks):
            k = number % 2
            tiles = sum(span.tiles for span in spans)
            stage = self.stages[k][:, : tiles * TILE]
            home = self.vectors[:, place * TILE : (place + tiles) * TILE]
            parts, sums = [], {}
            for span in spans:
                low, high, _ = span.window()
                parts.append(span.part._replace(offset=span.part.offset + low, length=high - low))
                if span.part.name in flat:
                    sums[span.part.name] = flat[span.part.name][low:high]
            if self.cuda and number > 1:
                self.inward.wait_event(self.free[k])
            with self._on("inward"):
                for i in comes_in:
                    stage[i].copy_(home[i], non_blocking=True)
            if self.cuda:
                self.loaded[k].record(self.inward)
                here.wait_event(self.loaded[k])
            work(stage, parts, sums)
            if self.cuda:
                self.done[k].record(here)
                self.outward.wait_event(self.done[k])
            with self._on("outward"):
                for i in goes_out:
                    home[i].copy_(stage[i], non_blocking=True)
            if self.cuda:
                self.free[k].record(self.outward)

    def wipe(self) -> None:
        """Overwrite the stages, once nothing is under way any more."""
        if self.cuda:
            torch.cuda.synchronize(self.stages[0].device)
        for stage in self.stages:
            stage.zero_()

    def _on(self, stream: str) -> Any:
        return torch.cuda.stream(getattr(self, stream)) if self.cuda else contextlib.nullcontext()
