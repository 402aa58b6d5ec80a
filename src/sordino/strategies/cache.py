"""Optimised matrices on disk, known by what they were optimised for.

`cached` returns the arrays that `compute` gave for exactly these inputs, now or in an earlier run. The file's name is a
digest of the kind, the format and the exact bytes of the inputs, so nothing has to be invalidated: who changes an
optimiser changes its kind (or a version among its inputs). The cache is a convenience and never in the way: a file
that is missing, damaged or not what its name says is computed again, and a folder that cannot be written costs a
warning. Nothing private is in it, only public constants and what follows from them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..budget import SordinoWarning
from ..folders import user_cache

FORMAT = 1
_SEAL = "__sha256__"

Input = float | int | str | np.ndarray
Arrays = dict[str, np.ndarray]


def cache_folder() -> Path:
    """``$SORDINO_CACHE``, or ``sordino/strategies`` in the user's cache folder."""
    if chosen := os.environ.get("SORDINO_CACHE"):
        return Path(chosen).expanduser()
    return user_cache() / "strategies"


def cached(kind: str, inputs: Mapping[str, Input], compute: Callable[[], Arrays]) -> Arrays:
    """``compute()``, or what it returned when it was last asked with these inputs."""
    key = digest({"": kind, **inputs})
    try:
        path = cache_folder() / f"{kind}-{key[:32]}.npz"
        found = _load(path, key)
    except Exception:  # no home folder, no permission, not a zip file, a truncated one, ...: as if it were not there
        found = None
    if found is not None:
        return found
    made = {name: np.asarray(array) for name, array in compute().items()}
    try:
        _store(cache_folder() / f"{kind}-{key[:32]}.npz", key, made)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        warnings.warn(
            f"the optimised {kind} could not be kept for the next run ({error}); set SORDINO_CACHE to a folder that "
            "can be written",
            SordinoWarning,
            stacklevel=2,
        )
    return made


def digest(values: Mapping[str, Input]) -> str:
    """SHA-256 over names, types and exact bytes; 1, 1.0, "1" and array(1.0) are four different inputs."""
    state = hashlib.sha256(f"sordino cache {FORMAT}\n".encode())
    for name in sorted(values):
        value = values[name]
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
            tag, body = f"{array.dtype.str}{array.shape}", array.tobytes()
        elif isinstance(value, str):
            tag, body = "str", value.encode()
        elif isinstance(value, (bool, int, np.integer)):
            tag, body = "int", str(int(value)).encode()
        else:
            tag, body = "float", struct.pack("<d", float(value))
        for part in (name.encode(), tag.encode(), body):
            state.update(struct.pack("<Q", len(part)) + part)
    return state.hexdigest()


def _seal(key: str, arrays: Arrays) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(digest({"": key, **arrays})), dtype=np.uint8)


def _load(path: Path, key: str) -> Arrays | None:
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    seal = arrays.pop(_SEAL, None)
    return arrays if seal is not None and np.array_equal(seal, _seal(key, arrays)) else None


def _store(path: Path, key: str, arrays: Arrays) -> None:
    """In one move: another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays, **{_SEAL: _seal(key, arrays)})  # type: ignore[arg-type]
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
