"""ChaCha20 and the normals once more, written from their definitions: slow, and sharing no code with the library."""

from __future__ import annotations

import math
import struct

MASK = 0xFFFFFFFF


def _rotl(x: int, n: int) -> int:
    return ((x << n) | (x >> (32 - n))) & MASK


def _quarter(x: list[int], a: int, b: int, c: int, d: int) -> None:
    x[a] = (x[a] + x[b]) & MASK
    x[d] = _rotl(x[d] ^ x[a], 16)
    x[c] = (x[c] + x[d]) & MASK
    x[b] = _rotl(x[b] ^ x[c], 12)
    x[a] = (x[a] + x[b]) & MASK
    x[d] = _rotl(x[d] ^ x[a], 8)
    x[c] = (x[c] + x[d]) & MASK
    x[b] = _rotl(x[b] ^ x[c], 7)


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> list[int]:
    """RFC 8439, section 2.3."""
    state = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter]
    state += struct.unpack("<3I", nonce)
    x = list(state)
    for _ in range(10):
        _quarter(x, 0, 4, 8, 12)
        _quarter(x, 1, 5, 9, 13)
        _quarter(x, 2, 6, 10, 14)
        _quarter(x, 3, 7, 11, 15)
        _quarter(x, 0, 5, 10, 15)
        _quarter(x, 1, 6, 11, 12)
        _quarter(x, 2, 7, 8, 13)
        _quarter(x, 3, 4, 9, 14)
    return [(a + b) & MASK for a, b in zip(x, state, strict=True)]


def normal(a: int, b: int, sine: bool) -> tuple[float, float]:
    """The normal that the words a and b stand for, in double precision, and its radius."""
    k = (a << 8) | (b & 0xFF)  # u = (k + 1/2) / 2^40 = 1 - v
    v = (2**40 - k - 0.5) / 2**40
    r = math.sqrt(-2 * (math.log((k + 0.5) / 2**40) if k < 2**39 else math.log1p(-v)))
    m = (b >> 9) - (1 << 23 if b >> 31 else 0)
    phi = (m + 0.5) * math.pi / 2**23
    sign = -1 if (b >> 8) & 1 else 1
    return sign * r * (math.sin(phi) if sine else math.cos(phi)), r


def normal_at(key: bytes, nonce: bytes, i: int) -> tuple[float, float]:
    """Normal i of a stream."""
    tile, row, lane = i // 2048, i % 2048 // 128, i % 128
    words = chacha20_block(key, 128 * tile + lane, nonce)
    return normal(words[row % 8], words[8 + row % 8], sine=row >= 8)


# RFC 8439: 2.3.2, then appendix A.1 one to five, as (key, counter, nonce, words).
_ZERO = bytes(32)
VECTORS: list[tuple[bytes, int, bytes, str]] = [
    (
        bytes(range(32)),
        1,
        bytes.fromhex("000000090000004a00000000"),
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2",
    ),
    (
        _ZERO,
        0,
        bytes(12),
        "ade0b876 903df1a0 e56a5d40 28bd8653 b819d2bd 1aed8da0 ccef36a8 c70d778b "
        "7c5941da 8d485751 3fe02477 374ad8b8 f4b8436a 1ca11815 69b687c3 8665eeb2",
    ),
    (
        _ZERO,
        1,
        bytes(12),
        "bee7079f 7a385155 7c97ba98 0d082d73 a0290fcb 6965e348 3e53c612 ed7aee32 "
        "7621b729 434ee69c b03371d5 d539d874 281fed31 45fb0a51 1f0ae1ac 6f4d794b",
    ),
    (
        bytes(31) + b"\1",
        1,
        bytes(12),
        "2452eb3a 9249f8ec 8d829d9b ddd4ceb1 e8252083 60818b01 f38422b8 5aaa49c9 "
        "bb00ca8e da3ba7b4 c4b592d1 fdf2732f 4436274e 2561b3c8 ebdd4aa6 a0136c00",
    ),
    (
        b"\0\xff" + bytes(30),
        2,
        bytes(12),
        "fb4dd572 4bc42ef1 df922636 327f1394 a78dea8f 5e269039 a1bebbc1 caf09aae "
        "a25ab213 48a6b46c 1b9d9bcb 092c5be6 546ca624 1bec45d5 87f47473 96f0992e",
    ),
    (
        _ZERO,
        0,
        bytes(11) + b"\2",
        "374dc6c2 3736d58c b904e24a cd3f93ef 88228b1a 96a4dfb3 5b76ab72 c727ee54 "
        "0e0e978a f3145c95 1b748ea8 f786c297 99c28f5f 628314e8 398a19fa 6ded1b53",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]
