"""A folder with one JSON file a run, named by the run's content. Files are only ever added, each in one move.

Folders of several machines or days are joined by copying the files together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]  # plain JSON values that say everything about a run


def name_of(run: Run) -> str:
    """The same for equal runs, whatever the order of their keys.

    >>> name_of({"rate": 0.1, "seed": 1}) == name_of({"seed": 1, "rate": 0.1}) != name_of({"rate": 0.1, "seed": 2})
    True
    """
    text = json.dumps(run, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Results:
    """What came out, by run."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("*.json")):
            content = json.loads(path.read_text())
            if path.stem != name_of(content["run"]):
                raise ValueError(f"{path} holds another run than its name says; remove it or put it right")
            self._known[path.stem] = content

    def __contains__(self, run: object) -> bool:
        return isinstance(run, Mapping) and name_of(run) in self._known

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """(run, result), in no order that means anything."""
        for content in self._known.values():
            yield content["run"], content["result"]

    def get(self, run: Run) -> dict[str, Any] | None:
        content = self._known.get(name_of(run))
        return None if content is None else content["result"]

    def put(self, run: Run, result: Mapping[str, Any]) -> None:
        """Keep a result; what is there already stays as it is."""
        name = name_of(run)
        if name in self._known:
            return
        text = json.dumps({"run": dict(run), "result": dict(result)}, indent=1, ensure_ascii=False, allow_nan=False)
        part = self.folder / f".{name}.part"
        with part.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / f"{name}.json")
        self._known[name] = json.loads(text)
