"""The ChaCha20 keystream on the CPU (RFC 8439), by OpenSSL.

Contract: ``keystream(key, nonce, first_block, blocks)`` is a pure function; block
b of it is the RFC's ``chacha20_block(key, counter=b, nonce)`` read as sixteen
little-endian 32-bit words. The counter has 32 bits and is never allowed to wrap:
OpenSSL would carry into the nonce there, that is, into the stream of another step.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from ..errors import SordinoError

BLOCK_WORDS = 16
BLOCK_BYTES = 64
BLOCKS = 2**32  # per (key, nonce)
STEPS = 2**32


@functools.lru_cache(maxsize=8)
def zeros(size: int) -> bytes:
    """What a keystream is XORed with to be seen bare."""
    return bytes(size)


@functools.lru_cache(maxsize=4096)
def tensor_words(name: str) -> tuple[int, int]:
    """The nonce's last two words: SHA-256 of the tensor's name, cut to 64 bits (public, not a secret)."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def nonce(step: int, name: str) -> bytes:
    """96 bits: the step (32) and the tensor (64). The counter is what remains for the place in the tensor.

    >>> nonce(1, "weight").hex()[:8]
    '01000000'
    """
    check_step(step)
    high, low = tensor_words(name)
    return step.to_bytes(4, "little") + high.to_bytes(4, "little") + low.to_bytes(4, "little")


def check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or not 0 <= step < STEPS:
        raise SordinoError(f"step={step!r} must be a whole number from 0 to {STEPS - 1}: it is 32 bits of the nonce")


def check_key(key: bytes) -> None:
    # Not the value: a key is never part of a message.
    if not isinstance(key, (bytes, bytearray)) or len(key) != 32:
        raise SordinoError(f"a stream's key must be 32 bytes (Keys.subkey makes them), not {type(key).__name__}")


def open_stream(key: bytes, nonce96: bytes, first_block: int) -> Any:
    """A context whose ``update_into(zeros, buffer)`` writes the keystream from `first_block` on."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    # OpenSSL takes counter and nonce as one value of 16 bytes, the counter first, little-endian.
    return Cipher(algorithms.ChaCha20(key, first_block.to_bytes(4, "little") + nonce96), mode=None).encryptor()


def keystream(key: bytes, nonce96: bytes, first_block: int, blocks: int) -> np.ndarray:
    """`blocks` blocks from `first_block` on, as 32-bit words.

    >>> keystream(bytes(32), bytes(12), 0, 1)[:2]
    array([2917185654, 2419978656], dtype=uint32)
    """
    check_key(key)
    if len(nonce96) != 12:
        raise SordinoError(f"a nonce has 12 bytes, not {len(nonce96)}")
    check_blocks(first_block, blocks)
    out = np.empty(blocks * BLOCK_WORDS, dtype="<u4")
    if blocks:
        open_stream(key, nonce96, first_block).update_into(bytes(out.nbytes), out.view(np.uint8).data)
    return out.astype(np.uint32, copy=False)


def check_blocks(first_block: int, blocks: int) -> None:
    if first_block < 0 or blocks < 0:
        raise SordinoError(f"offset and length must not be negative (block {first_block}, {blocks} blocks)")
    if first_block + blocks > BLOCKS:
        raise SordinoError(
            f"one tensor may use {BLOCKS} blocks of keystream ({BLOCKS * BLOCK_WORDS} numbers) a step, "
            f"not {first_block + blocks}; split it under several names"
        )
