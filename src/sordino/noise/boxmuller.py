"""Keystream words to standard normals: one fixed mapping, in operations that every machine rounds alike.

**Which word.** Normals come in tiles of 2048, from 128 blocks of 16 words. Normal i
lies in tile ``t = i // 2048`` at row ``j = i % 2048 // 128`` and lane ``l = i % 128``;
its block is ``128 t + l`` and its words are ``a = w[j % 8]`` and ``b = w[8 + j % 8]``:
the cosine if j < 8, else the sine. (Lanes run along memory, so that a GPU whose
threads hold one block each writes 128 neighbours at a time.)

**Which number.** Radius: ``u = (k + 1/2) / 2^40``, k = the 32 bits of a, then the low 8
of b; ``r = sqrt(-2 ln u)``. Angle: 24 bits, the high 23 of b as the signed half-integer
``m + 1/2`` giving ``phi = (m + 1/2) pi / 2^23`` in (-pi/2, pi/2), and bit 8 of b as the
sign of r, the other half of the circle.

**To the bit.** Only +, -, *, sqrt (each correctly rounded by IEEE 754, none fused),
conversions from integers and operations on bits: no library logarithm or sine, whose
last bits depend on the machine, the version, and the place of an element in a vector
loop. So the normals are the same on every CPU and for every split, and on a GPU where
the kernel uses the same operations. Error about 3e-7 of r (tested against exact
arithmetic), at both ends: u near 1 keeps all its 40 bits (`s` below is u - 1).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LANES = 128  # blocks of a tile
TILE = 16 * LANES  # normals of a tile
RADIUS_BITS = 40

#: No normal is farther from 0: k = 0 gives sqrt(-2 ln 2^-41). For the accountant's tail term.
R_MAX = math.sqrt(2 * (RADIUS_BITS + 1) * math.log(2))

# -2 ln(1+f) = f (LOG0 + f (LOG1 + ...)) on [sqrt(1/2) - 1, sqrt 2 - 1], relative 3e-8. (No division: a correctly
# rounded one is a subroutine on a GPU.)
LOG = (
    -2.0, 0.9999998211860657, -0.6666790246963501, 0.5000351071357727, -0.39924144744873047,
    0.33141016960144043, -0.2983594536781311, 0.28615042567253113, -0.17469686269760132,
)  # fmt: skip
# sin x = x (1 + x^2 (...)), relative 5e-9, and cos x = 1 + x^2 (...), absolute 5e-8, both on [0, pi/2]
SIN = (1.0, -0.16666656732559204, 0.008333025500178337, -0.00019807417993433774, 2.6019031338364584e-06)
COS = (1.0, -0.4999993145465851, 0.041663989424705505, -0.001385592739097774, 2.31943868129747e-05)
MINUS_2_LN2 = float(np.float32(-2 * math.log(2) / 2**23))  # the exponent stays where it is in the bits
ANGLE = float(np.float32(math.pi / 2**24))


def _f(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


def _i(value: int) -> np.ndarray:
    return np.array(value, dtype=np.uint32).view(np.int32)


# 0-dimensional arrays: a ufunc takes them faster than scalars.
_TWO_M32, _ONE = _f(2.0**-32), _f(1.0)
_LOW8, _BITS_TWO_M17 = _i(0xFF), _f(2.0**-17).view(np.int32)
_TWO_M17_LESS_HALF = _f(2.0**-17 - 2.0**-41)
_SHIFT31, _SHIFT23, _SHIFT8, _BIT0 = _i(31), _i(23), _i(8), _i(1)
_BITS_ONE, _BITS_SQRT_HALF, _EXPONENT, _SIGN = _f(1.0).view(np.int32), _i(0x3F3504F3), _i(0xFF800000), _i(0x80000000)
_LOG, _SIN, _COS = [_f(c) for c in LOG], [_f(c) for c in SIN], [_f(c) for c in COS]
_MINUS_2_LN2, _ANGLE = _f(MINUS_2_LN2), _f(ANGLE)


class Scratch:
    """Buffers for up to `tiles` tiles; one thread at a time."""

    def __init__(self, tiles: int) -> None:
        self.tiles = tiles
        self.raw = bytearray(tiles * TILE * 4)
        self._words = np.frombuffer(self.raw, dtype="<i4").reshape(tiles, LANES, 16)
        self._s, self._g, self._u, self._h = (np.empty((tiles, 8, LANES), np.float32) for _ in range(4))
        self._b = np.empty((tiles, 8, LANES), np.int32)
        self._out = np.empty((2, tiles, 16, LANES), np.float32)  # two: the second term may not overwrite the first

    def nbytes(self) -> int:
        arrays: list[Any] = [self._s, self._g, self._u, self._h, self._b, self._out]
        return len(self.raw) + sum(a.nbytes for a in arrays)

    def second(self, count: int) -> np.ndarray:
        """The second output buffer, free while only the first is in use."""
        flat: np.ndarray = self._out[1].reshape(-1)
        return flat[:count]

    def third(self, count: int) -> np.ndarray:
        """Room for as many numbers again: the keystream's, used up by `transform`."""
        return np.frombuffer(self.raw, np.float32, count)

    def transform(self, tiles: int, which: int = 0) -> np.ndarray:
        """The normals of the first `tiles` tiles of keystream in `raw`, flat, in output buffer `which` (0 or 1)."""
        words, out = self._words[:tiles], self._out[which, :tiles]
        s, g, u, h, b = (x[:tiles] for x in (self._s, self._g, self._u, self._h, self._b))
        s_bits, g_bits, u_bits, h_bits = (x.view(np.int32) for x in (s, g, u, h))
        add, sub, mul = np.add, np.subtract, np.multiply

        # s = u if u < 1/2 else u - 1: a read as a *signed* integer, so that both ends are exact.
        np.copyto(s, words[:, :, :8].transpose(0, 2, 1), casting="unsafe")
        np.copyto(b, words[:, :, 8:].transpose(0, 2, 1))
        mul(s, _TWO_M32, s)
        # (low + 1/2) 2^-40, low put into the last bits of 2^-17.
        np.bitwise_and(b, _LOW8, g_bits)
        np.bitwise_or(g_bits, _BITS_TWO_M17, g_bits)
        sub(g, _TWO_M17_LESS_HALF, g)
        add(s, g, s)
        # u = s + (1 if s < 0), and in s what that sum rounded away.
        np.right_shift(s_bits, _SHIFT31, g_bits)
        np.bitwise_and(g_bits, _BITS_ONE, g_bits)
        add(s, g, u)
        sub(u, g, g)
        sub(s, g, s)
        # u = 2^e (1 + f), 1 + f in [sqrt(1/2), sqrt 2); h = e in the exponent's bits.
        sub(u_bits, _BITS_SQRT_HALF, h_bits)
        np.bitwise_and(h_bits, _EXPONENT, h_bits)
        sub(u_bits, h_bits, u_bits)
        sub(u, _ONE, u)
        add(u, s, u)
        # u <- r = sqrt(-2 e ln 2 - 2 ln(1+f))
        np.copyto(s, h_bits, casting="unsafe")
        mul(s, _MINUS_2_LN2, s)
        self._horner(h, u, _LOG)
        mul(h, u, h)
        add(h, s, h)
        np.sqrt(h, u)
        # The sign of r: bit 8 of b.
        np.left_shift(b, _SHIFT23, g_bits)
        np.bitwise_and(g_bits, _SIGN, g_bits)
        np.bitwise_xor(u_bits, g_bits, u_bits)
        # phi: the high 23 bits of b, and a 1 after them for the half.
        np.right_shift(b, _SHIFT8, b)
        np.bitwise_or(b, _BIT0, b)
        np.copyto(s, b, casting="unsafe")
        mul(s, _ANGLE, s)
        mul(s, s, g)
        self._horner(h, g, _COS)
        mul(h, u, out[:, :8])
        self._horner(h, g, _SIN)
        mul(h, s, h)
        mul(h, u, out[:, 8:])
        return out.reshape(-1)

    @staticmethod
    def _horner(h: np.ndarray, x: np.ndarray, c: list[np.ndarray]) -> None:
        np.multiply(x, c[-1], h)
        for k in range(len(c) - 2, 0, -1):
            np.add(h, c[k], h)
            np.multiply(h, x, h)
        np.add(h, c[0], h)
