"""Kernels put off, so that layers of one shape share a launch.

On a GPU the host spends longer on a launch than a small kernel takes. What such a
kernel will fill lies there already and may be handed on; its numbers may be read
after `flush` only. The tensors it reads are kept until then, so no more are put off
than a bound on their size allows: large layers go one by one, as the host has time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

Launch = Callable[[Sequence[Any]], None]
ROOM = 2**24  # numbers kept for kernels to come


class Later:
    def __init__(self) -> None:
        self.waiting: dict[Hashable, tuple[Launch, list[tuple[Tensor, ...]]]] = {}
        self.kept = 0

    def add(self, launch: Launch, layer: tuple[Tensor, ...]) -> None:
        """`launch(layers)` soon, for all layers whose tensors have these shapes and types."""
        kind = (launch, *[(t.shape, t.dtype) for t in layer])
        self.waiting.setdefault(kind, (launch, []))[1].append(layer)
        self.kept += sum([t.numel() for t in layer])
        if self.kept > ROOM:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting, self.kept = self.waiting, {}, 0
        for launch, layers in waiting.values():
            launch(layers)
