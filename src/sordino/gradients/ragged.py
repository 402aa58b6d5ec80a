"""Operations that choose rows by the data.

After one of them (padding taken out, examples sorted by length, tokens routed to
experts) an example's place is no longer a matter of shapes: what was verified in
one batch says nothing about the next. From then on in the same forward, every
layout is verified anew in every batch (`Layouts.loose`). Slow, but never wrong.
The same holds for data that arrives packed: a tensor without a dimension of one
row an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .recorder import Recorder


def _both(*names: str) -> frozenset[Any]:
    found = (getattr(where, name, None) for name in names for where in (torch, Tensor))
    return frozenset(f for f in found if f is not None)


ALWAYS = _both(
    "nonzero", "argwhere", "masked_select", "masked_scatter", "unique", "unique_consecutive", "_pack_padded_sequence"
)
READS = frozenset([Tensor.tolist, Tensor.numpy])  # all numbers at once
SCALARS = frozenset([Tensor.item, Tensor.__int__, Tensor.__index__])  # one number
INDEXED = _both("index_select", "gather", "take_along_dim", "index_copy", "index_add", "scatter", "scatter_add")
REPEATS = _both("repeat_interleave")
SORTS = _both("sort")
WATCHED = ALWAYS | READS | SCALARS | INDEXED | REPEATS | SORTS | {Tensor.__getitem__, torch.where}


def chooses_rows(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether this operation on batched tensors may move or drop examples, depending on the data."""
    if func is Tensor.__getitem__:
        return _getitem(recorder, args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
    if func in SCALARS:
        return _read(recorder, args[0])
    if func in READS:
        return True
    if func in REPEATS:
        return any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values()))
    if func is torch.where:
        return len(args) + len(kwargs) == 1
    if func in SORTS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        return not isinstance(dim, int) or _may_hold_examples(recorder, args[0], dim)
    if func in INDEXED:
        dim, index = kwargs.get("dim", args[1] if len(args) > 1 else 0), kwargs.get("index", args[-1])
        if isinstance(index, int) and isinstance(dim, Tensor):  # take_along_dim(x, index, dim)
            dim, index = index, dim
        if not isinstance(dim, int):
            return True
        return _may_hold_examples(recorder, args[0], dim)
    return True


def _read(recorder: Recorder, tensor: Any) -> bool:
    """One number read from the batch (the longest length) is harmless; one an example is not."""
    if isinstance(tensor, Tensor):
        recorder.reads += 1
    return 1 < recorder.n <= recorder.reads


def _getitem(recorder: Recorder, x: Tensor, index: tuple) -> bool:
    arrays: list[tuple[int, Tensor]] = []
    dim = 0
    for i in index:
        if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8):
            return True
        if isinstance(i, slice):
            for end in (i.start, i.stop):
                if isinstance(end, Tensor) and _read(recorder, end):
                    return True
        elif isinstance(i, Tensor):
            arrays.append((dim, i))
        elif i is None:
            dim -= 1
        elif i is Ellipsis:
            dim += x.dim() - sum(1 for j in index if j is not None and j is not Ellipsis) - 1
        dim += 1
    if any(not recorder.is_batched(i) and i.dim() for _, i in arrays):
        return False  # x[arange, lengths]: the examples stay where they are
    return any(recorder.is_batched(i) and _may_hold_examples(recorder, x, d) for d, i in arrays)


def _may_hold_examples(recorder: Recorder, x: Tensor, dim: int) -> bool:
    return bool(x.dim()) and x.shape[dim] % recorder.n == 0
