"""The checksum of a clipped sum: every bit counts, every place counts, the key counts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sordino import checksum as room
from sordino.checksum import ROW, Checksum, fold

KEY = bytes(range(32))


@pytest.fixture(params=["cpu", "folded", pytest.param("cuda", marks=pytest.mark.gpu)])
def value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The checksum as the CPU takes it, and as a GPU does (its arithmetic also runs here)."""
    if request.param == "folded":

        def folded(self: Checksum, flat: list[Tensor]) -> bytes:
            return fold(flat, self._table(torch.device("cpu"))).numpy().tobytes()

        monkeypatch.setattr(Checksum, "_hash", folded)
    device = "cuda" if request.param == "cuda" else "cpu"

    def take(sums: dict[str, Tensor], step: int = 3, scale: float = 0.5, key: bytes = KEY) -> str:
        return Checksum(key)(step, scale, {name: t.to(device) for name, t in sums.items()})

    return take


def base() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(7, 9, generator=generator),
        "b": torch.randn(3 * ROW + 5, generator=generator),
        "c": torch.randn(4, 4, generator=generator, dtype=torch.float64),
        "d": torch.zeros(0),
    }


def accidents() -> list[tuple[str, dict[str, Tensor]]]:
    """What could go wrong by accident, each a different sum."""
    found = []

    def add(name: str, **changed: Tensor) -> None:
        found.append((name, {**base(), **changed}))

    b = base()["b"]
    for i in (0, 1, ROW - 1, ROW, 3 * ROW + 4):
        flipped = b.clone()
        flipped.view(torch.int32)[i] ^= 1
        add(f"lowest bit of {i}", b=flipped)
        signed = b.clone()
        signed[i] = -signed[i]
        add(f"sign of {i}", b=signed)
    add("all signs", b=-b)
    add("all signs of a", a=-base()["a"])
    add("two signs", b=torch.cat([-b[:2], b[2:]]))
    for i, j in ((0, 1), (0, ROW), (5, 2 * ROW + 5)):
        order = list(range(len(b)))
        order[i], order[j] = j, i
        add(f"{i} and {j} exchanged", b=b[order])
    add("reversed", b=b.flip(0))
    add("rolled", b=b.roll(1))
    add("rolled by a row", b=b.roll(ROW))
    add("rows exchanged", b=torch.cat([b[ROW : 2 * ROW], b[:ROW], b[2 * ROW :]]))
    add("doubled", b=2 * b)
    add("transposed", a=base()["a"].T.contiguous())
    add("reshaped", a=base()["a"].reshape(9, 7))
    add("halves", c=base()["c"].roll(1))
    add("zero", b=torch.zeros_like(b))
    add("minus zero", b=-torch.zeros_like(b))
    add("fewer zeros", b=torch.zeros(len(b) - 1))
    add("more zeros", b=torch.zeros(len(b) + 1))
    add("an empty one", d=torch.zeros(0, 2))
    add("float64", a=base()["a"].double())
    swapped = base()
    swapped["a"], swapped["x"] = swapped["b"], swapped.pop("a")
    found.append(("names exchanged", swapped))
    fewer = base()
    del fewer["d"]
    found.append(("one fewer", fewer))
    moved = base()
    moved["a"], moved["b"] = torch.cat([moved["a"].reshape(-1), b[:1]]), b[1:]
    found.append(("an element moved to the tensor before", moved))
    return found


def test_no_accident_is_missed(value: Callable[..., str]) -> None:
    values = {"base": value(base()), **{name: value(sums) for name, sums in accidents()}}
    same = [(a, b) for a, b in itertools.combinations(values, 2) if values[a] == values[b]]
    assert not same


def test_the_same_sum_has_the_same_value(value: Callable[..., str]) -> None:
    sums = base()
    assert value(sums) == value(dict(reversed(sums.items()))) == value({n: t.clone() for n, t in sums.items()})
    assert len(value(sums)) == 16


def test_step_scale_and_key_are_part_of_it(value: Callable[..., str]) -> None:
    sums = base()
    values = [value(sums), value(sums, step=4), value(sums, scale=0.25), value(sums, key=KEY[::-1])]
    assert len(set(values)) == 4


