"""Vectors streamed past a device: every order that its streams and events allow gives the same result.

The device is played by queues: what is put on a stream waits, and is carried out in a random order that keeps to the
order of each stream and to the events waited for. A dependency that is missing shows in some order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.noise import streaming
from sordino.noise.boxmuller import TILE
from sordino.noise.chunks import Part
from sordino.noise.streaming import Pipeline


class Operation:
    def __init__(self, run: Callable[[], None], after: list[Operation]) -> None:
        self.run, self.after, self.done = run, after, False


class Device:
    """Streams and events whose work waits until `carry_out`."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.home = Stream(self)
        self.now = self.home

    def carry_out(self, chance: random.Random) -> None:
        left = list(self.operations)
        while left:
            ready = [operation for operation in left if all(before.done for before in operation.after)]
            chosen = chance.choice(ready)
            chosen.run()
            chosen.done = True
            left.remove(chosen)
        self.operations.clear()


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.last = device, []  # type: Device, list[Operation]

    def put(self, run: Callable[[], None]) -> None:
        operation = Operation(run, list(self.last))
        self.last = [operation]
        self.device.operations.append(operation)

    def wait_event(self, event: Event) -> None:
        self.last = [*self.last, *event.after]

    def wait_stream(self, other: Stream) -> None:
        self.last = [*self.last, *other.last]


class Event:
    def __init__(self) -> None:
        self.after: list[Operation] = []

    def record(self, stream: Stream) -> None:
        self.after = list(stream.last)


class Deferred(TorchDispatchMode):
    """Copies go to the stream that is the current one."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.copy_.default:
            return function(*args, **(kwargs or {}))
        to, what = args[0], args[1]
        self.device.now.put(lambda: torch.ops.aten.copy_.default(to, what))
        return to


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    played = Device()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, played.now = played.now, stream
        yield
        played.now = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(played))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: played.home)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(streaming, "LARGEST", 4 * TILE)  # a chunk is a tile
    return played


def pipeline(vectors: Tensor, parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """One that takes the CPU for a GPU."""
    with monkeypatch.context() as m:
        empty = torch.empty
        m.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
        return Pipeline(vectors, parts, torch.device("cuda"))


def life(
    device: Device | None, made: Callable[[Tensor, list[Part]], Any], seed: int, together: int
) -> tuple[Tensor, list[Tensor]]:
    """Six steps: a vector that is read and not written, one that is written and not read, one of both; then `anew`."""
    parts = [Part(None, "a", 100, 3 * TILE), Part(None, "b", 0, 2 * TILE + 5)]
    tiles = sum(part.tiles for part in parts)
    vectors = torch.arange(3 * tiles * TILE, dtype=torch.float32).reshape(3, -1).clone()
    streamed, chance = made(vectors, parts), random.Random(seed)
    sums = []
    for step in range(6):
        flat = {part.name: torch.zeros(part.length) for part in parts}
        sums.append(flat)

        def work(stage: Tensor, parts: list[Part], mine: dict[str, Tensor], step: int = step) -> None:
            def compute() -> None:
                for part in parts:
                    mine[part.name] += stage[0].sum() + stage[2].sum() + part.offset
                new = stage[2] * 0.5 + stage[0] + step
                stage[1].zero_().add_(new, alpha=2.0)
                stage[2].zero_().add_(new)

            if device is None:
                compute()
            else:
                device.home.put(compute)

        scope = contextlib.nullcontext() if device is None else Deferred(device)
        with scope:
            streamed.run(work, flat, (0, 2), (1, 2))
        if device is not None and (step + 1) % together == 0:
            device.carry_out(chance)
    return vectors, [t for flat in sums for t in flat.values()]


def test_every_order_that_streams_and_events_allow_gives_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = life(None, lambda vectors, parts: Pipeline(vectors, parts, torch.device("cpu")), 0, 1)
    assert expected[0].any()
    for seed in range(12):
        found = life(device, lambda vectors, parts: pipeline(vectors, parts, monkeypatch), seed, (1, 2, 6)[seed % 3])
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("missing", ["loaded", "done", "free", "the step before"])
def test_each_dependency_is_needed(device: Device, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """So that the test above would notice."""
    expected = life(None, lambda vectors, parts: Pipeline(vectors, parts, torch.device("cpu")), 0, 1)

    def without(vectors: Tensor, parts: list[Part]) -> Pipeline:
        made = pipeline(vectors, parts, monkeypatch)
        if missing == "the step before":
            monkeypatch.setattr(made.inward, "wait_stream", lambda other: None)
        else:
            for event in getattr(made, missing):
                monkeypatch.setattr(event, "record", lambda stream: None)
        return made

    wrong = 0
    for seed in range(12):
        found = life(device, without, seed, 6)
        same = all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
        wrong += not (same and torch.equal(found[0], expected[0]))
    assert wrong


def test_chunks_cover_every_tile_once_and_know_their_elements() -> None:
    parts = [Part(None, "a", 2047, 5000), Part(None, "b", 3 * TILE, 1), Part(None, "c", 0, 4 * TILE)]
    tiles = sum(part.tiles for part in parts)
    vectors = torch.zeros(2, tiles * TILE)
    flat = {part.name: torch.zeros(part.length) for part in parts}
    for largest in (1, 2, 3, 100):
        streaming.LARGEST, before = largest * 4 * TILE, streaming.LARGEST
        try:
            streamed = Pipeline(vectors, parts, torch.device("cpu"))
        finally:
            streaming.LARGEST = before
        seen: list[tuple[str, int, int]] = []

        def work(stage: Tensor, parts: list[Part], sums: dict[str, Tensor], seen: Any = seen) -> None:
            assert stage.shape[1] == TILE * sum(part.tiles for part in parts)
            for part in parts:
                assert sums[part.name].numel() == part.length
                seen.append((part.name, part.offset, part.length))
                sums[part.name] += 1

        streamed.run(work, flat, (), (0, 1))
        assert all((t == 1).all() for t in flat.values())
        assert sum(length for _, _, length in seen) == sum(part.length for part in parts)
        for t in flat.values():
            t.zero_()
