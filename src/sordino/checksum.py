"""64 bits by which a step's clipped sum is recognised: keyed, of every bit, fast enough to take at every step.

On the CPU the bytes go through GHASH, the universal hash of AES-GCM: for two
different sums it agrees with probability below 2⁻⁹⁰ over the key, whatever the
sums are, and it runs at memory speed. On a GPU the words are first folded there,
4,096 to two 64-bit numbers each, ``Σ m_i·w_i mod 2⁶⁴`` with secret random m_i (a
second universal hash: at most 2⁻⁶⁶ for two rows that differ), so that 1/1024 of
the sum is copied. HMAC-SHA256 over the result, and over the names, shapes, step
and noise scale, hides all of it from whoever lacks the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

ROW = 4096  # words that fold to one pair of numbers
GROUP = 1024 * ROW  # words folded at once: 32 MiB of products, 16 MiB of gathered small tensors
PIECE = 1 << 24  # bytes hashed at once


class Checksum:
    """A function of (step, noise scale, sums) under one sub-key."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod=hashlib.sha256)  # tells nothing of the key when it is shown
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, step: int, scale: float, sums: Mapping[str, Tensor]) -> str:
        flat = {name: sums[name].detach().reshape(-1) for name in sorted(sums)}
        shape = [[name, list(sums[name].shape), str(t.dtype), t.device.type] for name, t in flat.items()]
        about = json.dumps([step, float(scale).hex(), shape]).encode()
        return self._keyed(b"sum\0" + about + b"\0" + self._hash(flat)).hex()[:16]

    def _hash(self, flat: Mapping[str, Tensor]) -> bytes:
        """128 bits of all the words. Only ever used inside the HMAC, so one key and nonce serve every step."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        ghash = Cipher(algorithms.AES(self._keyed(b"ghash")), modes.GCM(bytes(12))).encryptor()
        elsewhere: dict[torch.device, list[Tensor]] = {}
        for t in flat.values():
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


def fold(tensors: list[Tensor], table: Tensor) -> Tensor:
    """Two numbers for every 4,096 words of the flat `tensors`, in order. (Integer sums: any order of adding.)"""
    found = []
    for words in _groups(tensors):
        rows = torch.nn.functional.pad(words, (0, -words.numel() % ROW)).reshape(-1, ROW)
        found += [(rows * multipliers).sum(1) for multipliers in table]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _groups(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The 32-bit words of all tensors in pieces of at most GROUP; small tensors share a piece."""
    waiting: list[Tensor] = []
    size = 0
    for t in tensors:
        for words in t.contiguous().view(torch.int32).split(GROUP) if t.numel() else ():
            if waiting and size + words.numel() > GROUP:
                yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                waiting, size = [], 0
            waiting.append(words)
            size += words.numel()
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
