"""A progress bar for what lasts longer than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

PATIENCE = 2.0  # seconds without a bar


class Bar:
    """``bar(done, total)`` as often as one likes; shows itself on stderr, if that is a terminal, after two seconds.

    >>> with Bar("Lanczos") as bar:
    ...     bar(1, 3)
    """

    def __init__(self, what: str, show: bool = True) -> None:
        self.what, self.show = what, show and sys.stderr.isatty()
        self.began = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: int, total: int, note: str = "") -> None:
        if not self.show or (self._bar is None and time.monotonic() - self.began < PATIENCE):
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            more = (TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, *more, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=total, note=note)
        self._bar.update(self._task, completed=done, total=total, note=note)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
