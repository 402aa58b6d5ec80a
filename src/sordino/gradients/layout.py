"""Where the examples of a batch lie in a tensor.

A model is free to move the batch: time-first layers see (T, n, D), a flattened
layer (n·T, D), windowed attention (n·W, S, D). A `Layout` names the dimension
that holds the n examples and, when that dimension holds more than n rows,
whether the example is the slow or the fast index. Which of the candidates is
right is never guessed from sizes: a probe sends the gradient of single examples
back and looks where it arrives (`Layouts.look`, driven by probe.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import PrivacyError

Key = tuple[str, str, int]  # operation, parameter, how often before in this forward


class NeedsProbe(Exception):
    """A use was met whose layout nobody has verified yet (or, with None, another way to record the model)."""

    def __init__(self, key: Key | None) -> None:
        self.key = key


@dataclass(frozen=True)
class Layout:
    """The n examples lie in dimension `dim`; `slow` if example i holds a contiguous run of its rows."""

    dim: int
    slow: bool = True

    def fits(self, shape: Sequence[int], n: int) -> bool:
        return self.dim < len(shape) and shape[self.dim] > 0 and shape[self.dim] % n == 0

    def front(self, tensor: Tensor, n: int) -> Tensor:
        """The same numbers as (n, rows of an example, remaining dimensions).

        >>> import torch
        >>> Layout(1).front(torch.zeros(7, 3, 5), n=3).shape
        torch.Size([3, 1, 7, 5])
        >>> Layout(0).front(torch.zeros(12, 5), n=3).shape
        torch.Size([3, 4, 5])
        """
        rows = tensor.shape[self.dim] // n
        shape = list(tensor.shape)
        shape[self.dim : self.dim + 1] = [n, rows] if self.slow else [rows, n]
        tensor = tensor.reshape(shape)
        if self.slow:
            return tensor if self.dim == 0 else tensor.movedim((self.dim, self.dim + 1), (0, 1))
        return tensor.movedim((self.dim + 1, self.dim), (0, 1))

    def rows(self, tensor: Tensor, n: int) -> Tensor:
        """(n, everything but the last dimension, the last): what a matrix product sees of each example."""
        if self.dim == 0 and tensor.shape[0] == n:  # nearly always
            return tensor if tensor.dim() == 3 else tensor.reshape(n, -1, tensor.shape[-1])
        return self.front(tensor, n).flatten(1, -2)

    def back(self, fronted: Tensor) -> Tensor:
        """The inverse of `front`; leading dimensions before those of `front` are kept.

        >>> import torch
        >>> x = torch.arange(24).reshape(2, 6, 2)
        >>> all(torch.equal(l.back(l.front(x, 3)), x) for l in (Layout(1), Layout(1, slow=False)))
        True
        """
        return self._back(fronted, 0)

    def back_many(self, fronted: Tensor) -> Tensor:
        """`back` for a stack of them."""
        return self._back(fronted, 1)

    def _back(self, fronted: Tensor, skip: int) -> Tensor:
        at = self.dim + skip
        pair = (at, at + 1) if self.slow else (at + 1, at)
        return fronted.movedim((skip, skip + 1), pair).flatten(at, at + 1)


def candidates(shape: Sequence[int], n: int) -> list[Layout]:
    """Every layout that a tensor of this shape could have, the likeliest first."""
    exact = [Layout(d) for d, size in enumerate(shape) if size == n]
    folded = [Layout(d, slow) for slow in (True, False) for d, size in enumerate(shape) if size > n and size % n == 0]
    leading = [x for x in exact + folded if x.dim == 0][:1]
    return leading + [x for x in exact + folded if x not in leading]


class Layouts:
    """What is known about every use. A layout counts as known once a probe left no other.

    It is known for one rank, and for one row an example or for several: a use that
    changes either is probed again. Where a probe leaves several candidates (a
    gradient that is zero almost everywhere), or where rows are chosen by the data
    (`loose`), the answer holds for this physical batch only.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Key, int, bool], Layout] = {}  # (use, rank, several rows an example)
        self.now: dict[Key, Layout | None] = {}  # for this physical batch only; None: nothing arrives
        self.loose: set[Key] = set()
        self.poisoned = False  # no example of this pass may contribute
        self.silent: set[Key] = set()  # uses at which no example's gradient arrived, in a complete probe of this batch
        self.probing = False
        self.mask: Tensor | None = None  # (n,) the examples whose gradient was sent back
        self.possible: dict[Key, list[Layout]] = {}
        self.ranks: dict[Key, int] = {}
        self.rows: dict[tuple[Key, Layout], bool] = {}

    def new_batch(self) -> None:
        self.now.clear()
        self.loose.clear()
        self.silent.clear()

    def forget(self) -> None:
        """Nothing is known any more: another `losses` may use the model otherwise."""
        self.known.clear()
        self.new_batch()

    def find(self, key: Key, g: Tensor, n: int) -> Layout | None:
        """Where the examples lie in g, the gradient that arrived at a use; None if there is nothing to record."""
        if self.probing:
            self.look(key, g, n)
            return None
        if key in self.now:
            return self.now[key]
        if key not in self.loose:
            found = None
            for folded in (False, True):
                layout = self.known.get((key, g.dim(), folded))
                if layout is not None and layout.fits(g.shape, n) and (g.shape[layout.dim] > n) == folded:
                    found = layout if found is None else None
            if found is not None:
                return found
        if bool((g != 0).any()):
            if key not in self.silent:
                raise NeedsProbe(key)
            if bool((g.isfinite() & (g != 0)).any()):
                raise unknown(key, g.shape, n)
            self.poisoned = True  # nothing but NaN and infinities, of nobody knows whom
        return None

    def look(self, key: Key, g: Tensor, n: int) -> None:
        """One probe: gradients of the examples in `mask` arrived at this use. Strike out what contradicts it."""
        assert self.mask is not None
        possible = self.possible.get(key)
        if possible is None:
            possible = candidates(g.shape, n)
        arrived = (g != 0) & torch.isfinite(g)
        if bool(arrived.any()):
            self.ranks[key] = g.dim()
            kept = []
            for layout in possible:
                if not layout.fits(g.shape, n):
                    continue
                rows = layout.front(arrived, n).reshape(n, -1).any(1)
                if not bool((rows & ~self.mask).any()):
                    kept.append(layout)
                    self.rows[key, layout] = g.shape[layout.dim] > n
            if not kept:
                raise mixed(key, g.shape, n)
            possible = kept
        self.possible[key] = possible

    def start(self) -> None:
        self.probing = True
        self.possible.clear()
        self.ranks.clear()
        self.rows.clear()

    def unclear(self, wanted: Key | None) -> bool:
        """Whether a use may be read in two ways or in this batch only, or nothing has arrived at the one wanted."""
        if wanted is not None and wanted not in self.ranks:
            return True
        return any(len(self.possible[key]) > 1 or key in self.loose for key in self.ranks)

    def settle(self, complete: bool) -> None:
        """The end of a probe (of all examples, if complete): remember what is certain, and the rest for this batch."""
        for key, possible in self.possible.items():
            if key in self.ranks and len(possible) == 1 and key not in self.loose:
                self.known[key, self.ranks[key], self.rows[key, possible[0]]] = possible[0]
            elif complete and key in self.ranks:
                self.now[key] = possible[0] if possible else None
            elif complete:
                self.silent.add(key)

    def stop(self) -> None:
        self.probing, self.mask = False, None
        self.possible.clear()

    def state_dict(self) -> list[list[Any]]:
        return [[*key, rank, folded, x.dim, x.slow] for (key, rank, folded), x in self.known.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        self.known = {
            ((a, b, count), rank, folded): Layout(dim, slow) for a, b, count, rank, folded, dim, slow in state
        }


def unknown(key: Key, shape: Iterable[int], n: int) -> PrivacyError:
    operation, name, _ = key
    return PrivacyError(
        f"parameter {name!r}: whose gradient arrives at {operation} (output {tuple(shape)}, {n} examples) could not be "
        "found out, since none arrives when examples are sent back alone (underflow, or a model that changes from call "
        "to call); set physical_batch_size=1"
    )


def mixed(key: Key, shape: Iterable[int], n: int) -> PrivacyError:
    operation, name, _ = key
    return PrivacyError(
        f"parameter {name!r}: the gradient of one example's loss at {operation} (output {tuple(shape)}, {n} examples) "
        "does not stay in that example's own rows, so examples are mixed before or after it; remove what mixes them "
        "(batch statistics, a shared loss term, rows sorted or packed by length), or set physical_batch_size=1"
    )
