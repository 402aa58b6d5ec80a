"""What was about to be released, written down before it was: one line a step.

A (key, purpose, step) triple may noise only one released sum: the difference of
two releases under equal noise is the exact difference of their gradients. After a
resume, a step is done again. If the journal shows the same sum, the same noise is
added and the release is the same. If the sum differs, its noise must come from a
fresh sub-key, and the guarantee says what that assumes: that nothing computed from
the first attempt left the machine.

The checksum of the clipped sum is keyed: it is private, and lies beside the key
(same mode), never in a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from .errors import StateError


def checksum(key: bytes, sums: Mapping[str, Tensor]) -> str:
    """64 bits that two different sums share with probability 2⁻⁶⁴, and that say nothing without the key."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for name in sorted(sums):
        digest.update(name.encode() + b"\0")
        digest.update(fold(sums[name]))
    return digest.hexdigest()[:16]


def fold(tensor: Tensor) -> bytes:
    """The bits of a tensor. On a GPU they are first mixed down there, so that little has to be copied."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        return flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() < 1024 else _blake(flat)
    bits = flat.contiguous().view(torch.int32 if flat.element_size() == 4 else torch.int64).to(torch.int64)
    # two random linear functions of the words modulo 2⁶⁴, odd multipliers from a fixed recurrence
    index = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    parts = []
    for multiplier in (-7046029254386353131, -4417276706812531889):
        weight = (index * multiplier) ^ ((index * multiplier) >> 29)
        parts.append((bits * (weight | 1)).sum())
    return torch.stack(parts).cpu().numpy().tobytes()


def _blake(flat: Tensor) -> bytes:
    return hashlib.blake2b(memoryview(flat.contiguous().numpy()).cast("B"), digest_size=16).digest()


class Journal:
    """Checksums by (step, generation) and the first steps of the noise key's generations; in memory, or in a file too."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], str] = {}
        self.first_steps: list[int] = [0]
        self.path: Path | None = None
        self._file: IO[str] | None = None

    @property
    def steps(self) -> int:
        """How many steps may have been released."""
        return 1 + max((step for step, _ in self.entries), default=-1)

    def open(self, path: Path) -> None:
        """Continue the journal at `path`, or begin it there with what is in memory."""
        existing = path.exists()
        try:
            if existing:
                self._read(path)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._file = os.fdopen(fd, "a")
            self.path = path
            if not existing:
                for first in self.first_steps[1:]:
                    self._write({"rekey": first})
                for (step, generation), value in self.entries.items():
                    self._write({"step": step, "generation": generation, "sum": value})
        except OSError as error:
            raise StateError(f"cannot open the journal {path}: {error.strerror or error}") from None

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):  # a line cut off by a crash: its step was never released
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        self.entries, self.first_steps = {}, [0]
        for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
            try:
                row = json.loads(line)
                if "rekey" in row:
                    self.first_steps.append(int(row["rekey"]))
                else:
                    self.entries[int(row["step"]), int(row["generation"])] = str(row["sum"])
            except (ValueError, KeyError, TypeError):
                raise StateError(
                    f"line {number} of the journal {path} is damaged; without it a step could be released twice under "
                    "one noise: restore the file, or start a new run"
                ) from None

    def _write(self, row: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StateError(
                f"cannot write the journal {self.path}: {error.strerror or error}; nothing was released, free some "
                "space and go on"
            ) from None

    def note(self, step: int, generation: int, value: str) -> None:
        """Before the noise of `step` is released."""
        if self.entries.get((step, generation)) == value:
            return
        self._write({"step": step, "generation": generation, "sum": value})
        self.entries[step, generation] = value

    def rekey(self, step: int) -> None:
        self._write({"rekey": step})
        self.first_steps.append(step)

    def conflicts(self, step: int, generation: int, value: str) -> bool:
        """Whether this (step, generation) was about to noise another sum before."""
        known = self.entries.get((step, generation))
        return known is not None and known != value

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
