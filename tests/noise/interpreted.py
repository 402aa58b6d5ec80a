"""Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1: prints what the kernel computes."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sordino.noise import triton_kernel as kernel
from sordino.noise.boxmuller import LANES, TILE
from sordino.noise.cipher import keystream, nonce
from sordino.noise.stream import add_many_normals_, add_normals_

KEY, OTHER = bytes(range(7, 39)), bytes(range(200, 232))


@triton.jit
def _words(out, k0, k1, k2, k3, k4, k5, k6, k7, first, n0, n1, n2, UNROLL: tl.constexpr):
    lane = tl.arange(0, 4)
    counter = (first + lane).to(tl.uint32)
    w = kernel._chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2, UNROLL)
    for j in tl.static_range(16):
        tl.store(out + lane * 16 + j, w[j].to(tl.int32, bitcast=True))


def words(key: bytes, counter: int, nonce96: bytes, unroll: bool, device: str = "cpu") -> np.ndarray:
    """Four blocks of the kernel's keystream."""
    out = torch.zeros(64, dtype=torch.int32, device=device)
    k = kernel.key_words(key)
    n = [kernel.signed(int.from_bytes(nonce96[i : i + 4], "little")) for i in range(0, 12, 4)]
    _words[(1,)](out, *k, counter, *n, UNROLL=unroll)
    return out.cpu().numpy().view(np.uint32)


def same_as_cpu(count: int, offset: int, terms: list[Any], variant: kernel.Variant = kernel.DEFAULT) -> bool:
    a = torch.randn(count, generator=torch.Generator().manual_seed(count))
    b = a.clone()
    kernel.add_normals_([("w", a, offset)], terms, variant)
    add_normals_(b, terms, "w", offset)
    return torch.equal(a, b)


def main() -> None:
    vectors = json.load(sys.stdin)
    found: dict[str, Any] = {"vectors": []}
    for key, counter, nonce96 in vectors:
        for unroll in (True, False):
            got = words(bytes.fromhex(key), counter, bytes.fromhex(nonce96), unroll)
            found["vectors"].append(got[:16].tolist())
    n = nonce(2**32 - 1, "w")
    found["keystream"] = bool((words(KEY, 2**31 - 2, n, True) == keystream(KEY, n, 2**31 - 2, 4)).all())

    one, two = [(KEY, 3, 1.5)], [(KEY, 2**32 - 1, 0.7), (OTHER, 1, -0.9)]
    three = [*two, (KEY, 0, 0.1)]
    found["same"] = {
        "one term": same_as_cpu(TILE + 5, 0, one),
        "two terms": same_as_cpu(700, 0, two),
        "three terms": same_as_cpu(130, 0, three),
        "an offset": same_as_cpu(LANES, 2 * TILE - 3, one),
        "the last tile": same_as_cpu(9, 2**36 - 9, one),
        "wider programs": same_as_cpu(2 * TILE + 7, 1000, one, kernel.Variant(block=256)),
        "rounds in a loop": same_as_cpu(40, 0, two, kernel.Variant(unroll=False)),
    }
    sizes = {"a": 3, "b": TILE + 1, "c": 1, "d": 200}
    offsets = {"b": 17}
    for name, terms in (("many, one term", one), ("many, two terms", two)):
        a = {k: torch.ones(size) for k, size in sizes.items()}
        b = {k: torch.ones(size) for k, size in sizes.items()}
        kernel.add_normals_([(k, t, offsets.get(k, 0)) for k, t in a.items()], terms)
        add_many_normals_(b, terms, offsets)
        found["same"][name] = all(torch.equal(a[k], b[k]) for k in sizes)
    guarded = torch.zeros(50)
    kernel.add_normals_([("w", guarded[10:30], 0)], one)
    found["same"]["nothing outside"] = not guarded[:10].any() and not guarded[30:].any() and bool(guarded[10:30].all())

    a, b = torch.zeros(600), torch.zeros(600)
    kernel.add_normals_([("w", a, 0)], one, kernel.Variant(mode=kernel.FUSED))
    add_normals_(b, one, "w")
    found["fused differs by"] = (a - b).abs().max().item()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
