"""Certified answers on disk: they take seconds, and a run asks for those of its plan.

An answer is a function of the key, and the key is everything it depends on, to the last bit: this room's own text too,
so that an accountant that was mended asks anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..strategies.cache import Input, cached
from .base import Answer
from .bins_gram import BinsGram

VERSION = 1


@lru_cache(maxsize=1)
def _text() -> str:
    """A digest of the accountants' source."""
    found = sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def kept(kind: str, gram: BinsGram, asked: tuple[float, ...], compute: Callable[[], Answer]) -> Answer:
    """``compute()``, or what it was."""
    key: dict[str, Input] = {
        "version": VERSION,
        "text": _text(),
        "gram": gram.gram,
        "totals": gram.totals,
        "largest": gram.largest,
        "steps": gram.steps,
        "asked": np.array(asked),
    }

    def arrays() -> dict[str, np.ndarray]:
        found = compute()
        return {"answer": np.array([found.epsilon, found.delta, found.failure_probability, float(found.samples)])}

    epsilon, delta, failure, samples = (float(value) for value in cached(f"bins-{kind}", key, arrays)["answer"])
    return Answer(epsilon, delta, failure, int(samples))
