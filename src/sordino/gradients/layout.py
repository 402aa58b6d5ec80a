"""Where the examples of a batch lie in a tensor.

A model is free to move the batch: time-first layers see (T, n, D), a flattened
layer (n·T, D), windowed attention (n·W, S, D). A `Layout` names the dimension
that holds the n examples and, when that dimension holds more than n rows,
whether the example is the slow or the fast index. Which of the candidates is
right is never guessed from sizes alone: a probe (`Recorder.probe`) sends the
gradient of one example back and looks where it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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


def candidates(shape: Sequence[int], n: int) -> list[Layout]:
    """Every layout that a tensor of this shape could have, the likeliest first."""
    exact = [Layout(d) for d, size in enumerate(shape) if size == n]
    folded = [Layout(d, slow) for slow in (True, False) for d, size in enumerate(shape) if size > n and size % n == 0]
    leading = [x for x in exact + folded if x.dim == 0]
    return leading[:1] + exact[bool(exact and exact[0].dim == 0) :] + [x for x in folded if x not in leading[:1]]
