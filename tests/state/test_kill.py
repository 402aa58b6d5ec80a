"""`kill -9` at any point: the run goes on to the same bits, and never says that less was spent."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest


def spent(log: Path) -> list[tuple[int, int, float]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def never_less(log: Path) -> None:
    """In the order in which it was said, over all attempts: steps released and ε never go down."""
    said = spent(log)
    assert all(math.isfinite(epsilon) for _, _, epsilon in said) and said[-1][2] > 0
    assert all(a[1] <= b[1] and a[2] <= b[2] for a, b in zip(said, said[1:], strict=False))


def to_the_end(server: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    for _ in range(3):
        found: dict[str, Any] = server("train", **arguments)
        if not found["killed"]:
            return found
    raise AssertionError("killed without being asked")


def same(found: dict[str, Any], whole: dict[str, Any]) -> None:
    for name in ("digest", "optimizer", "rng", "epsilon", "remarks"):
        assert found[name] == whole[name], name


@pytest.fixture(scope="module")
def forty(server: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted run of 40 steps."""
    folder = tmp_path_factory.mktemp("whole")
    found: dict[str, Any] = server("train", folder=str(folder / "run"), log=str(folder / "log"), **FORTY)
    return found


FORTY = {"every": 5, "epochs": 10}


@pytest.mark.parametrize("point", range(10))
def test_killed_at_a_random_point(server: Any, forty: dict[str, Any], tmp_path: Path, point: int) -> None:
    """40 steps, a save every 5; killed once to three times on the way, wherever that is."""
    moments, longest = random.Random(point), forty["seconds"]
    for attempt in range(20):  # a moment is chosen anew if the run was over by then
        folder, log = tmp_path / f"run{attempt}", tmp_path / f"{attempt}.log"
        arguments = {"folder": str(folder), "log": str(log), **FORTY}
        if server("train", kill_after=moments.uniform(0.01, longest), **arguments)["killed"]:
            break
        longest *= 0.8
    else:
        raise AssertionError("never killed")
    for _ in range(point % 3):
        server("train", kill_after=moments.uniform(0.01, longest / 2), **arguments)
    same(to_the_end(server, arguments), forty)
    never_less(log)
    assert not (folder / "key").exists() and not (folder / "journal").exists()


def sweep(server: Any, folder: Path, stride: int, half: bool) -> None:
    """Killed just before what reaches the disk, or half-way through it; after the first save, every stride-th time."""
    options = {"every": 3, "epochs": 2}
    whole = server("train", folder=str(folder / "whole"), log=str(folder / "whole.log"), **options)
    assert whole["operations"] > 40
    for die_at in [*range(1, 30), *range(30, whole["operations"] + 1, stride)]:
        arguments = {"folder": str(folder / f"{die_at}"), "log": str(folder / f"{die_at}.log"), **options}
        assert server("train", die_at=die_at, half=half, **arguments)["killed"], die_at
        same(to_the_end(server, arguments), whole)
        never_less(folder / f"{die_at}.log")
        left = {p.name[:5] for p in (folder / f"{die_at}").iterdir()}
        assert left == {"step-"}, (die_at, left)


def test_killed_at_what_reaches_the_disk(server: Any, tmp_path: Path) -> None:
    sweep(server, tmp_path, 4, half=True)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_killed_at_everything_that_reaches_the_disk(server: Any, tmp_path: Path, half: bool) -> None:
    sweep(server, tmp_path, 1, half)
