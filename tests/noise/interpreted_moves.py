"""Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1: the kernels for kept noise and many terms."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import torch
import triton.language as tl
from tests.noise.doubles import Banded, Buffers
from triton.runtime.interpreter import TensorHandle

from sordino.noise import CorrelatedNoise, Keys, add_many_normals_, correlate, kept, streaming, triton_moves
from sordino.noise.boxmuller import TILE
from sordino.noise.cipher import keystream
from sordino.strategies import make_strategy

KEY, OTHER = bytes(range(7, 39)), bytes(range(200, 232))
SIZES = {"a": 3, "b": TILE + 1}
Sums = dict[str, torch.Tensor]


def quick_chacha(*arguments: Any) -> Any:
    """`_chacha` is held to the CPU's keystream in interpreted.py; here OpenSSL stands for it, far faster."""
    *words, counter, step, n1, n2, _ = arguments
    key, nonce96 = (
        b"".join((int(np.asarray(w.handle.data).item()) & 0xFFFFFFFF).to_bytes(4, "little") for w in some)
        for some in (words, (step, n1, n2))
    )
    blocks = counter.handle.data.astype(np.int64)
    assert (np.diff(blocks) == 1).all()
    drawn = keystream(key, nonce96, int(blocks[0]), len(blocks)).reshape(-1, 16)
    return tuple(tl.core.tensor(TensorHandle(drawn[:, j].copy(), tl.uint32), counter.type) for j in range(16))


class ByKernel(kept.Kept):
    """Kept vectors as on a GPU, on the CPU."""

    stages: int | None = None

    def __init__(self, parts: Any, storage: Any) -> None:
        super().__init__(parts, storage)
        self.on_gpu = True
        if self.stages is not None:
            streaming.STAGES = self.stages
            self.pipeline = streaming.Pipeline(self.vectors, self.parts, torch.device("cpu"))


class InChunks(ByKernel):
    stages = 1  # of one tile


def ones(dtype: torch.dtype, shift: dict[str, int]) -> Sums:
    return {name: torch.ones(size - shift.get(name, 0), dtype=dtype) for name, size in SIZES.items()}


def noises(strategy: Any, kind: type[kept.Kept], dtype: torch.dtype, steps: Any, shift: dict[str, int]) -> list[Sums]:
    correlate.Kept = kind  # type: ignore[misc]
    noise = CorrelatedNoise(Keys.from_seed(0), strategy, storage="device")
    found = []
    for step in steps:
        if step == 4:
            noise.rekey(4)
        sums = ones(dtype, shift)
        noise.add_(sums, step, 1.7, shift)
        found.append(sums)
    return found


def same(strategy: Any, steps: Any, kind: Any = ByKernel, dtype: Any = torch.float32, shift: Any = None) -> bool:
    a, b = (noises(strategy, k, dtype, steps, shift or {}) for k in (kind, kept.Kept))
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


def many_terms(count: int, keys: int = 1, offsets: Any = None) -> bool:
    terms = [((KEY, OTHER)[k % keys], 2**32 - 1 - k, 0.7 - 0.3 * k) for k in range(count)]
    a = {name: torch.ones(size) for name, size in SIZES.items()}
    b = {name: t.clone() for name, t in a.items()}
    triton_moves.add_terms_([(name, t, (offsets or {}).get(name, 0)) for name, t in a.items()], terms)
    add_many_normals_(b, terms, offsets)
    return all(torch.equal(a[name], b[name]) for name in a)


def main() -> None:
    triton_moves._chacha = quick_chacha
    found: dict[str, bool] = {}
    found["one term"] = many_terms(1)
    found["three terms of a shard"] = many_terms(3, 1, {"a": 5, "b": 3 * TILE - 2})
    found["four terms, two keys"] = many_terms(4, 2)
    rows, outputs = Banded((1.0, -0.5, -0.125, -0.1)), Buffers(ring=True, moving=True)
    found["rows"] = same(rows, range(4))
    found["rows, taken up in chunks"] = same(rows, (4, 5), InChunks)
    found["rows, float64"] = same(rows, (2,), dtype=torch.float64)
    found["two rows, a shard"] = same(Banded((1.0, -0.9)), (0, 1), shift={"b": 5})
    found["outputs"] = same(outputs, range(4))
    found["outputs, again and in chunks"] = same(outputs, (0, 1, 1), InChunks)
    found["outputs, taken up, of a shard"] = same(outputs, (2,), shift={"b": 2047})
    found["outputs, float64"] = same(outputs, (1,), dtype=torch.float64)
    found["a ring"] = same(make_strategy("bsr:3", 9), range(3))
    found["float32 and float64"] = mixed()
    print(json.dumps(found))


def mixed() -> bool:
    """Two launches over the same vectors."""
    results = []
    for kind in (ByKernel, kept.Kept):
        correlate.Kept = kind  # type: ignore[misc]
        noise = CorrelatedNoise(Keys.from_seed(0), Buffers(), storage="device")
        for step in range(2):
            sums = {"a": torch.zeros(5), "d": torch.zeros(7, dtype=torch.float64), "b": torch.zeros(6)}
            noise.add_(sums, step, 1.7)
            results.append(sums)
    half = len(results) // 2
    return all(torch.equal(results[k][n], results[k + half][n]) for k, n in itertools.product(range(half), "adb"))


if __name__ == "__main__":
    main()
