"""One rule for choosing a number from a geometric grid, the same for every method: start, neighbours, then uphill.

The score at the start and at both its neighbours is asked for; while the best lies at an edge of what was tried, the
next beyond it. So a method's best is better than both its neighbours, unless the grid or the trials end. Of equals the
smaller counts: where everything failed, the way is down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def next_trials(
    grid: Sequence[float], start: float, scores: Mapping[float, float], most: int
) -> tuple[list[float], float | None]:
    """(what to try next, the best so far once nothing is left to try). Scores: larger is better.

    >>> next_trials([1, 2, 4, 8], 2, {}, most=4)
    ([2, 4, 1], None)
    >>> next_trials([1, 2, 4, 8], 2, {1: 0.1, 2: 0.2, 4: 0.3}, most=4)
    ([8], None)
    >>> next_trials([1, 2, 4, 8], 2, {1: 0.1, 2: 0.2, 4: 0.3, 8: 0.1}, most=4)
    ([], 4)
    >>> next_trials([1, 2, 4, 8], 4, {2: 0.0, 4: 0.0, 8: 0.0}, most=4)
    ([1], None)
    """
    if start not in grid:
        raise ValueError(f"start={start} is not in the grid {list(grid)}")
    at = list(grid).index(start)
    first = [grid[i] for i in (at, at + 1, at - 1) if 0 <= i < len(grid)][:most]
    missing = [value for value in first if value not in scores]
    if missing:
        return missing, None
    tried = [value for value in grid if value in scores]  # without gaps: it only grows at its ends
    best = max(tried, key=lambda value: scores[value])
    if len(tried) < most:
        beyond = list(grid).index(best) + (1 if best == tried[-1] else -1 if best == tried[0] else 0)
        if 0 <= beyond < len(grid) and grid[beyond] not in scores:
            return [grid[beyond]], None
    return [], best
