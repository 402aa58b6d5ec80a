"""The keystream is RFC 8439's, on every block the library may reach."""

from __future__ import annotations

import numpy as np
import pytest

from sordino.errors import SordinoError
from sordino.noise import Stream, add_normals_
from sordino.noise.cipher import BLOCKS, keystream, nonce, tensor_words

from .reference import VECTORS, chacha20_block, words


@pytest.mark.parametrize(("key", "counter", "nonce96", "expected"), VECTORS)
def test_rfc_8439_vectors(key: bytes, counter: int, nonce96: bytes, expected: str) -> None:
    assert chacha20_block(key, counter, nonce96) == words(expected)  # the tests' own reference
    assert keystream(key, nonce96, counter, 1).tolist() == words(expected)


def test_blocks_are_seekable() -> None:
    key, n = bytes(range(32)), bytes(range(12))
    whole = keystream(key, n, 0, 50)
    assert whole.dtype == np.uint32
    for first, count in [(0, 1), (7, 3), (49, 1), (13, 37), (20, 0)]:
        assert (keystream(key, n, first, count) == whole[16 * first : 16 * (first + count)]).all()


def test_the_last_blocks_before_the_counter_ends_are_the_rfcs() -> None:
    """OpenSSL carries into the nonce when the counter wraps: the last blocks are right, and none follows them."""
    key, n = bytes(range(32)), bytes(range(100, 112))
    got = keystream(key, n, BLOCKS - 3, 3).reshape(3, 16)
    for k in range(3):
        assert got[k].tolist() == chacha20_block(key, BLOCKS - 3 + k, n)
    with pytest.raises(SordinoError, match="4294967296 blocks"):
        keystream(key, n, BLOCKS - 3, 4)
    with pytest.raises(SordinoError, match="split it"):
        Stream(key).normals(0, "w", 2**36 - 10, 11)
    assert Stream(key).normals(0, "w", 2**36 - 10, 10).shape == (10,)
    with pytest.raises(SordinoError, match="split it"):
        Stream(key).words(0, "w", 2**36, 1)


def test_the_nonce_is_step_and_tensor() -> None:
    assert nonce(0x01020304, "a")[:4] == bytes([4, 3, 2, 1])
    assert nonce(0, "a")[4:] == nonce(9, "a")[4:] != nonce(0, "b")[4:]
    assert b"".join(w.to_bytes(4, "little") for w in tensor_words("a")) == nonce(0, "a")[4:]


@pytest.mark.parametrize("step", [-1, 2**32, 1.0, True, None])
def test_a_step_that_does_not_fit_the_nonce_is_refused(step: object) -> None:
    with pytest.raises(SordinoError, match="step="):
        Stream(bytes(32)).words(step, "a", 0, 1)  # type: ignore[arg-type]


def test_a_wrong_key_is_refused_without_showing_it() -> None:
    for key in (b"secretsecret", "x" * 32, None):
        with pytest.raises(SordinoError, match="32 bytes") as error:
            Stream(key)  # type: ignore[arg-type]
        assert "secretsecret" not in str(error.value)
    import torch

    with pytest.raises(SordinoError, match="32 bytes"):
        add_normals_(torch.zeros(3), [(b"short", 0, 1.0)], "w")
