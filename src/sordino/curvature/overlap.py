"""Whether public examples are private ones: equal contents, found by hash.

Labels do not count. Numbers are compared as the data sets give them (integers as 64-bit, fractions as 32-bit floats),
so an image as bytes and the same image scaled to [−1, 1] differ, and so do two crops of one image.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..errors import PrivacyError
from ..loading import fetch
from .progress import Bar

if TYPE_CHECKING:
    from ..public import Public

CHUNK = 256
SIZE = 16  # bytes of a hash


@dataclass(frozen=True)
class Overlap:
    """How many of the public examples are among the private ones."""

    count: int
    public: int
    private: int
    pairs: tuple[tuple[int, int], ...]  # the first few: number in the public set, number in the private one

    def __str__(self) -> str:
        return f"{self.count} of {self.public} public examples are among the {self.private} private ones"


def overlap(public: Public | Any, private: Any, show: bool = True) -> Overlap:
    """Compare the contents of two data sets; the public one may be a `Public`, or a spectrum learnt from it."""
    there: dict[bytes, int] = {}
    for i, content in enumerate(contents(private, "private examples", show)):
        there.setdefault(content, i)
    known = getattr(public, "contents", None)
    if isinstance(known, bytes):
        here = [known[i : i + SIZE] for i in range(0, len(known), SIZE)]
    else:
        here = contents(getattr(public, "dataset", public), "public examples", show)
    pairs = [(i, there[content]) for i, content in enumerate(here) if content in there]
    return Overlap(len(pairs), len(here), len(private), tuple(pairs[:10]))


def refuse_overlap(public: Public | Any, private: Any, allow: bool = False, show: bool = True) -> Overlap:
    """The overlap; an error if there is any, unless `allow`."""
    found = overlap(public, private, show)
    if found.count and not allow:
        i, j = found.pairs[0]
        raise PrivacyError(
            f"{found} (public {i} is private {j}), and public data gets no protection; take them out of the public "
            "set, or say that they are public: allow_overlap=True"
        )
    return found


def contents(dataset: Any, what: str = "examples", show: bool = True) -> list[bytes]:
    """16 bytes for every example."""
    found: list[bytes] = []
    with Bar(f"hashing {what}", show) as bar:
        for lo in range(0, len(dataset), CHUNK):
            rows = range(lo, min(len(dataset), lo + CHUNK))
            found += [content(example) for example in fetch(dataset, rows)]
            bar(len(found), len(dataset))
    return found


def content(example: Any) -> bytes:
    """A hash of an example's inputs: the first of a tuple, all of a mapping but its labels.

    >>> import torch
    >>> content((torch.ones(2), 3)) == content(torch.ones(2, dtype=torch.float64)) != content(torch.zeros(2))
    True
    """
    digest = hashlib.blake2b(digest_size=SIZE)
    if hasattr(example, "keys"):
        example = {key: example[key] for key in sorted(example.keys()) if key not in ("labels", "label")}
    elif isinstance(example, (tuple, list)) and len(example):
        example = example[0]
    _feed(digest, example)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            digest.update(str(key).encode() + b"\0")
            _feed(digest, item)
    elif isinstance(value, (tuple, list)) and not all(isinstance(v, (int, float)) for v in value):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (str, bytes)):
        digest.update(value.encode() if isinstance(value, str) else value)
    else:
        array = value.detach().cpu().float().numpy() if _fraction(value) else np.asarray(value)
        kind: Any = np.float32 if array.dtype.kind in "fc" else np.int64
        digest.update(np.ascontiguousarray(array.astype(kind) + kind(0)).tobytes())  # −0 is 0


def _fraction(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
