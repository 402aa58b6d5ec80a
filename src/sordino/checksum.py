"""64 bits by which a step's clipped sum is recognised: keyed, of every bit, fast enough to take at every step.

On the CPU the bytes go through GHASH, the universal hash of AES-GCM: for two
different sums it agrees with probability below 2⁻⁹⁰ over the key, whatever the
sums are, and it runs at memory speed. On a GPU the words are first folded there,
4,096 to two 64-bit numbers each, ``Σ m_i·w_i mod 2⁶⁴`` with secret random m_i (a
second universal hash: at most 2⁻⁶⁶ for two rows that differ), so that 1/512 of
the sum is copied. HMAC-SHA256 over the result, and over the names, shapes, step
and noise scale, hides all of it from whoever lacks the key.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.util
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ROW = 2048  # words that fold to one pair of numbers
GROUP = 2048 * ROW  # words folded at once without a kernel of ours: 32 MiB of products
PIECE = 1 << 24  # bytes hashed at once


class Checksum:
    """A function of (step, noise scale, sums) under one sub-key."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod=hashlib.sha256)  # tells nothing of the key when it is shown
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, step: int, scale: float, sums: Mapping[str, Tensor]) -> str:
        names = tuple(sorted(sums))
        tensors = [sums[name].detach() for name in names]
        shapes = tuple((tuple(t.shape), t.dtype, t.device.type) for t in tensors)
        about = json.dumps([step, float(scale).hex(), _described(names, shapes)]).encode()
        return self._keyed(b"sum\0" + about + b"\0" + self._hash([t.reshape(-1) for t in tensors])).hex()[:16]

    def _hash(self, flat: Sequence[Tensor]) -> bytes:
        """128 bits of all the words. Only ever used inside the HMAC, so one key and nonce serve every step."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        ghash = Cipher(algorithms.AES(self._keyed(b"ghash")), modes.GCM(bytes(12))).encryptor()
        elsewhere: dict[torch.device, list[Tensor]] = {}
        for t in flat:
            if t.device.type != "cpu":
                elsewhere.setdefault(t.device, []).append(t)
            elif t.numel():
                view = t.contiguous().view(torch.uint8).numpy().data
                for start in range(0, len(view), PIECE):
                    ghash.authenticate_additional_data(view[start : start + PIECE])
        for device, tensors in elsewhere.items():
            ghash.authenticate_additional_data(fold(tensors, self._table(device)).cpu().numpy().tobytes())
        ghash.finalize()
        return ghash.tag

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            words = bytearray(hashlib.shake_256(self._keyed(b"fold")).digest(2 * ROW * 8))
            self._tables[device] = torch.frombuffer(words, dtype=torch.int64).reshape(2, ROW).to(device)
        return self._tables[device]

    def _keyed(self, text: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(text)
        return mac.digest()

    def __repr__(self) -> str:
        return "<Checksum>"


@functools.lru_cache(maxsize=4)
def _described(names: tuple[str, ...], shapes: tuple[tuple[tuple[int, ...], torch.dtype, str], ...]) -> str:
    return json.dumps(
        [[name, shape, str(dtype), kind] for name, (shape, dtype, kind) in zip(names, shapes, strict=True)]
    )


def fold(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """(rows, 2): two numbers for every 2,048 words of each flat tensor. (Integer sums: any order of adding.)"""
    tensors = [t.contiguous() for t in tensors if t.numel()]
    if table.device.type == "cuda" and tensors and _has_triton():
        from .checksum_kernel import fold as fold_by_kernel

        with torch.cuda.device(table.device):
            return fold_by_kernel(tensors, table)
    found = []
    for t in tensors:
        for words in t.view(torch.int32).split(GROUP):
            rows = torch.nn.functional.pad(words, (0, -words.numel() % ROW)).reshape(-1, ROW)
            found.append(torch.stack([(rows * multipliers).sum(1) for multipliers in table], 1))
    return torch.cat(found) if found else torch.zeros((0, 2), dtype=torch.int64)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
