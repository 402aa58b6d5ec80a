"""The key: one secret, kept to itself, one sub-key per purpose."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from sordino.errors import SordinoError, StateError
from sordino.noise import PURPOSES, CorrelatedNoise, Keys
from sordino.strategies import make_strategy

SECRET = bytes(range(32))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_subkeys_are_hkdf_sha256() -> None:
    """RFC 5869 written out: extract, then one block of expand."""
    import hashlib
    import hmac

    def mac(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()

    expected = mac(mac(b"sordino 1", SECRET), b"noise\0" + b"2" + b"\1")
    assert Keys.from_bytes(SECRET).subkey("noise", 2) == expected


def test_all_subkeys_differ_and_depend_on_the_key() -> None:
    keys, others = Keys.from_bytes(SECRET), Keys.from_bytes(SECRET[:-1] + b"\0")
    places = [(p, g) for p, changes in PURPOSES.items() for g in (range(12) if changes else (0,))]
    subkeys = [k.subkey(p, g) for k in (keys, others) for p, g in places]
    assert len(set(subkeys)) == 2 * len(places) and all(len(s) == 32 for s in subkeys)
    assert keys.subkey("noise") == Keys.from_bytes(SECRET).subkey("noise")


def test_unknown_purposes_and_generations_are_refused() -> None:
    keys = Keys.fresh()
    with pytest.raises(SordinoError, match="purpose='nosie' is not known; one of: sampling, noise"):
        keys.subkey("nosie")
    for purpose, changes in PURPOSES.items():
        if not changes:
            with pytest.raises(SordinoError, match="never changes within a run"):
                keys.subkey(purpose, 1)
    for generation in (-1, 1.0, True):
        with pytest.raises(SordinoError, match="generation="):
            keys.subkey("noise", generation)  # type: ignore[arg-type]


def test_fresh_keys_are_fresh_and_seeded_ones_are_not() -> None:
    assert Keys.fresh().subkey("noise") != Keys.fresh().subkey("noise")
    assert Keys.from_seed(1).subkey("noise") == Keys.from_seed(1).subkey("noise") != Keys.from_seed(2).subkey("noise")
    assert Keys.from_seed(1).seeded and not Keys.fresh().seeded and not Keys.from_bytes(SECRET).seeded
    for seed in (1.0, True, "1"):
        with pytest.raises(SordinoError, match="seed="):
            Keys.from_seed(seed)  # type: ignore[arg-type]
    with pytest.raises(SordinoError, match="32 bytes"):
        Keys.from_bytes(b"short")


def test_the_file_goes_round_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    before = os.umask(0)
    try:
        Keys.from_bytes(SECRET).save(path)
        Keys.from_seed(4).save(tmp_path / "seeded")
    finally:
        os.umask(before)
    assert _mode(path) == 0o600 and sorted(p.name for p in tmp_path.iterdir()) == ["key", "seeded"]
    loaded = Keys.load(path)
    assert loaded.subkey("noise") == Keys.from_bytes(SECRET).subkey("noise") and not loaded.seeded
    assert Keys.load(tmp_path / "seeded").seeded


def test_the_file_is_never_open_to_others_even_for_an_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    real_link, real_open, real_fsync = os.link, os.open, os.fsync

    def look() -> None:
        modes.extend(_mode(p) for p in tmp_path.iterdir())

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        look()
        return fd

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda fd: (look(), real_fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (look(), real_link(a, b), look())[1])
    before = os.umask(0)
    try:
        Keys.fresh().save(tmp_path / "key")
    finally:
        os.umask(before)
    assert len(modes) >= 4 and set(modes) == {0o600}


def test_saving_is_all_or_nothing_and_never_over_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StateError, match="No space left"):
        patch.setattr(os, "fsync", full)
        Keys.fresh().save(path)
    assert list(tmp_path.iterdir()) == []
    Keys.from_bytes(SECRET).save(path)
    with pytest.raises(StateError, match="is there already"):
        Keys.fresh().save(path)
    assert Keys.load(path).subkey("noise") == Keys.from_bytes(SECRET).subkey("noise")
    assert [p.name for p in tmp_path.iterdir()] == ["key"]
    with pytest.raises(StateError, match="cannot write"):
        Keys.fresh().save(tmp_path / "no such folder" / "key")


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    Keys.fresh().save(path)
    path.chmod(mode)
    with pytest.raises(StateError, match=f"mode {mode:04o}.*chmod 600"):
        Keys.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"sordino-key-1 secret\n",
        b"sordino-key-1 secret 00ff\n",
        b"\xff\xfe\x00",
        b"sordino-key-9 secret " + b"00" * 32,
        b"sordino-key-1 secret " + b"zz" * 32,
        b"sordino-key-1 other " + b"00" * 32,
    ],
)
def test_a_missing_or_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StateError, match="no key file") as missing:
        Keys.load(tmp_path / "key")
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StateError, match="not a whole key file") as damaged:
        Keys.load(path)
    assert all("\n" not in str(e.value) and str(tmp_path) in str(e.value) for e in (missing, damaged))
    with pytest.raises(StateError, match="cannot read"):
        Keys.load(tmp_path)


def test_nothing_shows_or_carries_the_secret(tmp_path: Path) -> None:
    keys = Keys.from_bytes(SECRET)
    for text in (repr(keys), str(keys), f"{keys}", f"{[keys]}"):
        assert SECRET.hex()[:8] not in text and "\\x01" not in text and text.strip("[]") == "<Keys: secret>"
    assert not hasattr(keys, "__dict__")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SordinoError, match="not pickled or copied"):
            copied(keys)
    import torch

    with pytest.raises(SordinoError, match="not pickled or copied"):
        torch.save({"keys": keys}, tmp_path / "checkpoint.pt")


def test_a_destroyed_key_is_gone(tmp_path: Path) -> None:
    keys = Keys.from_bytes(SECRET)
    inside = keys._secret
    keys.destroy()
    keys.destroy()
    assert inside == bytearray(32) and repr(keys) == "<Keys: destroyed>"
    for use in (lambda: keys.subkey("noise"), lambda: keys.save(tmp_path / "key")):
        with pytest.raises(StateError, match="destroyed"):
            use()


def test_erasing_overwrites_before_it_removes(tmp_path: Path) -> None:
    path = tmp_path / "key"
    Keys.from_bytes(SECRET).save(path)
    with open(path, "rb") as witness:  # still sees the blocks after the name is gone
        Keys.erase(path)
        assert not path.exists()
        left = witness.read()
    assert len(left) > 64 and set(left) == {0}
    Keys.erase(path)  # a second time: nothing to do


LOCKER = """
import sys
from sordino.errors import StateError
from sordino.noise import Keys
try:
    with Keys.lock(sys.argv[1]):
        print("locked")
