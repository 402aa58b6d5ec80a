"""The key is in its own file and nowhere else."""

from __future__ import annotations

import base64
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.state.tiny import make

from sordino.noise import PURPOSES, Keys


def spellings(secret: bytes) -> list[bytes]:
    """The ways in which 32 bytes get into a file or a message."""
    found = [secret, secret[::-1], secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret)[:40]]
    found += [base64.urlsafe_b64encode(secret)[:40], repr(secret).encode()[2:-1], repr(list(secret)).encode()[1:-1]]
    found += [str(int.from_bytes(secret, order)).encode() for order in ("little", "big")]
    halves = [secret[:16], secret[16:], secret.hex()[:32].encode(), secret.hex()[32:].encode()]
    return found + halves


def secrets(master: bytes) -> dict[str, bytes]:
    keys = Keys.from_bytes(master)
    found = {"the key": master}
    for purpose, changes in PURPOSES.items():
        for generation in range(4 if changes else 1):
            found[f"{purpose} {generation}"] = keys.subkey(purpose, generation)
    return found


def search(text: bytes, master: bytes) -> list[str]:
    return [name for name, secret in secrets(master).items() if any(form in text for form in spellings(secret))]


def test_the_search_finds_what_it_looks_for() -> None:
    master = bytes(range(100, 132))
    for secret in secrets(master).values():
        for form in spellings(secret):
            assert search(b"before " + form + b" after", master)
    assert not search(bytes(1000), master)


def test_no_file_but_the_key_file_holds_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.state.saving.forget_old", lambda *a: None)  # look at every generation there was
    run = make(seed=None)
    run.save(tmp_path)
    master = bytes.fromhex((tmp_path / "key").read_text().split()[2])
    for _ in range(2):
        run.go(run.private.step + 3)
        run.save(tmp_path)
        run.private.close()
        run = make(seed=None)
        run.load(tmp_path)
        run.optimizer.param_groups[0]["lr"] *= 3
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 10
    for path in files:
        found = search(path.read_bytes(), master)
        assert (path.name == "key") == bool(found), (path, found)
        if path.name in ("key", "journal"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    run.go()
    run.save(tmp_path)
    assert not any(search(p.read_bytes(), master) for p in tmp_path.rglob("*") if p.is_file())


def test_nothing_that_is_said_holds_the_key(server: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Logs at the lowest level, stdout, stderr, and every object of the run shown with its attributes."""
    found = server("announced", folder=str(tmp_path))
    captured = capfd.readouterr()
    said = json.dumps(found["texts"]) + "".join(found["texts"]) + captured.out + captured.err + found["output"]
    assert "sordino" in said.lower() and len(said) > 2000
    assert not search(said.encode(), bytes.fromhex(found["key"]))


def test_errors_do_not_hold_the_key(tmp_path: Path) -> None:
    """Nor does a traceback's line of source or the message, whatever goes wrong with the files."""
    import traceback

    run = make(seed=None)
    run.save(tmp_path)
    master = bytes.fromhex((tmp_path / "key").read_text().split()[2])
    run.go(2)
    run.private.close()
    said = []
    for name in ("journal", "key"):
        raw = (tmp_path / name).read_bytes()
        for bad in (raw[:-10], raw + b"x\n", raw[10:], raw.replace(b"0", b"1")):
            (tmp_path / name).write_bytes(bad)
            try:
                make(seed=None).load(tmp_path)
            except ValueError:
                said.append("".join(traceback.format_exception(*sys.exc_info())))
        (tmp_path / name).write_bytes(raw)
    assert len(said) > 4 and not search("".join(said).encode(), master)
