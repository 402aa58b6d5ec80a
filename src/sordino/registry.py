"""Choices by name, the same in Python, TOML and the shell.

An entry carries what a person needs to choose (description, paper) and what
code needs to decide (capabilities) as data, and how to build the thing from the
text after the colon: ``lambda-cgd:0.95`` is the entry ``lambda-cgd`` with the
argument ``"0.95"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .errors import SordinoError

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One name a user can write."""

    name: str
    build: Callable[..., T]
    description: str
    paper: str = ""
    argument: str = ""  # what usually follows the colon; empty if nothing need follow
    optional: str = ""  # for an entry without a usual argument: what may follow; empty if nothing may
    capabilities: dict[str, Any] = field(default_factory=dict)

    def spelled(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


class Registry(Generic[T]):
    """The members of one choice (``noise``, ``sampling``, ``geometry``, ``denoising``)."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self._entries: dict[str, Entry[T]] = {}

    def add(self, entry: Entry[T]) -> None:
        assert entry.name not in self._entries, entry.name
        self._entries[entry.name] = entry

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, name: str) -> Entry[T]:
        """The entry called `name`, or an error that names the nearest known one.

        >>> Registry("noise").find("identty")
        Traceback (most recent call last):
        ...
        sordino.errors.SordinoError: noise='identty' is not known; choose one of: (none)
        """
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(str(name), self._entries, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? known: " if near else "choose one of: "
        known = ", ".join(e.spelled() for e in self) or "(none)"
        raise SordinoError(f"{self.choice}={name!r} is not known; {hint}{known}")

    def parse(self, text: str) -> tuple[Entry[T], str]:
        """Split ``name:argument`` and look the name up."""
        if not isinstance(text, str):
            raise SordinoError(
                f"{self.choice} must be a name such as {self.names()[0]!r}, not {type(text).__name__} {text!r}"
            )
        name, _, argument = text.partition(":")
        entry = self.find(name.strip())
        if argument and not (entry.argument or entry.optional):
            raise SordinoError(f"{self.choice}={text!r}: {entry.name!r} takes no argument; write {entry.name!r}")
        return entry, argument.strip()
