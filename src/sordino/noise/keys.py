"""The run's one secret, and the sub-keys that keep its purposes apart.

Whoever has the key can remove the noise. So it is never printed, logged, pickled
or put into a checkpoint; it lives in a file of its own (mode 0600) and is erased
when the run ends. Sub-keys come by HKDF-SHA256 (RFC 5869) with the purpose and the
generation as `info`: no two purposes share a stream, and a purpose that is not in
`PURPOSES` is an error rather than a new stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ..errors import SordinoError, StateError

#: Every use of the run's randomness, and whether its key may be changed within a run.
#: Only noise may: bins, parts and orders are drawn once and survive every resume (drawn
#: again, the accounting would no longer hold), and a redone step must see the same batch.
PURPOSES: dict[str, bool] = {
    "sampling": False,  # who is in which batch
    "noise": True,  # the released sum
    "noise-residual": True,  # a second sum released in the same step (the residual part of GEP)
    "noise-curvature": True,  # private curvature, where a part of the budget is spent on it
    "augmentation": False,
    "dropout": False,
    "public-batches": False,
    "public-labels": False,  # labels drawn from the model for public data
    "sensitivity-check": False,
    "journal": False,  # the keyed checksum of a step's clipped sum
}

_HEADER = "sordino-key-1"
_SIZE = 32


class SubKey(bytes):
    """Bytes that are not shown: what reports errors may write down a frame's variables.

    >>> SubKey(bytes(32)), [f"{SubKey(bytes(32))}"]
    (<sub-key>, ['<sub-key>'])
    """

    def __repr__(self) -> str:
        return "<sub-key>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("a key is not pickled or copied")


class Keys:
    """The 32-byte master secret of one run.

    >>> keys = Keys.from_seed(7)
    >>> keys
    <Keys: seeded, no privacy>
    >>> len(keys.subkey("noise")), keys.subkey("noise") == keys.subkey("noise", generation=1)
    (32, False)
    """

    __slots__ = ("_secret", "seeded")

    def __init__(self, secret: bytes, seeded: bool = False) -> None:
        if not isinstance(secret, (bytes, bytearray)) or len(secret) != _SIZE:
            raise SordinoError(f"a key is {_SIZE} bytes; make one with Keys.fresh()")
        self._secret: bytearray | None = bytearray(secret)
        self.seeded = seeded

    @classmethod
    def fresh(cls) -> Keys:
        """From the operating system's generator. A new run is a new key."""
        return cls(secrets.token_bytes(_SIZE))

    @classmethod
    def from_seed(cls, seed: int) -> Keys:
        """From a public number, for research and tests: anybody can draw the same noise, so nothing is guaranteed."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise SordinoError(f"seed={seed!r} must be a whole number")
        return cls(hashlib.sha256(f"sordino public seed {seed}".encode()).digest(), seeded=True)

    @classmethod
    def from_bytes(cls, secret: bytes) -> Keys:
        return cls(secret)

    def subkey(self, purpose: str, generation: int = 0) -> bytes:
        """The key of one purpose: 32 bytes, independent of all others for whoever lacks the master key."""
        if purpose not in PURPOSES:
            raise SordinoError(f"purpose={purpose!r} is not known; one of: {', '.join(PURPOSES)}")
        if isinstance(generation, bool) or not isinstance(generation, int) or generation < 0:
            raise SordinoError(f"generation={generation!r} must be a whole number from 0 on")
        if generation and not PURPOSES[purpose]:
            raise SordinoError(f"generation={generation}: the key of {purpose!r} never changes within a run; use 0")
        if self._secret is None:
            raise StateError("this key was destroyed; load it again or start a new run")
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = f"{purpose}\0{generation}".encode()
        return SubKey(HKDF(algorithm=SHA256(), length=_SIZE, salt=b"sordino 1", info=info).derive(bytes(self._secret)))

    # -- the file ----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file, mode 0600 from its first instant; whole or not at all; never over another key."""
        path = Path(path)
        if self._secret is None:
            raise StateError("this key was destroyed; there is nothing to save")
        text = f"{_HEADER} {'seeded' if self.seeded else 'secret'} {self._secret.hex()}\n".encode()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                _publish(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            _sync_folder(path.parent)
        except FileExistsError:
            raise StateError(f"{path} is there already; a new run is a new key: choose another folder") from None
        except OSError as error:
            raise StateError(f"cannot write the key file {path}: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a key file; one that others may read, or that is not whole, is refused."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
                    raise StateError(
                        f"{path} has mode {stat.S_IMODE(mode):04o}: others may have read the key; "
                        f"if nobody did, chmod 600 {path}"
                    )
                text = file.read(4096)
        except FileNotFoundError:
            raise StateError(f"no key file at {path}; a run without its key cannot go on: start a new run") from None
        except OSError as error:
            raise StateError(f"cannot read the key file {path}: {error.strerror or error}") from None
        try:
            header, kind, digits = text.decode("ascii").split()
            secret = bytes.fromhex(digits)
        except ValueError:
            header, kind, secret = "", "", b""
        if header != _HEADER or kind not in ("seeded", "secret") or len(secret) != _SIZE:
            raise StateError(f"{path} is not a whole key file of this version; restore it or start a new run")
        return cls(secret, seeded=kind == "seeded")

    @staticmethod
    def erase(path: str | os.PathLike[str]) -> None:
        """Overwrite the file and remove it. (A journalling disk or an SSD may keep older blocks all the same.)"""
        try:
            with open(path, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for filling in (secrets.token_bytes(size), bytes(size)):
                    file.seek(0)
                    file.write(filling)
                    file.flush()
                    os.fsync(file.fileno())
            os.unlink(path)
            _sync_folder(Path(path).parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StateError(f"cannot erase the key file {path} ({error.strerror or error}); remove it") from None

    @staticmethod
    def lock(path: str | os.PathLike[str]) -> KeyLock:
        """Hold the key file for this process until `release` (or the end of ``with``, or of the process)."""
        return KeyLock(path)

    def destroy(self) -> None:
        """Overwrite the secret in memory (sub-keys already handed out are not reached)."""
        if self._secret is not None:
            self._secret[:] = bytes(_SIZE)
            self._secret = None

    # -- nothing by which the secret could slip out ------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "destroyed" if self._secret is None else "seeded, no privacy" if self.seeded else "secret"
        return f"<Keys: {state}>"

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("Keys are not pickled or copied: save(path) writes the key file, load(path) reads it")

    __copy__ = __deepcopy__ = __reduce_ex__


class KeyLock:
    """An advisory lock on a key file: two processes on one key would release two sums under one noise."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd: int | None = None
        try:
            import fcntl
        except ImportError:  # not a POSIX system: nothing to lock with
            return
        try:
            fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise StateError(f"no key file at {path}; save the key before locking it") from None
        except OSError as error:
            raise StateError(f"cannot open the key file {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StateError(f"{path} is in use by another run; wait for it to end, or start a new run") from None
        except OSError as error:
            os.close(fd)
            raise StateError(f"cannot lock the key file {path}: {error.strerror or error}") from None
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> KeyLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished file its name, unless something has that name already."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError):  # a file system without hard links
        if path.exists():
            raise FileExistsError(str(path)) from None
        os.rename(temporary, path)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
