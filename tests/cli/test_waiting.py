"""The bar for what may be done in an instant."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from sordino.cli import waiting as module
from sordino.cli.waiting import waiting


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """stderr as a terminal whose text can be read."""
    text = io.StringIO()
    monkeypatch.setattr(module, "err", lambda: Console(file=text, force_terminal=True, width=100))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return text


def test_nothing_shows_of_what_is_quick(terminal: io.StringIO) -> None:
    with waiting("quick") as progress:
        progress(1, 2, "half")
    assert "quick" not in terminal.getvalue() and "half" not in terminal.getvalue()


def test_what_takes_longer_shows_and_goes_away(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    threads = threading.active_count()
    with pytest.raises(KeyError), waiting("slow") as progress:
        time.sleep(0.3)
        assert "slow" in terminal.getvalue()
        progress(1, 2, "half")
        time.sleep(0.3)
        assert "half" in terminal.getvalue()
        raise KeyError
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() == threads


def test_a_narrow_terminal_has_a_narrow_table(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.cli import comparison

    options = ("--examples", 400, "--batch-size", 100, "--epochs", 2, "--epsilon", 8, "--delta", "1e-5")
    wide = run("plan", *options, "--sampling", "fixed-order")[1]
    monkeypatch.setattr(comparison, "out", lambda: Console(width=80, highlight=False))
    narrow = run("plan", *options, "--sampling", "fixed-order", "--objective", "max-se")[1]
    assert "ms CPU" in wide and "RMSE" in wide.splitlines()[2]
    head = narrow.splitlines()[2]
    assert "max" in head and "RMSE" not in head and "ms CPU" not in head
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
