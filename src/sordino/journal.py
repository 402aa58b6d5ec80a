"""What was about to be released, written down before it was: one line a step.

A (key, purpose, step) triple may noise only one released sum: the difference of
two releases under equal noise is the exact difference of their gradients. A step is
done again after a resume, or after an attempt that failed half-way. If the journal
shows the same sum, the same noise is added and the release is the same. If the sum
differs, this row of noise and all later ones come from a fresh sub-key (the next
*generation*), and the guarantee says what that assumes: that nothing computed from
the first attempt left the machine.

    {"journal": 1, "noise": 1} 5f0c…          the header
    {"step": 0, "generation": 0, "sum": "…"} 91aa…
    {"rekey": 3} 07d2…                        rows 3, 4, … are drawn anew
    {"step": 3, "generation": 1, "sum": "…"} c3e8…

Every line ends in a keyed tag of itself and all lines before it. So a journal of
another run, a changed line and lines missing in between are noticed; lines missing
at the end are noticed against the saved generations, which tell how many there were.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor

from .checksum import Checksum
from .errors import SordinoError, StateError

FORMAT = 1
NOISE = 1  # to be raised when the same key begins to give other normals: old runs must then not go on
REMEDY = "without it a step could be released twice under one noise: restore the file, or start a new run"


class ForeignJournal(StateError):
    """Not written under this key."""


class Noise(Protocol):
    """What is needed of the noise: which generation of the key covers a row, and from where each does."""

    first_steps: list[int]

    def generation(self, row: int) -> int: ...


class Journal:
    """Checksums by (step, generation), and the first steps of the key's generations; kept once there is a folder."""

    def __init__(self, key: bytes) -> None:
        self.entries: dict[tuple[int, int], str] = {}
        self.first_steps: list[int] = [0]
        self.steps = 0  # how many steps may have been released
        self.handed = 0  # how many this process has handed out
        self.closed = False
        self.path: Path | None = None
        self.lines, self.tag = 0, ""  # of the file
        self._mac, self._checksum, self._process = _mac(key), Checksum(key), os.getpid()
        self._fd: int | None = None
        self._end, self._dirty = 0, False
        _open.add(self)

    # -- before every release ----------------------------------------------------------------------------------------

    def admit(self, step: int, scale: float, sums: Mapping[str, Tensor], noise: Noise) -> None:
        """Write down the sum that the noise of `step` is about to hide; re-key `noise` if it already hid another.

        When this returns, the line is on the disk. If it raises, nothing may be released.
        """
        self.check()
        if noise.first_steps != self.first_steps:
            raise StateError("the noise was re-keyed behind the journal's back; load the last save to go on")
        if step < self.handed:
            raise StateError(f"step {step} was handed out already (next: {self.handed}); no step is released twice")
        if self.path is None:
            # A run that lives in memory alone cannot be resumed. Its only redone step is one that raised, and a step
            # that is handed out is counted first: the noise of a sum that nobody has seen may hide another.
            self.steps = max(self.steps, step + 1)
            return
        value = self._checksum(step, scale, sums)
        generation = noise.generation(step)
        known = self.entries.get((step, generation))
        if known == value:
            return
        rows: list[dict[str, Any]] = []
        if known is not None:
            generation = len(self.first_steps)
            rows.append({"rekey": step})
        rows.append({"step": step, "generation": generation, "sum": value})
        self._append(rows)
        for row in rows:
            self._take(row)
        noise.first_steps = list(self.first_steps)

    def handed_out(self, step: int) -> None:
        """The release of `step` left: its noise, and that of steps before it, is used up."""
        self.handed = max(self.handed, step + 1)

    def check(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                "this run was copied into a forked process, and two processes on one key would use one noise twice; "
                "call make_private in the process that trains"
            )
        if self.closed:
            raise StateError("this run was closed and its key let go; call make_private, then load(folder) to go on")

    # -- the file ----------------------------------------------------------------------------------------------------

    def begin(self, path: Path) -> None:
        """A new file. What was released before it lies before the first save, so nobody can go back to it."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise StateError(f"cannot make the journal {path}: {error.strerror or error}") from None
        self.path, self.lines, self.tag, self._end, self._dirty = path, 0, "", 0, False
        self._append([{"journal": FORMAT, "noise": NOISE}])

    def read(self, path: Path, least: Sequence[tuple[int, str, str]] = ()) -> None:
        """Take up the lines of `path`. `least`: (lines, tag of the last, whose) that must be among them."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise StateError(f"the journal {path} is gone; {REMEDY}") from None
        except OSError as error:
            raise StateError(f"cannot read the journal {path}: {error.strerror or error}") from None
        if not raw:
            raise StateError(f"the journal {path} is empty; {REMEDY}")
        wanted = {lines: (tag, whose) for lines, tag, whose in least}
        position, cut = 0, False
        while position < len(raw):
            stop = raw.find(b"\n", position)
            line, cut = (raw[position:], True) if stop < 0 else (raw[position:stop], False)
            row, tag = self._parse(line)
            if row is None:
                if cut and self.lines:  # by a crash while it was written: its step was never released
                    break
                if not self.lines:
                    raise ForeignJournal(f"{path} is not the journal of this run: {REMEDY}")
                raise StateError(f"line {self.lines + 1} of the journal {path} is damaged; {REMEDY}")
            if not self.lines:
                self._check_header(row, path)
            elif not self._take(row):
                raise StateError(f"line {self.lines + 1} of the journal {path} is not of this version; {REMEDY}")
            self.lines, self.tag = self.lines + 1, tag
            position = len(raw) if cut else stop + 1
            self._end = position + cut
            known, whose = wanted.pop(self.lines, (tag, ""))
            if known != tag:
                raise StateError(f"the journal {path} is not the one that {whose} was saved with; {REMEDY}")
        if wanted:
            lines = max(wanted)
            raise StateError(
                f"the journal {path} has {self.lines} lines, but {wanted[lines][1]} was saved with {lines}; {REMEDY}"
            )
        # a last line without its end: if it is whole it gets its end in `resume`, if it was cut off it goes there
        self.path, self._dirty = path, cut

    def resume(self) -> None:
        """Open the file that was read, to go on with it."""
        assert self.path is not None
        try:
            self._fd = os.open(self.path, os.O_RDWR)
            os.chmod(self.path, 0o600)
            if self._dirty:
                os.ftruncate(self._fd, self._end)  # longer by one where the last line lacks only its end
                os.lseek(self._fd, self._end - 1, os.SEEK_SET)
                os.write(self._fd, b"\n")
                os.fsync(self._fd)
                self._dirty = False
        except OSError as error:
            raise StateError(f"cannot open the journal {self.path}: {error.strerror or error}") from None

    def there(self) -> bool:
        """Whether the open file still is the one that the folder shows."""
        if self._fd is None or self.path is None:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """All of `rows`, on the disk when this returns; none of them if it raises."""
        if self._fd is None:
            return
        text, tag = b"", self.tag
        for row in rows:
            body = json.dumps(row)
            tag = self._seal(tag, body)
            text += f"{body} {tag}\n".encode()
        try:
            if self._dirty:
                os.ftruncate(self._fd, self._end)
            self._dirty = True
            os.lseek(self._fd, self._end, os.SEEK_SET)
            left = memoryview(text)
            while left:
                left = left[os.write(self._fd, left) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise StateError(
                f"cannot write the journal {self.path}: {error.strerror or error}; nothing was released: make room, "
                "then try the same step again"
            ) from None
        self._end, self._dirty, self.lines, self.tag = self._end + len(text), False, self.lines + len(rows), tag

    def _seal(self, before: str, body: str) -> str:
        tag = self._mac.copy()
        tag.update(f"line\0{before}\0{body}".encode())
        return tag.hexdigest()[:32]

    def _parse(self, line: bytes) -> tuple[dict[str, Any] | None, str]:
        body, _, tag = line.decode("utf-8", "replace").rpartition(" ")
        if not hmac.compare_digest(self._seal(self.tag, body).encode(), tag.encode()):
            return None, ""
        row = json.loads(body)  # written by this library: the tag says so
        return row, tag

    def _check_header(self, row: dict[str, Any], path: Path) -> None:
        if row != {"journal": FORMAT, "noise": NOISE}:
            raise StateError(f"{path} is of another version of sordino; finish the run with the version that began it")

    def _take(self, row: dict[str, Any]) -> bool:
        if "rekey" in row:
            self.first_steps.append(row["rekey"])
        elif "step" in row:
            self.entries[row["step"], row["generation"]] = row["sum"]
            self.steps = max(self.steps, row["step"] + 1)
        else:
            return False
        return True

    # -- letting go --------------------------------------------------------------------------------------------------

    def forget_file(self) -> None:
        """Go on in memory: the folder could not be made."""
        self._close_fd()
        self.path = None

    def close(self) -> None:
        self._close_fd()
        self.closed = True

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting():  # the modules may be gone, and the process's end closes everything
            self._close_fd()

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("a journal is not pickled or copied: it goes with its key; use save and load")

    __copy__ = __deepcopy__ = __reduce_ex__


def _mac(key: bytes) -> hmac.HMAC:
    """Keeps the key out of what could be shown: the object tells nothing of it."""
    return hmac.new(key, digestmod=hashlib.sha256)


def seal(key: bytes, text: str) -> str:
    """A tag that ties `text` to the run's key."""
    return hmac.new(key, f"save\0{text}".encode(), hashlib.sha256).hexdigest()


_open: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget_files() -> None:
    """In a forked child (a loader's worker, say): these files are the parent's."""
    for journal in list(_open):
        journal._close_fd()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_files)
