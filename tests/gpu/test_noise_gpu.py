"""The compiled kernel on a CUDA device: RFC 8439, the CPU's normals to the bit, large tensors, nothing full-sized."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sordino.noise import R_MAX, CorrelatedNoise, Keys, Stream, add_many_normals_, add_normals_
from sordino.noise.cipher import keystream, nonce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY, OTHER = bytes(range(7, 39)), bytes(range(200, 232))
TERMS = [(KEY, 2**32 - 1, 0.7), (OTHER, 1, -0.9)]


def test_rfc_8439_vectors_and_keystream() -> None:
    from tests.noise.interpreted import words
    from tests.noise.reference import VECTORS
    from tests.noise.reference import words as parse

    for key, counter, nonce96, expected in VECTORS:
        for unroll in (True, False):
            assert words(key, counter, nonce96, unroll, "cuda")[:16].tolist() == parse(expected)
    n = nonce(2**32 - 1, "w")
    assert (words(KEY, 2**31 - 2, n, True, "cuda") == keystream(KEY, n, 2**31 - 2, 4)).all()


@pytest.mark.parametrize("terms", [TERMS[:1], TERMS, [*TERMS, (KEY, 0, 0.1)]], ids=["one", "two", "three"])
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (5000, 777), (3_000_001, 0), (999_983, 2**36 - 999_983)])
def test_the_normals_are_the_cpus_to_the_bit(terms: list, count: int, offset: int) -> None:
    start = torch.randn(count)
    here, there = start.clone(), start.cuda()
    add_normals_(here, terms, "w", offset)
    add_normals_(there, terms, "w", offset)
    assert torch.equal(here, there.cpu()), (here - there.cpu()).abs().max()


def test_every_variant_agrees_to_rounding() -> None:
    from sordino.noise import triton_kernel as kernel

    expected = torch.zeros(1_000_000)
    add_normals_(expected, TERMS, "w", 5)
    for mode in (kernel.EXACT, kernel.FUSED, kernel.APPROX):
        for block, warps in ((128, 2), (128, 4), (512, 8)):
            out = torch.zeros(1_000_000, device="cuda")
            kernel.add_normals_([("w", out, 5)], TERMS, kernel.Variant(block, warps, mode))
            error = (out.cpu() - expected).abs().max().item()
            assert error == 0 if mode == kernel.EXACT else error < 1e-5 * 1.2 * R_MAX, (mode, block, warps, error)


def test_any_split_gives_the_same_bits() -> None:
    whole = Stream(KEY).normals(4, "w", 0, 200_003, "cuda")
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = sorted(rng.integers(0, 200_004, 2).tolist())
        assert torch.equal(Stream(KEY).normals(4, "w", a, b - a, "cuda"), whole[a:b])


def test_many_tensors_in_one_launch_are_the_tensors_one_by_one() -> None:
    sizes = [1, 768, 2048, 2049, 500_000, 17, 3_000_000, 0]
    many = {f"p{i}": torch.randn(n, device="cuda") for i, n in enumerate(sizes)}
    many["channels last"] = torch.randn(8, 4, 6, 5, device="cuda").to(memory_format=torch.channels_last)
    many["double"] = torch.randn(5000, dtype=torch.float64, device="cuda")
    single = {k: v.clone() for k, v in many.items()}
    host = {k: v.cpu() for k, v in many.items()}
    add_many_normals_(many, TERMS, {"p3": 1000})
    add_many_normals_(host, TERMS, {"p3": 1000})
    for name, tensor in single.items():
        add_normals_(tensor, TERMS, name, {"p3": 1000}.get(name, 0))
        assert torch.equal(many[name], tensor), name
        assert torch.equal(many[name].cpu(), host[name]), name


def test_more_than_two_to_the_31_elements() -> None:
    count = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 5 * count:
        pytest.skip("needs 11 GB")
    out = torch.zeros(count, device="cuda")
    add_normals_(out, [(KEY, 3, 1.0)], "w")
    for start in (0, 2**31 - 2048, count - 3000):
        assert torch.equal(out[start : start + 3000].cpu(), Stream(KEY).normals(3, "w", start, 3000))


def test_distribution_and_tails() -> None:
    x = Stream(KEY).normals(9, "tails", 0, 400_000_000, "cuda")
    n = x.numel()
    assert abs(x.double().mean().item()) * math.sqrt(n) < 4.5
    assert abs(x.double().square().mean().item() - 1) * math.sqrt(n / 2) < 4.5
    assert torch.isfinite(x).all()
    for level in (1.0, 3.0, 4.0, 5.0, 5.5):
        expected = n * math.erfc(level / math.sqrt(2))
        assert abs((x.abs() > level).sum().item() - expected) < 4.5 * math.sqrt(expected), level


def test_no_temporary_and_no_more_for_a_replay() -> None:
    out = torch.zeros(50_000_000, device="cuda")
    for terms in (TERMS[:1], TERMS):
        add_normals_(out, terms, "w")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        add_normals_(out, terms, "w")
        assert torch.cuda.max_memory_allocated() - before < 1_000_000


def test_a_correlated_step_is_the_cpus() -> None:
    class Two:
        name, steps = "two", 5

        def terms(self, step: int) -> list[tuple[int, float]]:
            return [(step, 1.0), (step - 1, -0.9)] if step else [(0, 1.0)]

    noise = CorrelatedNoise(Keys.from_seed(0), Two())
    noise.rekey(3)
    for step in range(5):
        here = {"w": torch.ones(100, 77), "b": torch.ones(77)}
        there = {k: v.cuda() for k, v in here.items()}
        noise.add_(here, step, 1.7)
        noise.add_(there, step, 1.7)
        assert all(torch.equal(here[k], there[k].cpu()) for k in here)
