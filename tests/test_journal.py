"""The journal: no (row, generation) of noise ever hides two different sums, whatever fails."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sordino.errors import SordinoError, StateError
from sordino.journal import ForeignJournal, Journal
from sordino.noise import CorrelatedNoise, Keys
from sordino.strategies import make_strategy

KEY, OTHER = bytes(range(32)), bytes(32)


class Gen:
    """Only what the journal needs of the noise."""

    def __init__(self) -> None:
        self.first_steps = [0]

    def generation(self, row: int) -> int:
        return max(g for g, first in enumerate(self.first_steps) if first <= row)


def sums(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((3,), float(value))}


def reopened(path: Path, key: bytes = KEY) -> tuple[Journal, Gen]:
    journal, noise = Journal(key), Gen()
    journal.read(path)
    journal.resume()
    noise.first_steps = list(journal.first_steps)
    return journal, noise


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def begun(path: Path, steps: int = 3) -> tuple[Journal, Gen]:
    journal, noise = Journal(KEY), Gen()
    journal.begin(path)
    for step in range(steps):
        journal.admit(step, 1.0, sums(step), noise)
    return journal, noise


def test_the_same_sum_again_keeps_its_noise_and_another_gets_fresh_noise(path: Path) -> None:
    journal, noise = begun(path, 0)
    journal.admit(0, 1.0, sums(1), noise)
    journal.admit(1, 1.0, sums(2), noise)
    journal.admit(1, 1.0, sums(2), noise)
    assert noise.first_steps == [0]
    journal.admit(1, 1.0, sums(3), noise)
    assert noise.first_steps == [0, 1] and noise.generation(0) == 0 and noise.generation(1) == 1
    journal.admit(1, 1.0, sums(3), noise)  # the new one again
    assert noise.first_steps == [0, 1]
    journal.admit(1, 1.0, sums(2), noise)  # the first again: its generation is left behind, so fresh noise
    assert noise.first_steps == [0, 1, 1]
    journal.admit(0, 1.0, sums(9), noise)
    assert noise.first_steps == [0, 1, 1, 0] and noise.generation(1) == 3
    assert journal.steps == 2


def test_another_scale_is_another_release(path: Path) -> None:
    journal, noise = begun(path, 0)
    journal.admit(0, 1.0, sums(1), noise)
    journal.admit(0, 2.0, sums(1), noise)
    assert noise.first_steps == [0, 0]


def test_it_survives_and_goes_on(path: Path) -> None:
    journal, noise = begun(path)
    journal.admit(2, 1.0, sums(7), noise)
    journal.close()
    again, noise = reopened(path)
    assert again.entries == journal.entries and again.first_steps == [0, 2] and again.steps == 3
    assert (again.lines, again.tag) == (journal.lines, journal.tag)
    again.admit(2, 1.0, sums(7), noise)
    assert again.lines == journal.lines
    again.admit(3, 1.0, sums(3), noise)
    again.close()
    assert reopened(path)[0].steps == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_file_steps_are_counted(path: Path) -> None:
    """Nothing can be taken up again, and what a failed attempt did not hand out needs no other noise."""
    journal, noise = Journal(KEY), Gen()
    for step, value in ((0, 1), (1, 2), (1, 3)):
        journal.admit(step, 1.0, sums(value), noise)
    assert journal.steps == 2 and noise.first_steps == [0] and not journal.entries
    journal.begin(path)  # from here on, every step has its line
    journal.admit(2, 1.0, sums(1), noise)
    journal.close()
    again, _ = reopened(path)
    assert list(again.entries) == [(2, 0)] and again.steps == 3


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_line_cut_off_by_a_crash_was_never_released(path: Path, cut: int) -> None:
    journal, noise = begun(path)
    whole = path.read_bytes()
    journal.admit(3, 1.0, sums(3), noise)
    journal.close()
    line = path.read_bytes()[len(whole) :]
    if cut >= len(line):
        return
    path.write_bytes(whole + line[:cut])
    again, noise = reopened(path)
    complete = cut == len(line) - 1  # all but the line's end: then it counts
    assert again.steps == (4 if complete else 3)
    again.admit(3, 1.0, sums(4), noise)
    again.close()
    last, _ = reopened(path)
    assert last.steps == 4 and last.first_steps == ([0, 3] if complete else [0])


def test_a_tail_of_zeros_after_a_power_failure_is_cut_off_too(path: Path) -> None:
    journal, _ = begun(path)
    journal.close()
    with open(path, "ab") as file:
        file.write(bytes(500))
    again, noise = reopened(path)
    again.admit(3, 1.0, sums(3), noise)
    again.close()
    assert reopened(path)[0].steps == 4


def test_every_changed_bit_is_noticed(path: Path) -> None:
    """In any line but the last character, which a crash may have cut off."""
    journal, _ = begun(path, steps=2)
    journal.close()
    whole = path.read_bytes()
    for place in range(len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 7
        path.write_bytes(changed)
        with pytest.raises(StateError, match="journal"):
            Journal(KEY).read(path)


@pytest.mark.parametrize("change", ["remove", "repeat", "exchange", "other key's"])
def test_changed_lines_are_noticed(path: Path, tmp_path: Path, change: str) -> None:
    journal, _ = begun(path, steps=4)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "remove":
        del lines[2]
    elif change == "repeat":
        lines.insert(2, lines[2])
    elif change == "exchange":
        lines[2], lines[3] = lines[3], lines[2]
    else:
        other, noise = Journal(OTHER), Gen()
        other.begin(tmp_path / "other")
        other.admit(0, 1.0, sums(0), noise)
        lines[1] = (tmp_path / "other").read_bytes().splitlines(keepends=True)[1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(StateError, match=r"line \d of the journal .* is damaged; .* restore the file, or start a new"):
        Journal(KEY).read(path)


def test_another_runs_journal_is_refused(path: Path) -> None:
    begun(path)[0].close()
    with pytest.raises(ForeignJournal, match="is not the journal of this run"):
        Journal(OTHER).read(path)


def test_missing_and_empty(path: Path) -> None:
    with pytest.raises(StateError, match=r"journal .*journal is gone"):
        Journal(KEY).read(path)
    path.touch()
    with pytest.raises(StateError, match="is empty"):
        Journal(KEY).read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StateError, match="cannot read the journal"):
        Journal(KEY).read(path)


def test_lines_missing_at_the_end_are_noticed_against_a_save(path: Path) -> None:
    journal, noise = begun(path)
    least = [(journal.lines, journal.tag, "step-3")]
    journal.admit(3, 1.0, sums(3), noise)
    journal.close()
    Journal(KEY).read(path, least)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(StateError, match=r"has 3 lines, but step-3 was saved with 4"):
        Journal(KEY).read(path, least)


def test_an_older_copy_that_went_another_way_is_noticed(path: Path) -> None:
    journal, noise = begun(path, steps=2)
    older = path.read_bytes()
    journal.admit(2, 1.0, sums(2), noise)
    least = [(journal.lines, journal.tag, "step-3")]
    journal.close()
    path.write_bytes(older)
    other, noise = reopened(path)
    other.admit(2, 1.0, sums(5), noise)
    other.admit(3, 1.0, sums(5), noise)
    other.close()
    with pytest.raises(StateError, match="is not the one that step-3 was saved with"):
        Journal(KEY).read(path, least)


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(path)[0].close()
    monkeypatch.setattr("sordino.journal.NOISE", 2)
    with pytest.raises(StateError, match="another version"):
        Journal(KEY).read(path)


# -- a disk that fails -----------------------------------------------------------------------------


class Failing:
    """os.write and os.fsync that fail when told to, after writing a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.sync = True
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def write(self, fd: int, data: Any) -> int:
        if self.room is None:
            return self._write(fd, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(fd, bytes(data)[: self.room])
        self.room -= count
        return count

    def fsync(self, fd: int) -> None:
        if not self.sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(fd)


@pytest.mark.parametrize("how", ["no room", "a little room", "no sync"])
@pytest.mark.parametrize("truncate", [True, False])
def test_a_line_that_cannot_be_written_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str, truncate: bool
) -> None:
    journal, noise = begun(path)
    disk = Failing(monkeypatch)
    with monkeypatch.context() as m:
        if not truncate:
            m.setattr(os, "ftruncate", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        for value in (8.0, 9.0):  # a conflict: would re-key
            disk.room, disk.sync = {"no room": (0, True), "a little room": (50, True), "no sync": (None, False)}[how]
            with pytest.raises(StateError, match=r"cannot write the journal .*nothing was released: make room"):
                journal.admit(2, 1.0, sums(value), noise)
        assert noise.first_steps == [0] == journal.first_steps and journal.entries.keys() == {(0, 0), (1, 0), (2, 0)}
    disk.room, disk.sync = None, True
    journal.admit(2, 1.0, sums(2), noise)
    assert noise.first_steps == [0]
    journal.admit(3, 1.0, sums(3), noise)
    journal.close()
    assert reopened(path)[0].entries == journal.entries


def test_a_crash_in_the_middle_of_a_rekey(path: Path) -> None:
    """The line that re-keys is there, that of the new sum is not: the new generation is still unused."""
    journal, noise = begun(path)
    before = path.read_bytes()
    journal.admit(1, 1.0, sums(8), noise)
    journal.close()
    rekey, _ = path.read_bytes()[len(before) :].splitlines(keepends=True)
    path.write_bytes(before + rekey)
    again, noise = reopened(path)
    assert noise.first_steps == [0, 1] and (1, 1) not in again.entries
    again.admit(1, 1.0, sums(9), noise)
    assert noise.first_steps == [0, 1] and again.entries[1, 1] != journal.entries[1, 1]


# -- who may use it --------------------------------------------------------------------------------


def test_noise_that_was_re_keyed_elsewhere_is_refused() -> None:
    """Otherwise a generation that the journal counts anew would be used twice."""
    journal = Journal(KEY)
    noise = CorrelatedNoise(Keys.from_bytes(KEY), make_strategy("identity", 8))
    journal.admit(0, 1.0, sums(1), noise)
    noise.rekey(0)
    with pytest.raises(StateError, match="re-keyed"):
        journal.admit(0, 1.0, sums(2), noise)


def test_a_closed_journal_refuses(path: Path) -> None:
    journal, noise = begun(path)
    journal.close()
    with pytest.raises(StateError, match="closed"):
        journal.admit(3, 1.0, sums(3), noise)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_refused_and_holds_no_file(path: Path) -> None:
    journal, noise = begun(path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            journal.admit(3, 1.0, sums(3), noise)
            said = "released"
        except StateError as error:
            said = f"{error} {journal._fd}"
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    assert "forked process" in said and said.endswith("None")
    journal.admit(3, 1.0, sums(3), noise)


def test_it_is_not_copied_or_pickled_and_shows_no_key(path: Path) -> None:
    journal, _ = begun(path)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(SordinoError, match="not pickled or copied"):
            attempt(journal)
    shown = repr(journal) + str(vars(journal)) + str(vars(journal._checksum))
    assert KEY.hex() not in shown and str(KEY)[2:-1] not in shown
    raw = path.read_bytes()
    assert KEY not in raw and KEY.hex().encode() not in raw


def test_checksums_in_the_file_say_nothing_of_equal_sums(path: Path) -> None:
    """Empty batches give the same sum at two steps; who reads the journal without the key cannot tell."""
    journal, noise = Journal(KEY), Gen()
    journal.begin(path)
    for step in range(3):
        journal.admit(step, 1.0, sums(0), noise)
    rows = [json.loads(line.rpartition(" ")[0]) for line in path.read_text().splitlines()[1:]]
    assert len({row["sum"] for row in rows}) == 3
