"""Each normal is the one its words stand for; the tails reach as far as 40 bits do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sordino.noise import R_MAX, Stream, add_normals_
from sordino.noise.boxmuller import LANES, TILE, Scratch
from sordino.noise.cipher import nonce

from .reference import normal, normal_at

KEY = bytes(range(50, 82))


def transform(a: list[int], b: list[int]) -> np.ndarray:
    """Pairs of words through the library's transform: rows (cosine, sine)."""
    scratch = Scratch(1)
    grid = np.frombuffer(scratch.raw, dtype="<u4").reshape(LANES, 16)
    out = np.empty((2, len(a)), np.float32)
    for start in range(0, len(a), LANES):
        part = slice(start, min(start + LANES, len(a)))
        count = part.stop - part.start
        grid[:count, 3], grid[:count, 11] = a[part], b[part]
        tile = scratch.transform(1).reshape(16, LANES)
        out[:, part] = tile[3, :count], tile[11, :count]
    return out


def test_the_largest_radius_is_reached_and_is_r_max() -> None:
    assert math.isclose(R_MAX, 7.539, abs_tol=5e-4)
    # k = 0; the angle nearest to 0, and the one nearest to pi/2
    x, y = transform([0, 0], [0, 0x7FFFFE00])
    assert math.isclose(x[0], R_MAX, rel_tol=3e-7)
    assert math.isclose(y[1], R_MAX, rel_tol=3e-7)
    x, y = transform([0, 0], [0x100, 0x80000000])  # the other sign of r; the other end of phi
    assert math.isclose(x[0], -R_MAX, rel_tol=3e-7)
    assert math.isclose(y[1], -R_MAX, rel_tol=3e-7)


def test_both_ends_of_the_radius_keep_forty_bits() -> None:
    """Neither a NaN nor a zero where u rounds to 1, and distinct radii for neighbouring k."""
    top = [transform([2**32 - 1], [low])[0, 0] for low in range(256)]
    assert np.isfinite(top).all() and min(top) > 0 and len(set(top)) == 256
    assert math.isclose(min(top), math.sqrt(2**-40), rel_tol=1e-6)
    bottom = [transform([0], [low])[0, 0] for low in range(256)]
    assert len(set(bottom)) == 256 and bottom == sorted(bottom, reverse=True)


def test_every_normal_is_what_its_words_say() -> None:
    rng = np.random.default_rng(0)
    ends = [0, 1, 2, 255, 2**24 - 1, 2**24, 2**31 - 129, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 129, 2**32 - 1]
    ends += [round(2**32 * math.sqrt(0.5)) + d for d in range(-3, 4)]
    ends += [round(2**32 * math.sqrt(0.5) / 2**e) + d for e in range(1, 30) for d in (-1, 0, 1)]
    angles = [0, 255, 256, 511, 512, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x40000000, 0xC0000000, 0x20000000]
    a = [x for x in ends for _ in angles] + rng.integers(0, 2**32, 30000).tolist()
    b = [y for _ in ends for y in angles] + rng.integers(0, 2**32, 30000).tolist()
    # small u as well, where the tails are
    a += (rng.integers(0, 2**32, 5000) >> rng.integers(0, 32, 5000)).tolist()
    b += rng.integers(0, 2**32, 5000).tolist()
    got = transform(a, b)
    for sine in (False, True):
        exact = np.array([normal(x, y, sine) for x, y in zip(a, b, strict=True)])
        error = np.abs(got[int(sine)] - exact[:, 0]) / exact[:, 1]
        assert error.max() < 4e-7, (error.max(), a[error.argmax()], b[error.argmax()])


def test_the_mapping_from_index_to_words() -> None:
    normals = Stream(KEY).normals(5, "layer.weight", 0, 3 * TILE).numpy()
    for i in [0, 1, 127, 128, 1023, 1024, 1025, 2047, 2048, 4095, 4096 + 777, 3 * TILE - 1]:
        exact, r = normal_at(KEY, nonce(5, "layer.weight"), i)
        assert abs(normals[i] - exact) < 4e-7 * r


def test_the_bits_do_not_change() -> None:
    """A golden value: these very bits must come out on every machine and in every later version."""
    import hashlib

    normals = Stream(bytes(32)).normals(1, "golden", 0, 100_000).numpy()
    assert hashlib.sha256(normals.tobytes()).hexdigest() == GOLDEN


GOLDEN = "adeefa18d8041618c26f194e3c5902f3bba94371adfe4530f24892d62e34bc16"


@pytest.mark.parametrize(("step", "name"), [(0, "a"), (1, "a"), (0, "b"), (2**32 - 1, "c")])
def test_kolmogorov_smirnov(step: int, name: str) -> None:
    n = 1_000_000
    sample = Stream(KEY).normals(step, name, 12345, n).double().numpy()
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    pairs = Stream(KEY).normals(step, name, 0, 512 * TILE).double().numpy().reshape(-1, 2, TILE // 2)
    assert stats.kstest((pairs**2).sum(axis=1).ravel(), "chi2", args=(2,)).pvalue > 1e-3
    angle = np.arctan2(pairs[:, 1], pairs[:, 0]).ravel()
    assert stats.kstest(angle, "uniform", args=(-math.pi, 2 * math.pi)).pvalue > 1e-3


def test_moments() -> None:
    x = Stream(KEY).normals(3, "moments", 0, 8_000_000).double()
    n = x.numel()
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10395 - 225)]:
        assert abs((x**power).mean().item() - mean) < 4.5 * math.sqrt(variance / n)


def test_tails_to_five_and_a_half_sigma() -> None:
    n, chunk = 200_000_000, 5_000_000
    levels = [1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5]
    above = np.zeros(len(levels))
    below = np.zeros(len(levels))
    buffer = torch.empty(chunk)
    for start in range(0, n, chunk):
        add_normals_(buffer.zero_(), [(KEY, 8, 1.0)], "tails", start)
        tail = buffer[buffer.abs() > 1].numpy()
        for k, level in enumerate(levels):
            tail = tail[np.abs(tail) > level]
            above[k] += (tail > 0).sum()
            below[k] += (tail < 0).sum()
    for k, level in enumerate(levels):
        expected = n * stats.norm.sf(level)
        for count in (above[k], below[k]):
            # two-sided exact Poisson (the binomial's limit; wider where p is not small)
            assert stats.poisson.cdf(count, expected) > 1e-4 and stats.poisson.sf(count - 1, expected) > 1e-4, (
                level,
                count,
                expected,
            )
