"""Kept noise: the bits of regenerated noise, of the documented arithmetic, of an undisturbed run, whatever happens."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.errors import SordinoError, StateError, Unsupported
from sordino.noise import CorrelatedNoise, Keys, Stream, chunks, kept
from sordino.noise.boxmuller import TILE
from sordino.noise.memory import generation, same_rows
from sordino.noise.moves import Move, fill
from sordino.strategies import make_strategy

from .doubles import Banded, Buffers

T = 9
SHAPES = {"weight": (30, 150), "bias": (30,), "none": (0,), "head": (3001,)}
ROWS: dict[str, Any] = {
    "two terms": Banded((1.0, -0.9)),
    "three terms, scaled": Banded((1.0, -0.5, -0.125), scaled=True),
    "a term left out": Banded((1.0, 0.0, -0.4, -0.2)),
    "bisr:5": make_strategy("bisr:5", T),
    "lambda-cgd-normalized:0.7": make_strategy("lambda-cgd-normalized:0.7", T),
}
OUTPUTS: dict[str, Any] = {
    "buffers": Buffers(),
    "one buffer": Buffers(decays=(0.8,)),
    "moving coefficients": Buffers(moving=True),
    "a ring and buffers": Buffers(ring=True, moving=True),
    "bsr:2": make_strategy("bsr:2", T),
    "bsr:5": make_strategy("bsr:5", T),
    "band-mf-general:3": make_strategy("band-mf-general:3", T),
}
ALL = ROWS | OUTPUTS


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def zeros(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}


def made(strategy: Any, storage: str = "auto", seed: int = 0) -> CorrelatedNoise:
    return CorrelatedNoise(Keys.from_seed(seed), strategy, storage=storage)


def one(noise: CorrelatedNoise, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    sums = zeros(dtype)
    noise.add_(sums, step, 1.7)
    return sums


def run(noise: CorrelatedNoise, dtype: torch.dtype = torch.float32, steps: int = T) -> list[dict[str, Tensor]]:
    return [one(noise, step, dtype) for step in range(steps)]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def all_same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def row(step: int, name: str, keys: Keys | None = None, generation: int = 0) -> np.ndarray:
    key = (keys or Keys.from_seed(0)).subkey("noise", generation)
    return Stream(key).normals(step, name, 0, math.prod(SHAPES[name])).numpy()


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("strategy", ROWS.values(), ids=ROWS)
def test_kept_rows_give_the_bits_of_regenerated_ones(strategy: Any, dtype: torch.dtype) -> None:
    expected = run(made(strategy, "regenerate"), dtype)
    for storage in ("device", "host", "auto"):
        assert all_same(run(made(strategy, storage), dtype), expected)


@pytest.mark.parametrize("strategy", OUTPUTS.values(), ids=OUTPUTS)
def test_the_device_and_the_host_give_the_same_bits(strategy: Any) -> None:
    assert all_same(run(made(strategy, "host")), run(made(strategy, "device")))


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
def test_every_row_is_the_dense_product(strategy: Any) -> None:
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-5)):
        found = run(made(strategy, "device"), dtype)
        for name in ("weight", "head"):
            z = np.stack([row(t, name) for t in range(T)]).astype(np.float64)
            expected = 1 + 1.7 * strategy.inverse() @ z
            got = np.stack([sums[name].double().numpy().ravel() for sums in found])
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("strategy", OUTPUTS.values(), ids=OUTPUTS)
def test_a_recurrence_is_computed_as_documented(strategy: Any, dtype: Any) -> None:
    """Scalar by scalar: float32, reads in order, nothing fused; only the last product and sum in the sum's dtype."""
    found = run(made(strategy, "device"), torch.float32 if dtype is np.float32 else torch.float64)
    f = np.float32
    with np.errstate(under="ignore"):
        for place in (0, 29):
            v = [f(0)] * strategy.vectors_stored
            for t in range(T):
                r = strategy.recurrence(t)
                x = f(row(t, "bias")[place]) * f(r.fresh)
                for i, read in enumerate(r.read):
                    if read:
                        x = f(x + f(f(read) * v[i]))
                for i, (keep, put) in enumerate(zip(r.keep, r.put, strict=True)):
                    if (keep, put) != (1.0, 0.0):
                        v[i] = f(f(put) * x) if keep == 0 else f(f(f(keep) * v[i]) + f(f(put) * x))
                expected = dtype(1) + dtype(1.7) * dtype(x)
                assert found[t]["bias"].numpy()[place] == expected and expected != 1


