"""Which place `noise_storage` chooses, and what is said where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sordino.budget import SordinoWarning
from sordino.errors import SordinoError
from sordino.noise import CorrelatedNoise, Keys, correlate, storage
from sordino.noise.boxmuller import TILE
from sordino.noise.storage import choose, size
from sordino.strategies import make_strategy

T = 20
TENSORS = {"w": torch.zeros(3, 1000), "b": torch.zeros(1)}  # three tiles
VECTOR = 3 * TILE * 4  # bytes


class OnGpu:
    """Of a tensor on a GPU, what the choice looks at."""

    device = torch.device("cuda", 0)

    def numel(self) -> int:
        return 3 * TILE


GPU: Any = {"w": OnGpu()}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "has_kernels", lambda: True)


def test_auto_draws_again_where_the_strategy_can() -> None:
    for text, redrawn in (("identity", 0), ("lambda-cgd:0.9", 1), ("bisr:16", 15)):
        for tensors in (TENSORS, GPU):
            found = choose("auto", make_strategy(text, T), tensors)
            assert (found.kind, found.vectors, found.bytes, found.redrawn) == ("regenerate", 0, 0, redrawn)


@pytest.mark.parametrize(("free", "kind"), [(30 * VECTOR, "device"), (30 * VECTOR - 1, "host"), (0, "host")])
def test_auto_takes_the_device_if_half_of_its_free_memory_is_enough(
    monkeypatch: pytest.MonkeyPatch, free: int, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    found = choose("auto", make_strategy("bsr:16", T), GPU)
    assert (found.kind, found.vectors, found.bytes) == (kind, 15, 15 * VECTOR)
    assert found.home == (torch.device("cuda", 0) if kind == "device" else torch.device("cpu"))


def test_on_a_cpu_there_is_one_place() -> None:
    for wanted in ("auto", "device", "host"):
        found = choose(wanted, make_strategy("bsr:3", T), TENSORS)
        assert found.home == torch.device("cpu") and found.bytes == 2 * VECTOR
        assert found.describe() == "2 past vectors kept in memory (49.2 kB)"


def test_without_kernels_for_the_gpu_noise_is_kept_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "has_kernels", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    for wanted in ("auto", "device", "host"):
        assert choose(wanted, make_strategy("bsr:3", T), GPU).kind == "host"


def test_rows_that_could_be_drawn_again_can_be_kept() -> None:
    for wanted in ("device", "host"):
        found = choose(wanted, make_strategy("bisr:3", T), GPU)
        assert (found.kind, found.vectors) == (wanted, 2)
        assert found.describe() == f"2 past vectors kept on the {wanted} (49.2 kB)"


def test_independent_noise_keeps_nothing_wherever() -> None:
    for wanted in storage.NOISE_STORAGE:
        found = choose(wanted, make_strategy("identity", T), GPU)
        assert (found.kind, found.bytes, found.describe()) == ("regenerate", 0, "nothing kept")


def test_what_is_drawn_again_is_said() -> None:
    assert choose("auto", make_strategy("bisr:4", T), GPU).describe() == "3 past rows drawn again at each step"
    assert choose("auto", make_strategy("lambda-cgd:0.9", T), GPU).describe() == "1 past row drawn again at each step"


def test_a_strategy_that_cannot_be_drawn_again_says_so() -> None:
    with pytest.raises(SordinoError, match="noise_storage='regenerate'.*'bsr:4'.*use 'auto', 'device' or 'host'"):
        CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:4", T), storage="regenerate")
    CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:1", T), storage="regenerate")  # C = I


@pytest.mark.parametrize("wanted", ["gpu", "", None, 3])
def test_an_unknown_place_is_refused(wanted: Any) -> None:
    with pytest.raises(SordinoError, match="noise_storage=.* is not known; choose one of: auto, regenerate, device"):
        CorrelatedNoise(Keys.from_seed(0), make_strategy("bisr:4", T), storage=wanted)


def test_more_than_the_machine_has_is_refused_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "main_memory", lambda: 15 * VECTOR - 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10**12))
    for wanted, tensors in (("host", GPU), ("auto", GPU), ("device", TENSORS)):
        with pytest.raises(SordinoError, match=r"'bsr:16' keeps 15 vectors .* 369 kB, more than this machine's 369 kB"):
            choose(wanted, make_strategy("bsr:16", T), tensors)


class Full:
    """Room for kept vectors on the host only."""

    def __init__(self, parts: Any, where: Any) -> None:
        if where.kind in self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.where = where

    full = ("device",)


def test_auto_falls_back_to_the_host_when_the_device_is_full_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlate, "Kept", Full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**12))
    noise = CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:3", T))
    assert noise.prepare(GPU).kind == "device"
    with pytest.warns(SordinoWarning, match="2 past vectors of the noise need 49.2 kB, more than the device has left"):
        assert noise._room(()).where.kind == "host"  # type: ignore[attr-defined]
    assert noise.storage is not None and noise.storage.kind == "host"


@pytest.mark.parametrize(("wanted", "other"), [("device", "host"), ("host", "device")])
def test_a_place_that_was_asked_for_and_is_full_is_an_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str, other: str
) -> None:
    monkeypatch.setattr(correlate, "Kept", Full)
    monkeypatch.setattr(Full, "full", ("device", "host"))
    noise = CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:3", T), storage=wanted)
    noise.prepare(GPU)
    with pytest.raises(SordinoError, match=f"49.2 kB, more than the {wanted} has left; use noise_storage='{other}'"):
        noise._room(())


def test_another_failure_is_not_taken_for_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(correlate, "Kept", broken)
    noise = CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:3", T), storage="device")
    noise.prepare(GPU)
    with pytest.raises(RuntimeError, match="illegal"):
        noise._room(())


def test_sums_on_several_devices_are_refused() -> None:
    noise = CorrelatedNoise(Keys.from_seed(0), make_strategy("bsr:3", T))
    with pytest.raises(SordinoError, match="sums on one device"):
        noise.add_({"a": torch.zeros(3), "b": torch.zeros(3, device="meta")}, 0, 1.0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 kB"), (999, "1.0 kB"), (99_949, "99.9 kB"), (2e6, "2.0 MB"), (1.5e13, "15.0 TB")]
)
def test_sizes_in_words(count: float, text: str) -> None:
    assert size(count) == text