def test_a_sum_on_another_kind_of_device_is_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normals agree between kinds of device to rounding only, so equal sums would not give equal releases."""
    take = Checksum(KEY)
    before = take(0, 1.0, {"a": torch.zeros(2)})
    described = room._described
    assert '"cpu"' in described(("a",), (((2,), torch.float32, "cpu"),))
    monkeypatch.setattr(room, "_described", lambda names, shapes: described(names, shapes).replace("cpu", "cuda"))
    assert take(0, 1.0, {"a": torch.zeros(2)}) != before


def exactly(words: Tensor, table: Tensor) -> list[list[int]]:
    """The fold in integers without end."""
    found = []
    for row in words.contiguous().view(torch.int32).reshape(-1).split(ROW):
        sums = [sum(w * m for w, m in zip(row.tolist(), numbers.tolist(), strict=False)) for numbers in table]
        found.append([(total + 2**63) % 2**64 - 2**63 for total in sums])
    return found


def test_the_fold_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Checksum(KEY)._table(torch.device("cpu"))
    tensors = [torch.randn(n) for n in (5 * ROW + 3, 1, 2 * ROW, 17)] + [torch.randn(ROW + 1).double(), torch.zeros(0)]
    expected = [pair for t in tensors if len(t) for pair in exactly(t, table)]
    assert fold(tensors, table).tolist() == expected
    monkeypatch.setattr(room, "GROUP", 2 * ROW)
    assert fold(tensors, table).tolist() == expected


def test_the_kernel_is_the_fold() -> None:
    """In Triton's interpreter, in a process of its own: it is chosen when triton is imported."""
    pytest.importorskip("triton")
    code = """
import torch
from sordino.checksum import ROW, Checksum, fold
from sordino.checksum_kernel import fold as kernel
table = Checksum(bytes(32))._table(torch.device("cpu"))
tensors = [torch.randn(n) for n in (9 * ROW + 3, 1, 4 * ROW, 17)] + [torch.randn(ROW + 1).double()]
assert torch.equal(kernel(tensors, table), fold(tensors, table))
print("the same")
"""
    path = os.pathsep.join([str(Path(room.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "the same", done.stderr


@pytest.mark.gpu
def test_the_kernel_is_the_fold_on_a_gpu() -> None:
    table = Checksum(KEY)._table(torch.device("cuda"))
    tensors = [torch.randn(n, device="cuda") for n in (3_000_001, 1, 4 * ROW, 17, 768)]
    tensors.append(torch.randn(ROW + 1, device="cuda", dtype=torch.float64))
    assert torch.equal(fold(tensors, table).cpu(), fold([t.cpu() for t in tensors], table.cpu()))


def test_views_that_are_not_contiguous() -> None:
    x = torch.randn(6, 8)
    assert Checksum(KEY)(0, 1.0, {"x": x.T}) == Checksum(KEY)(0, 1.0, {"x": x.T.contiguous()})


def test_values_look_random() -> None:
    """No bit of the 64 is stuck, and zeros give no pattern."""
    take = Checksum(KEY)
    values = [int(take(step, 1.0, {"x": torch.zeros(5)}), 16) for step in range(400)]
    assert len(set(values)) == 400
    for bit in range(64):
        assert 130 < sum(v >> bit & 1 for v in values) < 270


def test_it_is_fast_enough_to_take_at_every_step() -> None:
    """10M parameters: a few milliseconds where AES is in the processor; well under what drawing the noise takes."""
    sums, take, times = {"x": torch.randn(10_000_000)}, Checksum(KEY), []
    for _ in range(5):
        start = time.perf_counter()
        take(0, 1.0, sums)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


@pytest.mark.gpu
def test_memory_and_time_on_a_gpu() -> None:
    sums = {
        f"{i}": torch.randn(n, device="cuda") for i, n in enumerate([60_000_000, 30_000_000, *[768] * 100, 2_000_000])
    }
    take = Checksum(KEY)
    take(0, 1.0, sums)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(10):
        start = time.perf_counter()
        take(0, 1.0, sums)
        times.append(time.perf_counter() - start)
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    print(f"{1e3 * sorted(times)[5]:.2f} ms for 92M parameters")
    assert min(times) < 0.002
