"""A validation part inside the private data.

Each example is held out or not by a coin of its own, a hash of (seed, position) or of (seed, `key`), so that one
example more or less moves no other between the parts; hence the part has about, not exactly, the size asked for.
A permutation would give an exact size, and one more example would reshuffle both parts: the guarantee, which compares
two data sets that differ in one example's contribution, would not hold for the training part.

By position, the other examples must keep their places: the data set with example i left *empty*, or one appended at the
end. By `key` (a record's id, or its content) the order does not matter; a person's records with one id stay together.
Both parts are private. Only the training part has a guarantee; N, and so steps and noise, are those of that part.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..asked import shown, whole
from ..errors import SordinoError

Key = Callable[[int], "str | bytes | int"]


@dataclass(frozen=True)
class Split:
    """Two data sets, and which examples of the whole they hold (both in their old order)."""

    train: Any
    validation: Any
    train_indices: np.ndarray
    validation_indices: np.ndarray
    share: float
    seed: int
    by: str  # "position" or "key"

    @property
    def examples(self) -> int:
        """N of the training part, for `make_private`. By position it is as public as the whole N is."""
        return len(self.train_indices)

    def describe(self) -> str:
        """In words, for the record."""
        held, total = len(self.validation_indices), len(self.train_indices) + len(self.validation_indices)
        return f"{held} of {total} private examples, held out by {self.by} (share {self.share:g}, seed {self.seed})"


def split(dataset: Any, share: float = 0.1, *, seed: int, key: Key | None = None) -> Split:
    """Hold about `share` of `dataset` out. `key`: position → the id or content that decides instead of the position.

    >>> parts = split(range(1000), 0.1, seed=0)
    >>> parts.examples, parts.describe()
    (890, '110 of 1000 private examples, held out by position (share 0.1, seed 0)')
    """
    if isinstance(share, bool) or not isinstance(share, numbers.Real) or not 0 < share < 1:
        raise SordinoError(f"share={shown(share)} must lie strictly between 0 and 1, such as 0.1")
    seed = whole("seed", seed, 0)
    if seed >= 2**64:
        raise SordinoError(f"seed={seed} must be below 2^64")
    try:
        total = len(dataset)
    except TypeError:
        raise SordinoError(
            f"the data set, a {type(dataset).__name__}, has no length; a data set that is read by index is needed"
        ) from None
    limit = int(share * 2**64)
    if key is None:
        # Philox counts: word i is a function of (seed, i) alone.
        out = np.random.Philox(key=seed).random_raw(total) < np.uint64(limit)
    else:
        out = np.array([_coin(seed, key(i), i) < limit for i in range(total)], dtype=bool)
    train, held = np.flatnonzero(~out), np.flatnonzero(out)
    if not len(train) or not len(held):
        raise SordinoError(
            f"share={share:g} with seed {seed} leaves the {'validation' if len(train) else 'training'} part of "
            f"{total} examples empty; choose another share"
        )
    for indices in (train, held):
        indices.flags.writeable = False
    by = "position" if key is None else "key"
    return Split(_part(dataset, train), _part(dataset, held), train, held, float(share), seed, by)


def _coin(seed: int, name: Any, position: int) -> int:
    if isinstance(name, (bytes, bytearray)):
        content = b"b" + bytes(name)
    elif isinstance(name, str):
        content = b"s" + name.encode("utf-8", "surrogatepass")
    elif isinstance(name, numbers.Integral) and not isinstance(name, bool):
        content = b"i" + str(int(name)).encode()
    else:
        raise SordinoError(
            f"key({position}) gave {shown(name)}; it must be a string, bytes or a whole number that names the record"
        )
    digest = hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big")


def _part(dataset: Any, indices: np.ndarray) -> Any:
    """A data set of the same kind where that is quicker to read from; else a view."""
    import torch
    from torch.utils.data import Subset, TensorDataset

    from ..data import Arrays

    if isinstance(dataset, Arrays):
        return dataset.subset(indices.copy())  # torch warns of arrays that cannot be written to
    if type(dataset) is TensorDataset:
        rows = torch.from_numpy(indices.copy())
        return TensorDataset(*(t[rows.to(t.device)] for t in dataset.tensors))
    return Subset(dataset, indices.tolist())
