"""A bar is shown on a terminal, after two seconds, and nowhere else."""

from __future__ import annotations

import sys
import time

import pytest

from sordino.curvature import progress


@pytest.mark.parametrize(("terminal", "waited", "shown"), [(True, 3.0, True), (True, 1.0, False), (False, 3.0, False)])
def test_when_a_bar_is_shown(
    terminal: bool, waited: float, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.Bar("eigenvalues") as bar:
        now = time.monotonic()
        monkeypatch.setattr(progress.time, "monotonic", lambda: now + waited)
        bar(3, 20, "17 products")
        bar(20, 20)
        monkeypatch.undo()
    out = capsys.readouterr()
    assert ("eigenvalues" in out.err) == shown and not out.out