except StateError as error:
    print(error)
"""


def _other_process(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", LOCKER, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_two_processes_on_one_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(StateError, match="no key file"):
        Keys.lock(path)
    Keys.fresh().save(path)
    lock = Keys.lock(path)
    assert "in use by another run" in _other_process(path)
    with pytest.raises(StateError, match="in use by another run"):
        Keys.lock(path)  # nor twice in this one
    lock.release()
    lock.release()
    assert _other_process(path) == "locked"
    with Keys.lock(path):
        assert "in use by another run" in _other_process(path)
    assert _other_process(path) == "locked"


def test_sub_keys_are_not_shown_where_errors_are_reported_with_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Sentry, pytest -l or rich do."""
    keys = Keys.fresh()
    noise = CorrelatedNoise(keys, make_strategy("lambda-cgd:0.9", 4))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sordino.noise.stream.draw", fail)
    with pytest.raises(MemoryError) as caught:
        noise.add_({"w": torch.zeros(3)}, 1, 1.0)
    text = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    secret = bytes(keys.subkey("noise"))
    assert "<sub-key>" in text and repr(secret) not in text and secret.hex() not in text
    with pytest.raises(SordinoError, match="not pickled"):
        pickle.dumps(keys.subkey("noise"))


def test_kept_noise_is_not_pickled_or_copied() -> None:
    noise = CorrelatedNoise(Keys.fresh(), make_strategy("bsr:3", 4))
    noise.add_({"w": torch.zeros(3)}, 0, 1.0)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SordinoError, match="kept noise is not pickled"):
            copied(noise._kept)
