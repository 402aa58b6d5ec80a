"""A bar on stderr for work that turns out to take longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

PATIENCE = 2.0  # seconds


class Bar:
    """Counts to `total`; shown from two seconds on, where stderr is a terminal with no other bar on it."""

    def __init__(self, description: str, total: int) -> None:
        self.description, self.total, self.done = description, total, 0
        self._began, self._lock = time.monotonic(), threading.Lock()
        self._bar: Any = None
        self._shown = self._given_up = False

    def tick(self, count: int) -> None:
        with self._lock:
            self.done += count
            if self._bar is None and not self._given_up and time.monotonic() - self._began > PATIENCE:
                self._show()
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done)

    def _show(self) -> None:
        self._given_up = True
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True), transient=True)
        self._task = bar.add_task(self.description, total=self.total)
        with contextlib.suppress(LiveError):  # inside another bar
            bar.start()
            self._bar = bar

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
