"""Bare parameters added to or multiplied with the batch: `x + p`, `x * p` (position tables, scales, gates).

A parameter that is broadcast over the examples receives, from each of them, that
example's gradient summed over whatever else it was broadcast over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..derived import OwnRows
from ..layout import Layout
from ..operation import Operation
from ..uses import PerExample, Rows, exact
from .embedding import masked

if TYPE_CHECKING:
    from ..recorder import Recorder


def reduce_to(g: Tensor, layout: Layout, n: int, shape: torch.Size) -> Tensor:
    """Per-example gradient (n, *shape) of a tensor of `shape` broadcast to g; its own batch dimension has size 1."""
    aligned = [1] * (g.dim() - len(shape)) + list(shape)
    del aligned[layout.dim]
    fronted = exact(layout.front(g, n))  # (n, m, remaining dimensions)
    dims = [1] + [2 + d for d, size in enumerate(aligned) if size == 1]
    dims = [d for d in dims if fronted.shape[d] != 1]
    if dims:
        fronted = fronted.sum(dims, keepdim=True)
    return fronted.reshape(n, *shape)


def rows_of(g: Tensor, layout: Layout, n: int, shape: torch.Size) -> Tensor:
    """Per-example gradient (n, m, rest) of a tensor of `shape` that has a row for every row of g."""
    missing = g.dim() - len(shape)
    aligned = [1] * missing + list(shape)
    del aligned[layout.dim]
    fronted = exact(layout.front(g, n))
    dims = [2 + d for d, size in enumerate(aligned) if size == 1 and fronted.shape[2 + d] != 1]
    if dims:
        fronted = fronted.sum(dims, keepdim=True)
    return fronted.reshape(*fronted.shape[:2], *aligned[missing:])


class Broadcast(Operation):
    """x + p, x − p, p − x, x · p."""

    def __init__(self, recorder: Recorder, name: str, parameter: Tensor) -> None:
        self.name = name
        super().__init__(recorder, [parameter])
        self.parameter = parameter
        origin = recorder.origin(parameter)
        self.row = origin.expanded if origin is not None else None
        self.table = origin.embedding if origin is not None else None
        self.trains(parameter if self.row is None else self.row)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        p = self.parameter.detach()
        self.shape, self.dtype = x.shape, x.dtype
        if self.name == "mul":
            return x * p, (x,)
        return x + p if self.name == "add" else x - p if self.name == "sub" else p - x, ()

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        (g,) = grads
        layout = self.recorder.layout(self.key, g)
        if layout is not None:
            if self.name == "mul":
                self._record(exact(g) * exact(saved[0]), layout)
            else:
                self._record(-g if self.name == "sub" else g, layout)
        if not needed[0]:
            return (None,)
        p = self.parameter.detach()
        back = g * p if self.name == "mul" else -g if self.name == "rsub" else g
        return (back.sum_to_size(self.shape).to(self.dtype),)

    def _record(self, g: Tensor, layout: Layout) -> None:
        n, p = self.recorder.n, self.parameter
        own = layout.dim - (g.dim() - p.dim())  # p's dimension under the batch dimension
        if n == 1:
            target = p if self.row is None else self.row
            self.recorder.sink(target, PerExample(exact(g).sum_to_size(target.shape)[None]))
        elif own < 0 or p.shape[own] == 1:
            target = p if self.row is None else self.row
            shape = target.shape
            self.recorder.sink(target, PerExample(reduce_to(g, layout, n, shape)))
        elif self.row is not None and own == 0 and self.row.shape[0] * g.shape[layout.dim] == p.shape[0]:
            self.recorder.sink(self.row, PerExample(reduce_to(g, layout, n, self.row.shape)))
        else:
            rows, mine = rows_of(g, layout, n, p.shape), Layout(own, layout.slow)
            if self.table is None or self.row is not None:
                self.recorder.sink(p, OwnRows(rows, mine))
            else:  # looked up anew for every example, as position and type ids are: a table like any other
                weight, index, padding_idx = self.table
                index = masked(mine.front(index, n).flatten(1), padding_idx)
                self.recorder.sink(weight, Rows(index, rows.flatten(1, -2), weight.shape[0]))


def _binary(name: str, flipped: str | None = None) -> Any:
    def rule(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
            return NotImplemented
        x, p = args
        if recorder.is_batched(x) and recorder.is_parameter(p):
            return Broadcast(recorder, name, p).apply(x)
        if recorder.is_batched(p) and recorder.is_parameter(x) and flipped is not None:
            return Broadcast(recorder, flipped, x).apply(p)
        return NotImplemented

    return rule


_add, _mul, _sub, _rsub = _binary("add", "add"), _binary("mul", "mul"), _binary("sub", "rsub"), _binary("rsub", "sub")
RULES: dict[Any, Any] = {
    **dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__], _add),
    **dict.fromkeys([torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], _mul),
    **dict.fromkeys([torch.sub, Tensor.sub, Tensor.__sub__], _sub),
    **dict.fromkeys([torch.rsub, Tensor.__rsub__], _rsub),
}
