"""The harness: what is there is not done again, the most important run goes first, a cut-off run leaves nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from experiments.harness import Results, name_of, next_trials, work


def quiet(text: str) -> None:
    pass


def runs(*numbers: int) -> Any:
    return lambda results: [{"number": n} for n in numbers]


def square(run: Any) -> dict[str, Any]:
    return {"square": run["number"] ** 2}


def sleep(run: Any) -> dict[str, Any]:
    time.sleep(run["number"])
    return {"slept": run["number"]}


def die(run: Any) -> dict[str, Any]:
    if run["number"] == 2:
        os._exit(3)
    if run["number"] == 3:
        raise ValueError("three is not liked")
    return square(run)


def test_a_run_that_is_there_is_not_done_again(tmp_path: Path) -> None:
    asked = []

    def noted(run: Any) -> dict[str, Any]:
        asked.append(run["number"])
        return square(run)

    assert work(runs(1, 2), noted, Results(tmp_path), say=quiet).done == 2
    assert work(runs(2, 3, 1), noted, Results(tmp_path), say=quiet).done == 1
    assert asked == [1, 2, 3]
    assert {run["number"]: result["square"] for run, result in Results(tmp_path)} == {1: 1, 2: 4, 3: 9}


def test_files_are_named_by_content_and_only_added(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.put({"a": 1, "b": 0.5}, {"x": 1})
    results.put({"b": 0.5, "a": 1}, {"x": 2})  # the same run: what is there stays
    assert [p.name for p in tmp_path.iterdir()] == [name_of({"a": 1, "b": 0.5}) + ".json"]
    assert Results(tmp_path).get({"a": 1, "b": 0.5}) == {"x": 1}
    path = next(tmp_path.iterdir())
    path.write_text(json.dumps({"run": {"a": 2}, "result": {}}))
    with pytest.raises(ValueError, match="another run"):
        Results(tmp_path)


def test_nothing_but_finite_numbers_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Results(tmp_path).put({"a": 1}, {"x": float("nan")})
    assert len(Results(tmp_path)) == 0


def test_the_most_important_run_goes_first_and_results_open_new_ones(tmp_path: Path) -> None:
    order = []

    def available(results: Results) -> Any:
        """Tuning of 1 and 2, then the final runs of whichever is tuned."""
        for n in (1, 2):
            yield {"number": n}
        for n in (1, 2):
            if {"number": n} in results:
                yield {"number": 10 * n}

    def noted(run: Any) -> dict[str, Any]:
        order.append(run["number"])
        return square(run)

    assert work(available, noted, Results(tmp_path), say=quiet).done == 4
    assert order == [1, 2, 10, 20]


def test_no_run_is_started_that_would_not_end_in_time(tmp_path: Path) -> None:
    summary = work(runs(*range(1, 100)), sleep, Results(tmp_path), minutes=1 / 60, expected=2.0, say=quiet)
    assert (summary.done, summary.out_of_time) == (0, True)
    # the longest so far is what is expected of the next
    fast = work(
        lambda results: [{"number": 0.4 + 1e-3 * i} for i in range(9)], sleep, Results(tmp_path), minutes=1 / 60
    )
    assert fast.done == 2 and fast.out_of_time


def test_a_cut_off_run_leaves_nothing_and_workers_share_the_list(tmp_path: Path) -> None:
    wanted = [{"number": 30}, {"number": 0}, {"number": 0.01}, {"number": 0.02}]
    start = time.monotonic()
    summary = work(lambda results: wanted, sleep, Results(tmp_path), workers=2, minutes=4 / 60, say=quiet)
    assert time.monotonic() - start < 15
    assert (summary.done, summary.cut_off, summary.out_of_time) == (3, 1, True)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json"] * 3
    assert {"number": 30} not in Results(tmp_path)


def test_a_run_that_fails_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    said: list[str] = []
    summary = work(runs(1, 2, 3, 4, 5), die, Results(tmp_path), workers=2, say=said.append)
    assert summary.done == 3 and not summary.cut_off
    assert sorted(summary.failed.values()) == ["ValueError: three is not liked", "the process ended"]
    assert sum("FAILED" in text for text in said) == 2
    assert {run["number"] for run, _ in Results(tmp_path)} == {1, 4, 5}


def test_if_nothing_works_it_stops(tmp_path: Path) -> None:
    summary = work(runs(*[3] * 2, *range(100, 200)), lambda run: {}["gone"], Results(tmp_path), say=quiet)
    assert summary.done == 0 and len(summary.failed) == 5


GRID = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize("peak", GRID)
@pytest.mark.parametrize("start", GRID)
def test_tuning_finds_the_peak_wherever_it_starts(peak: float, start: float) -> None:
    scores: dict[float, float] = {}
    for _ in range(10):
        wanted, best = next_trials(GRID, start, scores, most=6)
        if best is not None:
            break
        scores |= {value: -abs(GRID.index(value) - GRID.index(peak)) for value in wanted}
    assert best == peak
    assert len(scores) <= 6


def test_tuning_ends_with_its_trials() -> None:
    scores = {1.0: 1.0, 2.0: 2.0, 4.0: 3.0}
    assert next_trials(GRID, 2.0, scores, most=3) == ([], 4.0)
    assert next_trials(GRID, 2.0, scores, most=4) == ([8.0], None)
    assert next_trials(GRID, 2.0, {2.0: 1.0}, most=1) == ([], 2.0)
