"""Streams: any split gives the whole, nothing shares randomness, nothing full-sized is held."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.noise import PURPOSES, Keys, Stream, add_many_normals_, add_normals_, check_names, chunks
from sordino.noise import stream as stream_module
from sordino.noise.boxmuller import TILE, Scratch

KEY, OTHER = bytes(range(7, 39)), bytes(range(90, 122))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- splits ----------------------------------------------------------------------------------------------------------


def test_any_split_of_the_words_gives_the_same_words() -> None:
    stream = Stream(KEY)
    whole = stream.words(4, "w", 0, 5000)
    rng = np.random.default_rng(1)
    for _ in range(50):
        start, stop = sorted(rng.integers(0, 5001, 2).tolist())
        assert (stream.words(4, "w", start, stop - start) == whole[start:stop]).all()


def test_any_split_of_a_tensor_gives_the_same_bits() -> None:
    n = 6 * 48 * TILE + 333
    whole = Stream(KEY).normals(4, "w", 0, n)
    rng = np.random.default_rng(2)
    for _ in range(20):
        cuts = [0, *sorted(rng.integers(0, n + 1, 4).tolist()), n]
        out = torch.zeros(n)
        for a, b in itertools.pairwise(cuts):
            add_normals_(out[a:b], [(KEY, 4, 1.0)], "w", a)
        assert torch.equal(out, whole)
    for _ in range(200):
        start = int(rng.integers(0, n - 1))
        length = int(rng.integers(0, min(40, n - start)))
        assert torch.equal(Stream(KEY).normals(4, "w", start, length), whole[start : start + length])


def test_threads_and_chunks_change_no_bit(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1_000_003
    outs = []
    for count, chunk in [(1, 48), (2, 48), (4, 48), (3, 5), (1, 1), (2, 64)]:
        torch.set_num_threads(count)
        monkeypatch.setattr(chunks, "CHUNK_TILES", chunk)
        monkeypatch.setattr(chunks, "_local", threading.local())
        outs.append(torch.ones(n))
        add_normals_(outs[-1], [(KEY, 1, 0.3), (OTHER, 2, -1.7)], "w", 77)
    assert all(torch.equal(outs[0], out) for out in outs)


def test_many_tensors_at_once_are_the_tensors_one_by_one() -> None:
    sizes = [1, 3, 100, 2048, 2049, 50_000, 300_000, 0, 17]
    terms = [(KEY, 6, 1.5), (KEY, 5, -1.2)]
    many = {f"p{i}": torch.randn(size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(sizes)}
    many["double"] = torch.ones(5000, dtype=torch.float64)
    single = {name: t.clone() for name, t in many.items()}
    offsets = {"p3": 1000, "p5": 2047}
    add_many_normals_(many, terms, offsets)
    for name, tensor in single.items():
        add_normals_(tensor, terms, name, offsets.get(name, 0))
    assert all(torch.equal(many[name], single[name]) for name in many)


# -- what is added ---------------------------------------------------------------------------------------------------


def test_the_sum_is_exact_in_float32_two_terms_at_a_time() -> None:
    terms = [(KEY, 3, 0.1), (OTHER, 2, -2.0 / 3), (KEY, 1, 1e-3)]
    start = torch.randn(10_000)
    out = start.clone()
    add_normals_(out, terms, "w", 5)
    n = [Stream(key).normals(step, "w", 5, 10_000).numpy() for key, step, _ in terms]
    c = [np.float32(coefficient) for _, _, coefficient in terms]
    expected = (start.numpy() + (c[0] * n[0] + c[1] * n[1])) + c[2] * n[2]
    assert np.array_equal(out.numpy(), expected)


def test_float64_sums_are_added_to_in_float64() -> None:
    terms = [(KEY, 3, 0.1), (OTHER, 2, -2.0 / 3)]
    out = torch.full((3000,), 1e9, dtype=torch.float64)
    add_normals_(out, terms, "w")
    n = [Stream(key).normals(step, "w", 0, 3000).double().numpy() for key, step, _ in terms]
    assert np.array_equal(out.numpy(), 1e9 + (0.1 * n[0] + (-2.0 / 3) * n[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    plain = torch.zeros(4, 6, 5, 3, dtype=dtype)
    add_normals_(plain, [(KEY, 1, 2.0)], "w")
    last = torch.zeros(4, 6, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
    add_normals_(last, [(KEY, 1, 2.0)], "w")
    assert not last.is_contiguous() and torch.equal(plain, last)
    wide = torch.zeros(4, 6, 5, 8, dtype=dtype)
    add_normals_(wide[..., 2:5], [(KEY, 1, 2.0)], "w")
    assert torch.equal(wide[..., 2:5], plain) and not wide[..., :2].any() and not wide[..., 5:].any()
    scalar = torch.zeros((), dtype=dtype)
    add_normals_(scalar, [(KEY, 1, 2.0)], "w")
    assert scalar == plain.flatten()[0]


def test_a_parameter_that_requires_grad_is_added_to_in_place() -> None:
    p = torch.nn.Parameter(torch.zeros(10))
    add_normals_(p, [(KEY, 1, 1.0)], "w")
    assert torch.equal(p.detach(), Stream(KEY).normals(1, "w", 0, 10)) and p.grad_fn is None


def test_no_terms_or_no_elements_change_nothing() -> None:
    out = torch.ones(5)
    add_normals_(out, [], "w")
    add_normals_(torch.zeros(0, 3), [(KEY, 1, 1.0)], "w")
    add_many_normals_({}, [(KEY, 1, 1.0)])
    assert (out == 1).all()


# -- independence ----------------------------------------------------------------------------------------------------


def _streams_of_a_run() -> dict[tuple[str, int, int, str, int], bytes]:
    keys = Keys.from_seed(3)
    streams = {}
    for purpose, rekeyed in PURPOSES.items():
        for generation in (0, 1, 2) if rekeyed else (0,):
            key = keys.subkey(purpose, generation)
            for step, name, offset in itertools.product((0, 1, 2, 255, 256), ("a", "b", "a.weight"), (0, 2048)):
                streams[purpose, generation, step, name, offset] = Stream(key).words(step, name, offset, 256).tobytes()
    return streams


def test_no_two_purposes_generations_steps_tensors_or_offsets_share_a_stream() -> None:
    streams = _streams_of_a_run()
    seen: dict[bytes, object] = {}
    for place, data in streams.items():
        for i in range(0, len(data), 16):  # any 128 bits that occur twice would be a shared block
            assert seen.setdefault(data[i : i + 16], place) is place
    assert len(seen) == len(streams) * 64


def test_normals_of_different_streams_are_uncorrelated() -> None:
    keys, n = Keys.from_seed(5), 400_000
    noise = Stream(keys.subkey("noise"))
    samples = {
        "one": noise.normals(10, "w", 0, n),
        "next step": noise.normals(11, "w", 0, n),
        "step 2^16 on": noise.normals(10 + 2**16, "w", 0, n),
        "tensor": noise.normals(10, "w.bias", 0, n),
        "offset 1": noise.normals(10, "w", 1, n),
        "offset lane": noise.normals(10, "w", 128, n),
        "offset pair": noise.normals(10, "w", 1024, n),
        "offset tile": noise.normals(10, "w", 2048, n),
        "far offset": noise.normals(10, "w", 2**35, n),
        "generation": Stream(keys.subkey("noise", 1)).normals(10, "w", 0, n),
        "purpose": Stream(keys.subkey("noise-residual")).normals(10, "w", 0, n),
        "run": Stream(Keys.from_seed(6).subkey("noise")).normals(10, "w", 0, n),
    }
    for transform in (lambda x: x, lambda x: x**2, torch.abs, torch.sign):
        table = torch.stack([transform(x.double()) for x in samples.values()])
        table = (table - table.mean(1, keepdim=True)) / table.std(1, keepdim=True)
        correlation = (table @ table.T / n).fill_diagonal_(0)
        assert correlation.abs().max() * math.sqrt(n) < 4.8, correlation


def test_words_are_uniform_bits() -> None:
    words = Stream(KEY).words(0, "bits", 0, 1 << 20)
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 4.5 * 0.5 / math.sqrt(1 << 20)


# -- memory ----------------------------------------------------------------------------------------------------------


def _peak(terms: list[tuple[bytes, int, float]], out: torch.Tensor) -> int:
    add_normals_(out, terms, "w")  # buffers are there from now on
    tracemalloc.start()
    try:
        add_normals_(out, terms, "w")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


PEAK_RSS = """
import resource, sys, torch
from sordino.noise import add_normals_
torch.set_num_threads(1)
key, out = bytes(32), torch.ones(16_000_000)
terms = [(key, 1, 1.0), (key, 0, -0.9)][:int(sys.argv[1])]
add_normals_(out[:1_000_000], terms, "w")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
add_normals_(out, terms, "w")
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_no_temporary_of_the_tensors_size(threads: None) -> None:
    torch.set_num_threads(2)
    out = torch.zeros(8_000_000)  # 32 MB
    # the least of a few: a thread that finds its first work only now takes its buffers now, and keeps them
    both = [(KEY, 1, 1.0), (KEY, 0, -0.9)]
    one, two = (min(_peak(terms, out) for _ in range(4)) for terms in (both[:1], both))
    assert one < 1_000_000 and two < 1_000_000
    assert Scratch(chunks.CHUNK_TILES).nbytes() < 3_000_000  # a thread's buffers, kept


