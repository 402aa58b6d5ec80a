"""The cache gives back what was computed, for exactly these inputs, and is never in the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sordino.budget import SordinoWarning
from sordino.strategies.cache import cache_folder, cached, digest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"c": np.array([1.0, np.pi, 1e-300]), "count": np.array(3)}


def ask(compute: Counting, **inputs: float | str | np.ndarray) -> None:
    found = cached("trial", inputs or {"steps": 7}, compute)
    assert set(found) == {"c", "count"} and found["count"] == 3
    np.testing.assert_array_equal(found["c"], [1.0, np.pi, 1e-300])  # bit by bit


def test_computed_once_and_read_the_second_time(folder: Path) -> None:
    compute = Counting()
    ask(compute)
    ask(compute)
    assert compute.calls == 1 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"b": 2.0, "w": np.arange(3.0)},
        {"b": np.nextafter(1.0, 2.0), "w": np.arange(3.0)},
        {"b": 1, "w": np.arange(3.0)},
        {"b": "1.0", "w": np.arange(3.0)},
        {"b": 1.0, "w": np.arange(3.0)[::-1]},
        {"b": 1.0, "w": np.arange(3)},
        {"b": 1.0, "w": np.arange(3.0)[:, None]},
        {"b": 1.0, "v": np.arange(3.0)},
        {"b": 1.0},
    ],
)
def test_any_change_of_the_inputs_is_another_result(other: dict[str, object]) -> None:
    compute = Counting()
    ask(compute, b=1.0, w=np.arange(3.0))
    ask(compute, **other)  # type: ignore[arg-type]
    assert compute.calls == 2
    ask(compute, w=np.arange(6.0)[:3], b=1.0)  # neither the order nor the memory layout is an input
    assert compute.calls == 2
    assert cached("another", {"b": 1.0, "w": np.arange(3.0)}, compute) and compute.calls == 3


def test_names_and_values_cannot_be_mistaken_for_each_other() -> None:
    assert digest({"a": "b", "c": "d"}) != digest({"a": "bc", "": "d"})
    assert digest({"ab": "c"}) != digest({"a": "bc"})


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "bit", "another's", "pickle", "folder"])
def test_a_damaged_file_is_computed_again(folder: Path, damage: str) -> None:
    compute = Counting()
    ask(compute)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
        with pytest.warns(SordinoWarning):
            ask(compute)
        assert compute.calls == 2
        return
    if damage == "another's":
        cached("trial", {"steps": 8}, lambda: {"c": np.zeros(3), "count": np.array(3)})
        (other,) = set(folder.iterdir()) - {path}
        shutil.copy(other, path)
    elif damage == "pickle":
        np.savez(path, c=np.array([{}], dtype=object))  # type: ignore[arg-type]
    else:
        start = whole.index(np.array(np.pi).tobytes())
        bit = whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :]
        path.write_bytes({"empty": b"", "garbage": b"\0" * 999, "cut": whole[:-9], "bit": bit}[damage])
    ask(compute)
    assert compute.calls == 2
    ask(compute)
    assert compute.calls == 2  # and the new file took its place


def test_a_folder_that_cannot_be_made_costs_a_warning(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    compute = Counting()
    for calls in (1, 2):
        with pytest.warns(SordinoWarning, match="SORDINO_CACHE"):
            ask(compute)
        assert compute.calls == calls


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(SordinoWarning, match="No space left"):
        ask(Counting())
    assert list(folder.iterdir()) == []


def test_a_failing_computation_is_not_kept(folder: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached("trial", {"steps": 7}, fail)
    assert not folder.exists()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path(os.environ["SORDINO_CACHE"])
    monkeypatch.delenv("SORDINO_CACHE")
    assert cache_folder().name == "strategies" and cache_folder().parent.name == "sordino"
