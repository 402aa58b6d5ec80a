"""Kept noise on a CUDA device: the CPU's bits wherever it is kept, large vectors, streams, a whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.noise.doubles import Banded, Buffers
from torch import Tensor, nn

import sordino
from sordino.noise import CorrelatedNoise, Keys, Stream, add_many_normals_, kept, streaming
from sordino.strategies import make_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

T = 9
SHAPES = {"large": (700, 1001), "bias": (30,), "tile": (2048,), "none": (0,), "one": (1,)}
STRATEGIES: dict[str, Any] = {
    "rows": Banded((1.0, -0.5, -0.125, -0.1), scaled=True),
    "two rows": make_strategy("lambda-cgd:0.9", T),
    "bisr:6": make_strategy("bisr:6", T),
    "buffers": Buffers(),
    "moving buffers and a ring": Buffers(ring=True, moving=True),
    "bsr:5": make_strategy("bsr:5", T),
    "band-mf-general:3": make_strategy("band-mf-general:3", T),
}


def noise(strategy: Any, storage: str) -> CorrelatedNoise:
    return CorrelatedNoise(Keys.from_seed(0), strategy, storage=storage)


def one(made: CorrelatedNoise, step: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    sums = {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in SHAPES.items()}
    made.add_(sums, step, 1.7)
    return sums


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def places(strategy: Any) -> list[str]:
    return ["device", "host"] + ([] if strategy.vectors_stored else ["regenerate"])


@pytest.fixture(params=["whole", "in chunks"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's vectors in one piece, and in pieces of a few tiles."""
    if request.param == "in chunks":
        monkeypatch.setattr(streaming, "LARGEST", 7 * 4 * 2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_kept_noise_is_the_cpus_to_the_bit(strategy: Any, dtype: torch.dtype, stages: None) -> None:
    for storage in places(strategy):
        here, there = noise(strategy, storage), noise(strategy, storage)
        for step in (0, 1, 2, 3, 3, 4, 5, 6, 7, 8):
            if step == 5:
                here.rekey(5)
                there.rekey(5)
            assert same(one(here, step, "cpu", dtype), one(there, step, "cuda", dtype)), (storage, step)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_run_taken_up_anywhere_goes_on_with_the_same_bits(strategy: Any, stages: None) -> None:
    for storage in ("device", "host"):
        whole = noise(strategy, storage)
        expected = [one(whole, step, "cuda") for step in range(T)]
        for start in (1, 4, 8):
            made = noise(strategy, storage)
            if start > 1:
                made.catch_up(start, expected[0])
            for step in range(start, T):
                assert same(one(made, step, "cuda"), expected[step])


@pytest.mark.parametrize("count", [3, 4, 16])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_many_terms_are_the_cpus_to_the_bit(count: int, keys: int) -> None:
    terms = [(bytes([k % keys]) * 32, 2**32 - 1 - k, 0.7 - 0.1 * k) for k in range(count)]
    sizes = {"a": 1, "b": 2048, "c": 999_983, "d": 17}
    here = {name: torch.randn(size) for name, size in sizes.items()}
    there = {name: t.cuda() for name, t in here.items()}
    for sums in (here, there):
        add_many_normals_(sums, terms, {"c": 777, "d": 2**36 - 17})
    assert same(here, there)


def test_vectors_with_more_than_two_to_the_31_elements_together() -> None:
    """The last of them, and their last elements."""
    numbers = 150_000_000
    if torch.cuda.mem_get_info()[0] < 20 * 4 * numbers:
        pytest.skip("needs 12 GB")
    made = noise(make_strategy("bsr:16", 18), "device")
    tail = noise(make_strategy("bsr:16", 18), "device")
    start = numbers - numbers % 2048 - 2048
    for step in range(18):
        sums, end = torch.zeros(numbers, device="cuda"), torch.zeros(numbers - start)
        made.add_({"w": sums}, step, 1.0)
        tail.add_({"w": end}, step, 1.0, offsets={"w": start})
        assert torch.equal(sums[start:].cpu(), end)
    assert made.storage is not None and made.storage.bytes > 8 * 2**30


def test_any_stream_may_be_the_current_one(stages: None) -> None:
    """Noise and sums in step with whatever else the caller's stream does, from one step to the next."""
    strategy = make_strategy("bsr:5", T)
    expected = noise(strategy, "host")
    made = noise(strategy, "host")
    stream = torch.cuda.Stream()
    for step in range(T):
        plain = one(expected, step, "cpu")
        with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
            sums = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
            torch.cuda._sleep(10_000_000)
            for t in sums.values():
                t.add_(1.0)
            made.add_(sums, step, 1.7)
            found = {name: t * 2 for name, t in sums.items()}
        stream.synchronize()
        torch.cuda.synchronize()
        assert same(found, {name: t * 2 for name, t in plain.items()})


def test_no_temporary_of_the_models_size() -> None:
    sums = {"w": torch.zeros(50_000_000, device="cuda")}
    for text, storage in (("bisr:8", "regenerate"), ("bsr:4", "device"), ("bsr:4", "host")):
        made = noise(make_strategy(text, T), storage)
        made.add_(sums, 0, 1.0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in range(1, 6):
            made.add_(sums, step, 1.0)
        assert torch.cuda.max_memory_allocated() - before < 1_000_000, text
        made.wipe()


def test_wiped_vectors_are_overwritten_and_freed() -> None:
    for storage in ("device", "host"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        made = noise(make_strategy("bsr:5", T), storage)
        expected = [one(made, step, "cuda") for step in range(4)]
        assert made._kept is not None
        vectors = made._kept.vectors
        assert vectors.is_pinned() == (storage == "host") and vectors.any()
        made.wipe()
        assert not vectors.any()
        del vectors
        assert same(one(made, 3, "cuda"), expected[3])
        made.wipe()
        del expected
        assert torch.cuda.memory_allocated() - before < 2_000_000


def test_auto_takes_the_device_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {"w": torch.zeros(10_000_000, device="cuda")}
    made = noise(make_strategy("bsr:3", T), "auto")
    assert made.prepare(sums).kind == "device"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (159_000_000, 10**11))
    made = noise(make_strategy("bsr:3", T), "auto")
    assert made.prepare(sums).kind == "host"
    made.add_(sums, 0, 1.0)
    assert made._kept is not None and made._kept.vectors.is_pinned()


def test_a_full_device_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(kept.torch, "zeros", full)
    with pytest.raises(sordino.SordinoError, match="more than the device has left; use noise_storage='host'"):
        one_sum = {"w": torch.ones(5, device="cuda")}
        noise(make_strategy("bsr:3", T), "device").add_(one_sum, 0, 1.0)


def test_a_shard_on_the_gpu_is_the_whole_ones() -> None:
    for text in ("bsr:4", "bisr:4"):
        whole, shard = noise(make_strategy(text, T), "host"), noise(make_strategy(text, T), "device")
        for step in range(6):
            all_of_it, part = torch.zeros(100_000), torch.zeros(30_000, device="cuda")
            whole.add_({"w": all_of_it}, step, 1.0)
            shard.add_({"w": part}, step, 1.0, offsets={"w": 12_345})
            assert torch.equal(all_of_it[12_345:42_345], part.cpu())


@pytest.mark.parametrize("text", ["lambda-cgd:0.9", "bisr:5", "bsr:5"])
def test_a_whole_run_has_the_same_weights_wherever_its_noise_lives(text: str) -> None:
    found = []
    for storage in places(make_strategy(text, 20)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2)).cuda()
        inputs = torch.randn(80, 20)
        data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
        private = sordino.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, noise_multiplier=1.0, delta=1e-5, batch_size=16,
            epochs=4, noise=text, noise_storage=storage, sampling="fixed-order", seed=1,
        )  # fmt: skip

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(x), y, reduction="none")

        for batch in private.batches():
            private.backward(losses, batch)
            private.optimizer.step()
        found.append([p.detach().cpu() for p in model.parameters()])
        assert private.noise._kept is None  # the run is over
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_noise_has_the_covariance_of_c_inverse() -> None:
    strategy = make_strategy("bsr:4", T)
    made = noise(strategy, "host")
    rows = []
    for step in range(T):
        sums = {"w": torch.zeros(400_000, device="cuda")}
        made.add_(sums, step, 1.0)
        rows.append(sums["w"].double().cpu())
    found = torch.cov(torch.stack(rows)).numpy()
    expected = strategy.inverse() @ strategy.inverse().T
    assert abs(found - expected).max() < 5 * 2 / 400_000**0.5
    first = Stream(Keys.from_seed(0).subkey("noise")).normals(0, "w", 0, 400_000)
    assert torch.equal(rows[0].float(), first)