def test_a_replayed_step_needs_no_more_memory_than_a_plain_one() -> None:
    """λCGD's step beside DP-SGD's: the peak of the whole process, in fresh ones."""
    raised = []
    for terms in ("1", "2"):
        command = [sys.executable, "-c", PEAK_RSS, terms]
        raised.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout))
    size = 4 * 16_000_000
    assert max(raised) < size / 8, raised
    assert raised[1] - raised[0] < size / 16, raised


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_noise_can_be_drawn_in_a_forked_child(threads: None) -> None:
    """Loader workers are forked: the parent's threads are not in them."""
    torch.set_num_threads(2)
    expected = Stream(KEY).normals(1, "w", 0, 500_000)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        out = np.zeros(500_000, np.float32)  # torch's own threads do not survive a fork: none of its larger operations
        add_normals_(torch.from_numpy(out), [(KEY, 1, 1.0)], "w")
        same = np.array_equal(out, expected.numpy())
        os.write(write, b"same" if same else b"other")
        os._exit(0)
    ready, _, _ = select.select([read], [], [], 20)
    answer = os.read(read, 10) if ready else b"hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert answer == b"same"


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_names_that_would_share_a_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_names(["a", "b", "a.weight"])
    with pytest.raises(SordinoError, match="'a'"):
        check_names(["a", "b", "a"])
    with pytest.raises(SordinoError, match="must be text"):
        check_names(["a", 3])  # type: ignore[list-item]
    monkeypatch.setattr(stream_module, "tensor_words", lambda name: (0, len(name)))
    with pytest.raises(SordinoError, match="'one' and 'two' would share"):
        check_names(["one", "three", "two"])


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), "torch.bfloat16; sums are kept in float32"),
        (torch.zeros(3, dtype=torch.int64), "torch.int64"),
        (torch.zeros(3, device="meta"), "with storage"),
        (torch.zeros(3).to_sparse(), "dense"),
        (torch.zeros(1).expand(3), "clone it"),
    ],
)
def test_sums_that_cannot_be_noised_are_refused(out: torch.Tensor, says: str) -> None:
    with pytest.raises(SordinoError, match=says) as error:
        add_normals_(out, [(KEY, 0, 1.0)], "layer.weight")
    assert "layer.weight" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("coefficient", [math.nan, math.inf, True])
def test_coefficients_that_are_no_numbers_are_refused(coefficient: float) -> None:
    with pytest.raises(SordinoError, match="coefficient"):
        add_normals_(torch.zeros(3), [(KEY, 0, coefficient)], "w")


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, -2), (0.5, 2), (0, 2.0), (True, 1)])
def test_offsets_and_lengths_that_are_no_counts_are_refused(offset: int, length: int) -> None:
    for draw in (Stream(KEY).words, Stream(KEY).normals):
        with pytest.raises(SordinoError, match="offset|length"):
            draw(0, "w", offset, length)


def test_the_key_does_not_show() -> None:
    assert repr(Stream(KEY)) == "<Stream>"


def test_a_stream_is_not_copied_or_pickled() -> None:
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SordinoError, match="not pickled or copied"):
            copied(Stream(bytes(32)))
