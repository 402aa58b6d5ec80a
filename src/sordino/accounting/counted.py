"""Random numbers that belong to a question: the same question always gets the same ones, whatever the machine.

Philox (a counter-based generator) under a key from SHA-256 of the question; chunk c of the samples has a counter of its
own. Uniforms and normals are made from its 53 leading bits by arithmetic that is the same on every device up to the
last digit. A seed that could be chosen would make a confidence level worthless, so there is none to choose.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

GRID = 2.0**-20  # of the largest entry


def seed(purpose: str, gram: np.ndarray, *values: float) -> bytes:
    """256 bits from everything that was asked.

    The matrix counts to six digits, so that machines whose products differ in the last one ask the same question;
    matrices closer than that share their random numbers, which neither can gain by.
    """
    scale = 2.0 ** math.floor(math.log2(max(float(np.abs(gram).max()), 1e-300)))
    cells = np.floor(gram / (scale * GRID) + 1.0 / math.pi).astype("<i8")  # 1/π: entries are not on the cells' edges
    state = hashlib.sha256(f"sordino balls in bins\n{purpose}\n{len(gram)}\n".encode())
    state.update(struct.pack(f"<{len(values) + 1}d", scale, *values))
    state.update(cells.tobytes())
    return state.digest()


class Counted:
    """`uniforms` and b normals a sample."""

    def __init__(self, seed: bytes, bins: int, uniforms: int, device: torch.device) -> None:
        self._key = int.from_bytes(seed[:16], "little")
        self.bins, self.uniforms, self.device = bins, uniforms, device

    @property
    def rows(self) -> int:
        """Samples a chunk: part of the question, hence the same everywhere."""
        return rows(self.bins)

    def chunks(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows × uniforms, rows × b) until at least `count` rows are out; the next bits are drawn meanwhile."""
        chunks = -(-count // self.rows)
        with ThreadPoolExecutor(max_workers=1) as pool:
            coming = pool.submit(self._bits, 0)
            for chunk in range(chunks):
                bits = coming.result()
                if chunk + 1 < chunks:
                    coming = pool.submit(self._bits, chunk + 1)
                yield self._numbers(bits)

    def _bits(self, chunk: int) -> np.ndarray:
        pairs = -(-self.bins // 2)
        philox = np.random.Philox(key=self._key, counter=[0, 0, 0, chunk])  # type: ignore[arg-type]
        words = self.rows * (self.uniforms + 2 * pairs)
        # Over the whole range these are Philox's own words (a test compares), without the interpreter's lock.
        return np.random.Generator(philox).integers(0, 2**64, words, dtype=np.uint64) >> np.uint64(11)

    def _numbers(self, bits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        unit = torch.from_numpy(bits.view(np.int64)).to(self.device).to(torch.float64)
        unit.add_(0.5).mul_(2.0**-53)  # in (0, 1)
        uniform, radius, angle = unit.split(
            [self.rows * self.uniforms] + [(len(bits) - self.rows * self.uniforms) // 2] * 2
        )
        radius, angle = radius.log_().mul_(-2.0).sqrt_(), angle.mul_(2.0 * math.pi)
        normal = torch.cat(
            [torch.cos(angle).mul_(radius).view(self.rows, -1), torch.sin(angle).mul_(radius).view(self.rows, -1)], 1
        )
        return uniform.view(self.rows, -1), normal[:, : self.bins]


def rows(bins: int) -> int:
    """Samples a chunk.

    >>> rows(2), rows(390), rows(10_000)
    (8192, 1024, 256)
    """
    return 2 ** min(13, max(8, (2**19 // bins).bit_length() - 1))