def test_threads_and_chunks_change_no_bit(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 3, "b": 150_001, "c": TILE, "d": 1}
    for strategy in (make_strategy("bisr:4", 6), make_strategy("bsr:4", 6), Buffers(steps=6)):
        found = []
        for count, chunk in [(1, 48), (2, 5), (3, 7), (1, 1)]:
            torch.set_num_threads(count)
            monkeypatch.setattr(chunks, "CHUNK_TILES", chunk)
            monkeypatch.setattr(chunks, "_local", threading.local())
            noise = made(strategy, "host")
            found.append([])
            for step in (0, 1, 2, 5) if strategy.vectors_stored == 0 else range(6):
                sums = {name: torch.zeros(size) for name, size in sizes.items()}
                noise.add_(sums, step, 0.3)
                found[-1].append(sums)
        assert all(all_same(found[0], other) for other in found)


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
def test_any_shard_of_the_tensors_gets_its_own_part(strategy: Any) -> None:
    whole = run(made(strategy))
    cuts = {"weight": [0, 1, 2047, 2049, 4500], "head": [0, 1700, 3001], "bias": [0, 30]}
    for k in range(4):
        noise = made(strategy, "device")
        begin = {name: at[min(k, len(at) - 2)] for name, at in cuts.items()}
        end = {name: at[min(k, len(at) - 2) + 1] for name, at in cuts.items()}
        for step in range(T):
            sums = {name: torch.ones(end[name] - begin[name]) for name in cuts}
            noise.add_(sums, step, 1.7, offsets=begin)
            for name in cuts:
                assert torch.equal(sums[name], whole[step][name].reshape(-1)[begin[name] : end[name]])


@pytest.mark.parametrize("strategy", [ROWS["bisr:5"], OUTPUTS["bsr:5"]], ids=["bisr", "bsr"])
def test_sums_in_another_order_in_memory_get_the_same_noise(strategy: Any) -> None:
    plain, strided = made(strategy, "device"), made(strategy, "device")
    for step in range(T):
        a = {"w": torch.zeros(40, 70), "d": torch.zeros(8, 4, 6, 5, dtype=torch.float64)}
        b = {"w": torch.zeros(70, 40).t(), "d": a["d"].clone().to(memory_format=torch.channels_last)}
        plain.add_(a, step, 1.0)
        strided.add_(b, step, 1.0)
        assert same(a, b) and a["w"].any()


def test_kept_vectors_are_float32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        noise = made(OUTPUTS["bsr:5"], "host")
        found = [one(noise, step) for step in range(3)]
        assert noise._kept is not None and noise._kept.vectors.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert all_same(found, run(made(OUTPUTS["bsr:5"]), steps=3))


def test_sums_of_float32_and_float64_together() -> None:
    for strategy in (ROWS["bisr:5"], OUTPUTS["buffers"]):
        single, double = run(made(strategy, "host")), run(made(strategy, "host"), torch.float64)
        noise = made(strategy, "host")
        for step in range(T):
            sums = {name: t.double() if name == "head" else t for name, t in zeros().items()}
            noise.add_(sums, step, 1.7)
            assert all(torch.equal(t, (double if name == "head" else single)[step][name]) for name, t in sums.items())


