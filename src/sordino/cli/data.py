"""``sordino data``: fetch the public image sets, and say what is there."""

from __future__ import annotations

import sys
from typing import Any

from ..data import SOURCES, data_folder, fetch, fetched
from .output import err, grid, out, progress_bar, to_json


def listing() -> dict[str, Any]:
    sets = [
        {
            "name": source.name,
            "description": source.description,
            "megabytes": source.megabytes,
            "path": str(path) if (path := fetched(source.name)) else None,
        }
        for source in SOURCES.values()
    ]
    return {"folder": str(data_folder()), "sets": sets}


def data(names: list[str], everything: bool, again: bool, as_json: bool) -> None:
    if everything:
        names = list(SOURCES)
    if not names:
        found = listing()
        if as_json:
            print(to_json(found))
            return
        table = grid("set", "MB to fetch", "what it is", "where")
        for row in found["sets"]:
            table.add_row(row["name"], f"{row['megabytes']:g}", row["description"], row["path"] or "not fetched")
        table.add_row("digits", "0", "scikit-learn's digits: 1,797 grey images of 8×8", "embedded")
        out().print(table)
        return
    paths: dict[str, str] = {}
    with progress_bar() as bar:
        for name in names:
            task = bar.add_task(name, total=1.0)
            last = ""

            def show(what: str, done: float, task: Any = task) -> None:
                nonlocal last
                bar.update(task, description=what, completed=done)
                if not sys.stderr.isatty() and what != last:
                    err().print(what)
                last = what

            paths[name] = str(fetch(name, show, again=again))
            bar.update(task, description=name, completed=1.0)
    if as_json:
        print(to_json({"folder": str(data_folder()), "paths": paths}))
    else:
        for name, path in paths.items():
            print(f"{name}: {path}")
