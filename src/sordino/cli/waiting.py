"""A progress bar for what may be done in an instant: it shows on stderr (if that is a terminal) after two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .output import err

PATIENCE = 2.0  # seconds

Progress = Callable[[int, int, str], None]  # done, of how many, and what is next


@contextmanager
def waiting(what: str) -> Iterator[Progress]:
    """Shows `what` with the time it has taken; who knows how far it is calls what is yielded."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        console=err(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(what, total=None)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()

    def progress(done: int, total: int, now: str) -> None:
        bar.update(task, completed=done, total=total, description=now)

    try:
        yield progress
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
