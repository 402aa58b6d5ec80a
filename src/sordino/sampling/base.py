"""The contract of a sampler: which examples are in the batch of a step.

A sampler is built from the public constants of a run (`Schedule`) and draws from a
secret keystream; the batch of step t is a pure function of (key, t). The sampler that
draws is the object the accountant is asked about, so the two cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from ..budget import Adjacency, Participation, Schedule
from ..errors import SordinoError


class Words(Protocol):
    """A keystream: a pure function of (key, step, name, offset, length) to uint32 words."""

    def words(self, step: int, name: str, offset: int, length: int) -> np.ndarray: ...


class Sampling(ABC):
    """Who is in the batch."""

    name: str
    adjacency: Adjacency
    rate: float | None = None  # probability of an example at one step, given all else; None if not independent

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @property
    @abstractmethod
    def participation(self) -> Participation:
        """How often and how far apart one example may appear."""

    @abstractmethod
    def draw(self, stream: Words, step: int, population: int) -> np.ndarray:
        """The sorted, distinct indices (int64, < `population`) of the batch of `step`."""

    def describe(self) -> str:
        """In words, for the guarantee's sentence."""
        return self.name

    def check(self, step: int, population: int) -> None:
        if not 0 <= step < self.schedule.steps:
            raise SordinoError(
                f"step {step} is outside the {self.schedule.steps} planned steps; the mechanism ends there"
            )
        if isinstance(population, bool) or population < 0:
            raise SordinoError(f"population={population!r} must be a whole number of at least 0")

    def __repr__(self) -> str:
        return f"<{self.describe()}, {self.schedule}>"


def uniform64(stream: Words, step: int, name: str, offset: int, count: int) -> np.ndarray:
    """`count` uniform 64-bit integers; the i-th is a pure function of (key, step, name, offset + i)."""
    words = np.asarray(stream.words(step, name, 2 * offset, 2 * count), dtype=np.uint32).astype(np.uint64)
    return (words[0::2] << np.uint64(32)) | words[1::2]


def fingerprint(stream: Words, name: str) -> bytes:
    """256 bits that tell one key from another, so that a table drawn once can be kept without keeping the key.

    Taken at a step no batch uses (2³² − 1), so they say nothing about any draw.
    """
    return np.asarray(stream.words(2**32 - 1, name, 0, 8), dtype=np.uint32).tobytes()
