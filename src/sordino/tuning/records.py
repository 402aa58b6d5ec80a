"""What was tried: in memory a `TuningRecord`, in a folder one line of JSON a trial, written when the trial has ended.

    {"tuning": 1, "space": {…}, "seed": 0, "maximize": true, "validation": "…", "note": "private: …"}
    {"trial": 0, "settings": {"learning_rate": 0.31}, "score": 0.52, "failure": null, "seconds": 61.0}

Scores on private examples are private: the file is readable by its owner only and says so.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import SordinoError, StateError
from .space import Space, as_data

FILE, FORMAT = "trials.jsonl", 1
NOTE = "private: computed from private data without noise, covered by no guarantee, not to be published"


@dataclass(frozen=True)
class Trial:
    """One trial: its settings, and its score or why it has none."""

    number: int
    settings: dict[str, Any]
    score: float | None
    failure: str | None = None  # one line
    seconds: float = 0.0
    traceback: str | None = None


@dataclass(frozen=True)
class TuningRecord:
    """All trials of a search, in order."""

    trials: tuple[Trial, ...]
    space: Space
    seed: int
    maximize: bool
    validation: str  # what the scores are measured on, in words

    @property
    def scored(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.score is not None)

    @property
    def best(self) -> Trial:
        """The best trial; of equals the earliest."""
        if not self.scored:
            first = self.trials[0].failure if self.trials else "there were none"
            raise SordinoError(f"none of the {len(self.trials)} trials has a score; the first: {first}")
        sign = -1.0 if self.maximize else 1.0
        return min(self.scored, key=lambda t: (sign * _number(t.score), t.number))

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the best trial."""
        return dict(self.best.settings)

    def remark(self) -> str:
        """What the guarantee of the final run has to say: `private.remarks.append(record.remark())`."""
        failed = len(self.trials) - len(self.scored)
        ranges = ", ".join(f"{name} {values}" for name, values in self.space.items())
        count = f"{len(self.trials)} trial{'s' if len(self.trials) != 1 else ''}" + (
            f" ({failed} failed)" if failed else ""
        )
        return (
            f"settings chosen by {count} over {ranges}, scored on {self.validation}: neither the trials nor the choice "
            "are covered by ε"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON. Private, where the scores are."""
        return {
            "space": as_data(self.space),
            "seed": self.seed,
            "maximize": self.maximize,
            "validation": self.validation,
            "trials": [asdict(t) for t in self.trials],
            "remark": self.remark(),
        }


def _number(score: float | None) -> float:
    return math.nan if score is None else score


class Log:
    """The trials of one search in a folder, held by one process; without a folder, in memory."""

    def __init__(self, folder: str | os.PathLike[str] | None, empty: TuningRecord) -> None:
        self.trials: list[Trial] = []
        self._fd: int | None = None
        if folder is None:
            return
        self.path = Path(folder) / FILE
        header = {"tuning": FORMAT, **{k: v for k, v in empty.as_dict().items() if k not in ("trials", "remark")}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._lock()
            self._end = self._read(header)
            if not self._end:
                self._write({**header, "note": NOTE})
        except OSError as error:
            self.close()
            raise StateError(f"cannot use {self.path}: {error.strerror or error}; choose another folder=") from None
        except BaseException:
            self.close()
            raise

    def add(self, trial: Trial) -> None:
        """On the disk when this returns."""
        if self._fd is not None:
            row = asdict(trial)
            try:
                self._write({"trial": row.pop("number"), **row})
            except OSError as error:
                raise StateError(
                    f"cannot write {self.path}: {error.strerror or error}; make room, then call tune again: trials "
                    f"before number {trial.number} are kept"
                ) from None
        self.trials.append(trial)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not a POSIX system: nothing to lock with
            return
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{self.path} is in use by another search; wait for it to end, or choose another folder="
            raise StateError(text) from None

    def _read(self, wanted: dict[str, Any]) -> int:
        """Take up what is there; where the last whole line ends. A line cut off by a crash is a trial done again."""
        raw = self.path.read_bytes()
        end = raw.rfind(b"\n") + 1
        rows: list[dict[str, Any]] = []
        if raw and not end and not raw.startswith(b'{"tuning"'):  # not even the beginning of a header of ours
            raise StateError(f"{self.path} is not a record of trials; choose another folder=")
        for i, line in enumerate(raw[:end].splitlines()):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError
                rows.append(row)
            except ValueError:
                raise StateError(
                    f"line {i + 1} of {self.path} is damaged; restore it, or choose another folder="
                ) from None
        if not rows:
            return 0
        _same_search(self.path, rows[0], json.loads(json.dumps(wanted)))
        self.trials = [_trial(self.path, i, row, wanted["space"]) for i, row in enumerate(rows[1:])]
        return end

    def _write(self, row: dict[str, Any]) -> None:
        assert self._fd is not None
        text = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        os.ftruncate(self._fd, self._end)
        os.lseek(self._fd, self._end, os.SEEK_SET)
        left = memoryview(text)
        while left:
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)
        self._end += len(text)


def _same_search(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    if found.get("tuning") != wanted["tuning"]:
        raise StateError(f"{path} is not a record of trials of this version; choose another folder=")
    for name, value in wanted.items():
        if found.get(name) != value:
            raise StateError(
                f"{path} is of a search with {name}={found.get(name)!r}, and now it is {value!r}; choose another "
                "folder=, or ask for the same search"
            )


def _trial(path: Path, number: int, row: dict[str, Any], space: Any) -> Trial:
    try:
        trial = Trial(row.pop("trial"), **row)
        if trial.number != number or not isinstance(trial.settings, dict) or trial.settings.keys() != space.keys():
            raise ValueError
        if trial.score is not None and not math.isfinite(trial.score):
            raise ValueError
        return trial
    except (KeyError, TypeError, ValueError):
        raise StateError(f"line {number + 2} of {path} is damaged; restore it, or choose another folder=") from None
