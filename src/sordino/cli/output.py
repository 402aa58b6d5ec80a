"""Where things are printed: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print("sordino: " + " ".join(message.split()), file=sys.stderr)


def warn(message: Warning | str, *_: object) -> None:
    """A warning as one line on stderr; takes the place of `warnings.showwarning`."""
    complain(f"warning: {message}")


def plain(value: Any) -> Any:
    """`value` as strict JSON: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> str:
    """
    >>> to_json({"epsilon": math.inf, "steps": 3})
    '{"epsilon": null, "steps": 3}'
    """
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def out() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def err() -> Console:
    """The console for everything else."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)


def grid(*columns: str, title: str = "") -> Table:
    """An empty table without lines between columns, so that it fits 80 characters."""
    from rich import box
    from rich.table import Table

    table = Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.columns[0].no_wrap = True
    return table


@contextmanager
def progress_bar(*columns: str) -> Iterator[Progress]:
    """A progress bar on stderr; nothing where stderr is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *(TextColumn(column) for column in columns),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err(),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield bar
