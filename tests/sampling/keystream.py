"""A keystream for the tests of the samplers: ChaCha20 from `cryptography`, as a pure function."""

from __future__ import annotations

import hashlib

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms


class Keystream:
    """Words of ChaCha20 under a key; counts how many were asked for."""

    def __init__(self, key: int) -> None:
        self._key = hashlib.sha256(str(key).encode()).digest()
        self.asked = 0

    def words(self, step: int, name: str, offset: int, length: int) -> np.ndarray:
        assert 0 <= step < 2**32
        self.asked += length
        nonce = step.to_bytes(4, "little") + hashlib.sha256(name.encode()).digest()[:8]
        first = offset // 16
        cipher = Cipher(algorithms.ChaCha20(self._key, first.to_bytes(4, "little") + nonce), mode=None)
        blocks = (offset + length + 15) // 16 - first
        words = np.frombuffer(cipher.encryptor().update(bytes(64 * blocks)), dtype="<u4")
        return words[offset - 16 * first :][:length]