# -- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
@pytest.mark.parametrize("start", [1, 2, 6])
def test_a_run_taken_up_anywhere_goes_on_with_the_same_bits(strategy: Any, start: int) -> None:
    expected = run(made(strategy))
    for catch_up in (False, True):
        noise = made(strategy, "device")
        if catch_up:
            noise.catch_up(start, zeros())
        assert all_same([one(noise, step) for step in range(start, T)], expected[start:])


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
def test_a_step_asked_for_again_is_the_same(strategy: Any) -> None:
    expected = run(made(strategy))
    noise = made(strategy, "host")
    for step in (0, 0, 1, 2, 2, 2, 3, 4, 5, 5, 6):
        assert same(one(noise, step), expected[step]), step


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_failed_half_way_is_the_same_when_tried_again(
    strategy: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    """Whichever chunk it is that fails, and on whichever thread."""
    expected = run(made(strategy))
    monkeypatch.setattr(chunks, "CHUNK_TILES", 1)
    torch.set_num_threads(2)
    real, left, lock = kept.move_on_cpu, [math.inf], threading.Lock()

    def failing(*arguments: Any) -> None:
        with lock:
            left[0] -= 1
        if left[0] < 0:
            raise error
        real(*arguments)

    monkeypatch.setattr(kept, "move_on_cpu", failing)
    noise = made(strategy, "device")
    for step in range(T):
        for allowed in (0, 1, 3):
            left[0] = allowed
            with pytest.raises(error):
                one(noise, step)
        left[0] = math.inf
        assert same(one(noise, step), expected[step]), step


@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
def test_fresh_generations_in_the_middle(strategy: Any, storage: str) -> None:
    """A step redone with fresh noise, and rows re-keyed behind the noise's back: against the dense product."""
    keys = Keys.from_seed(0)
    noise = CorrelatedNoise(keys, strategy, storage=storage)
    inverse = strategy.inverse()
    for step, rekeyed in [
        (0, None),
        (1, None),
        (2, None),
        (2, 2),
        (3, None),
        (4, 1),
        (4, 4),
        (4, 4),
        (5, 7),
        (6, None),
    ]:
        if rekeyed is not None:
            noise.rekey(rekeyed)
        found = one(noise, step, torch.float64)["head"].numpy()
        z = np.stack([row(t, "head", keys, noise.generation(t)) for t in range(step + 1)])
        np.testing.assert_allclose(found, 1 + 1.7 * inverse[step, : step + 1] @ z, rtol=0, atol=1e-5)
        again = CorrelatedNoise(keys, strategy)
        again.first_steps = list(noise.first_steps)
        assert torch.equal(one(again, step, torch.float64)["head"], torch.from_numpy(found))


@pytest.mark.parametrize("strategy", [ROWS["bisr:5"], OUTPUTS["bsr:5"]], ids=["bisr", "bsr"])
def test_other_tensors_than_before_are_no_trouble(strategy: Any) -> None:
    """A step that failed may have been asked for a part of the sums only."""
    expected = run(made(strategy))
    noise = made(strategy, "device")
    for step in range(T):
        part = {"bias": torch.ones(30)}
        noise.add_(part, step, 1.7)
        assert torch.equal(part["bias"], expected[step]["bias"])
        assert same(one(noise, step), expected[step])


def test_steps_out_of_order_are_refused_where_they_would_cost_a_replay() -> None:
    noise = made(OUTPUTS["bsr:5"])
    for step in (0, 1, 2):
        one(noise, step)
    for step in (0, 1, 4, 8):
        with pytest.raises(StateError, match=f"step {step} was asked for after step 2"):
            one(noise, step)
    assert same(one(noise, 3), run(made(OUTPUTS["bsr:5"]))[3])
    free = made(ROWS["bisr:5"], "device")  # nothing but a few rows to be drawn
    expected = run(made(ROWS["bisr:5"]))
    assert all(same(one(free, step), expected[step]) for step in (3, 0, 7, 6, 8, 1))


def test_a_step_past_the_plan_is_refused() -> None:
    noise = made(OUTPUTS["buffers"])
    with pytest.raises(StateError, match=f"step={T}: the noise was planned for {T} steps"):
        one(noise, T)


def test_rows_that_a_strategy_did_not_announce_are_refused() -> None:
    class Liar(Banded):
        vectors_regenerated = 1  # type: ignore[assignment]

    with pytest.raises(Unsupported, match="other rows at step 2 than the last 1"):
        run(made(Liar((1.0, -0.5, -0.2)), "device"))


def test_only_what_is_missing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a step while all goes well, what was overwritten after a retry, everything after a resume."""
    rows: list[int] = []
    real = kept.move_on_cpu
    monkeypatch.setattr(kept, "move_on_cpu", lambda move, *rest: (rows.append(move.row), real(move, *rest))[1])

    def drawn(noise: CorrelatedNoise, step: int) -> list[int]:
        rows.clear()
        noise.add_({"w": torch.zeros(5)}, step, 1.0)
        return list(rows)

    strategy = make_strategy("bisr:4", T)
    noise = made(strategy, "device")
    assert [drawn(noise, t) for t in range(6)] == [[t] for t in range(6)]
    assert drawn(noise, 5) == [2, 5] and drawn(noise, 6) == [6]
    assert drawn(made(strategy, "device"), 6) == [5, 4, 3, 6]
    strategy = make_strategy("bsr:4", T)
    noise = made(strategy, "device")
    assert [drawn(noise, t) for t in range(4)] == [[t] for t in range(4)]
    assert drawn(noise, 3) == [0, 1, 2, 3] and drawn(noise, 4) == [4]


def test_which_generations_draw_rows_alike() -> None:
    """Against the definition, for all short lists of generations."""
    lists = [[0, *rest] for n in range(3) for rest in itertools.product(range(4), repeat=n)]
    for a, b in itertools.product(lists, lists):
        for before in range(5):
            expected = all(generation(a, j) == generation(b, j) for j in range(before))
            assert same_rows(a, b, before) == expected, (a, b, before)
    assert not same_rows((), [0], 0)


# -- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [ROWS["bisr:5"], OUTPUTS["bsr:5"]], ids=["bisr", "bsr"])
def test_wiped_vectors_are_overwritten_and_can_be_made_again(strategy: Any) -> None:
    expected = run(made(strategy))
    noise = made(strategy, "device")
    for step in range(5):
        one(noise, step)
    assert noise._kept is not None
    vectors = noise._kept.vectors
    assert vectors.any()
    noise.wipe()
    assert not vectors.any() and noise._kept is None
    assert same(one(noise, 5), expected[5])
    noise.wipe()
    noise.wipe()


def test_noise_is_not_copied_or_pickled() -> None:
    noise = made(OUTPUTS["bsr:5"])
    one(noise, 0)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SordinoError, match="not pickled or copied"):
            copied(noise)


def test_a_move_does_not_show_its_key() -> None:
    key = bytes(range(100, 132))
    for move in (fill(key, 3, 0), Move(key, 1, 1.0)):
        assert "row=" in repr(move) and "key" not in repr(move) and repr(key)[2:-1] not in repr(move)


def test_what_is_saved_says_nothing_of_the_noise() -> None:
    noise = made(OUTPUTS["bsr:5"])
    before = noise.state_dict()
    run(noise, steps=3)
    assert noise.state_dict() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_no_kept_noise_and_makes_none() -> None:
    noise = made(OUTPUTS["bsr:5"])
    run(noise, steps=3)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"kept" if noise._kept is not None else b""
        try:
            one(noise, 3)
            said += b"made"
        except StateError as error:
            said += str(error).encode()
        os.write(write, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).startswith(b"kept noise stays in the process that made it")
    os.close(read)
    os.close(write)
    assert same(one(noise, 3), run(made(OUTPUTS["bsr:5"]))[3])


def test_without_a_scale_nothing_is_kept_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(kept, "move_on_cpu", never)
    noise = made(OUTPUTS["bsr:5"])
    sums = zeros()
    noise.add_(sums, 0, 0.0)
    assert noise._kept is None and same(sums, zeros())


def test_a_destroyed_key_adds_no_noise_silently() -> None:
    for strategy in (ROWS["bisr:5"], OUTPUTS["bsr:5"]):
        keys = Keys.fresh()
        noise = CorrelatedNoise(keys, strategy, storage="device")
        one(noise, 0)
        keys.destroy()
        with pytest.raises(StateError, match="destroyed"):
            one(noise, 1)


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_long_replay_goes_over_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a replay are done chunk by chunk, so that the kept vectors stay in the cache."""
    visits: list[tuple[int, int]] = []
    real = kept.move_on_cpu

    def seen(move: Move, scratch: Any, chunk: Any, vectors: np.ndarray) -> None:
        visits.append((chunk.place, move.row))
        assert vectors.nbytes <= 2 * kept.CACHED
        real(move, scratch, chunk, vectors)

    monkeypatch.setattr(kept, "move_on_cpu", seen)
    noise = made(make_strategy("bsr:5", 40))
    noise.catch_up(20, {"w": torch.zeros(200 * TILE)})
    places = sorted({place for place, _ in visits})
    assert len(places) > 4 and visits == [(place, t) for place in places for t in range(20)]


def test_a_bar_is_shown_for_what_takes_long_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.noise import progress

    shown: list[int] = []
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress.Bar, "_show", lambda self: shown.append(self.done))
    with progress.Bar("replaying", 10) as bar:
        bar.tick(1)
        clock[0] = 1.9
        bar.tick(1)
        assert not shown
        clock[0] = 2.1
        bar.tick(1)
    assert shown == [3]


def test_a_bar_inside_another_and_off_a_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from rich.progress import Progress

    from sordino.noise import progress

    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        with Progress(disable=not terminal), progress.Bar("replaying", 10) as bar:
            bar.tick(5)
            bar.tick(5)
        assert bar.done == 10


def test_a_thread_that_fails_stops_the_others(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """When an error reaches the caller, nobody writes into the vectors any more."""
    torch.set_num_threads(2)
    monkeypatch.setattr(chunks, "CHUNK_TILES", 1)
    running, peak = [0], []

    def work(scratch: Any, chunk: Any) -> None:
        running[0] += 1
        try:
            if chunk.place == 0:
                raise KeyboardInterrupt
            threading.Event().wait(0.01)
        finally:
            running[0] -= 1
        peak.append(chunk.place)

    with pytest.raises(KeyboardInterrupt):
        chunks.share([chunks.Part(None, "w", 0, 100 * TILE)], work)
    assert running == [0] and len(peak) < 50
    done = len(peak)
    threading.Event().wait(0.05)
    assert len(peak) == done
