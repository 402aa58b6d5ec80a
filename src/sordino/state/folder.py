"""The folder: its lock, its generations, and how one is written and verified."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import StateError
from ..journal import Journal, seal
from ..noise import KeyLock, Keys

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})-(\d+)")
TENSORS, STATE, SEAL = "tensors.safetensors", "state.json", "seal.json"


class Damaged(Exception):
    """One generation cannot be used; says why."""


class Folder:
    """A run's folder, held by this process: its key is locked until `close`."""

    def __init__(self, path: Path, lock: KeyLock | None = None, last: str | None = None) -> None:
        self.path, self.lock, self.last = path, lock, last
        self.complete = False
        self.broken: str | None = None
        _held.add(self)

    def check(self, journal: Journal | None = None) -> None:
        """Before every step: a run whose key or journal is gone could not be resumed, so it says so now."""
        if self.broken is not None:
            raise StateError(self.broken)
        if self.lock is None:
            return
        if not (self.path / "key").exists():
            raise StateError(
                f"the key file {self.path / 'key'} is gone; nothing was released: restore it, or start a new run"
            )
        if journal is not None and not journal.there():
            raise StateError(
                f"the journal {self.path / 'journal'} was removed or replaced; nothing was released: restore it and "
                "load again, or start a new run"
            )

    def close(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting():  # the modules may be gone, and the process's end lets go of everything
            self.close()


_held: weakref.WeakSet[Folder] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: it must not keep the parent's lock alive when the parent dies."""
    for folder in list(_held):
        folder.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def has_save(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a saved run in `folder` to `load`; if not, a new run can `save` there."""
    return bool(generations(Path(folder)))


def generations(folder: Path) -> list[str]:
    """The names of the saved generations, newest first."""
    try:
        found = [m for name in os.listdir(folder) if (m := NAME.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StateError(f"cannot read {folder}: {error.strerror or error}") from None
    return [m[0] for m in sorted(found, key=lambda m: int(m[2]), reverse=True)]


# -- one generation ------------------------------------------------------------------------------


@dataclass
class Generation:
    """One save that is whole: what its seal says was checked."""

    name: str
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    seal: dict[str, Any]


def write(
    folder: Path, step: int, state: str, tensors: Mapping[str, Tensor], journal: Journal, key: bytes | None
) -> str:
    """One more generation, atomically. Returns its name."""
    from safetensors.torch import save_file

    serial = 1 + max((int(name.rpartition("-")[2]) for name in generations(folder)), default=0)
    name = f"step-{step:08d}-{serial}"
    temporary = folder / f".{name}"
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        save_file(dict(tensors), temporary / TENSORS)
        sync(temporary / TENSORS)
        write_text(temporary / STATE, state)
        sealed: dict[str, Any] = {
            "format": FORMAT,
            "files": {file: file_digest(temporary / file) for file in (TENSORS, STATE)},
            "journal": [journal.lines, journal.tag],
        }
        sealed["key"] = None if key is None else seal(key, json.dumps(sealed))
        write_text(temporary / SEAL, json.dumps(sealed))
        sync(temporary)
        os.rename(temporary, folder / name)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return name


def read_seal(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name / SEAL
    try:
        found = json.loads(path.read_bytes())
        files, (lines, tag), key = found["files"], found["journal"], found["key"]
        good = isinstance(lines, int) and isinstance(tag, str) and isinstance(key, (str, type(None)))
        if not good or not all(isinstance(files[f], str) for f in (TENSORS, STATE)):
            raise ValueError
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Damaged(f"{path} is damaged") from None
    if found.get("format") != FORMAT:
        raise Damaged(f"{path} is not of this version of sordino")
    return dict(found)


def sealed_with(sealed: Mapping[str, Any], key: bytes) -> bool:
    rest = {name: value for name, value in sealed.items() if name != "key"}
    return hmac.compare_digest(str(sealed["key"]).encode(), seal(key, json.dumps(rest)).encode())


def read(folder: Path, name: str) -> Generation:
    """A generation whose files are those that were sealed; else `Damaged`."""
    from safetensors import SafetensorError, safe_open

    sealed = read_seal(folder, name)
    for file in (STATE, TENSORS):
        path = folder / name / file
        try:
            same = file_digest(path) == sealed["files"][file]
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror or error}") from None
        if not same:
            raise Damaged(f"{path} is damaged: its digest is not the one that was saved")
    try:
        state = json.loads((folder / name / STATE).read_bytes())
        if not isinstance(state, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise Damaged(f"{folder / name / STATE} is not a saved state") from None
    try:
        with safe_open(folder / name / TENSORS, "pt") as file:
            # copies: a loaded run must not lie in a file that is removed by a later save
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{folder / name / TENSORS} cannot be read: {str(error).splitlines()[0]}") from None
    return Generation(name, state, tensors, sealed)


def forget_old(folder: Path, keep: set[str]) -> None:
    """Remove generations not in `keep`, and what a crash left."""
    for name in generations(folder):
        if name not in keep:
            shutil.rmtree(folder / name, ignore_errors=True)
    for half in folder.glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)


def leftovers(folder: Path) -> bool:
    """Whether something of the key's is still there."""
    return any((folder / name).exists() for name in ("key", "journal")) or any(folder.glob(".key.*"))


def erase_key(folder: Path) -> None:
    """Nobody may remove this run's noise any more."""
    for spare in folder.glob(".key.*"):  # a crash came while the key file was made
        Keys.erase(spare)
    Keys.erase(folder / "key")
    (folder / "journal").unlink(missing_ok=True)


# -- files ---------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
