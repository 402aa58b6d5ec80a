"""Tables: `F.embedding` with indices from the batch, and with constant ones (positions, token types)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ...errors import PrivacyError
from ..operation import Operation
from ..uses import Rows

if TYPE_CHECKING:
    from ..recorder import Recorder


class Embedding(Operation):
    name = "embedding"

    def __init__(self, recorder: Recorder, index: Tensor, weight: Tensor, padding_idx: int | None) -> None:
        super().__init__(recorder, [weight])
        self.index, self.weight, self.padding_idx = index, weight, padding_idx
        self.trains(weight)

    def forward(self) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return F.embedding(self.index, self.weight.detach()), ()

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        layout = self.recorder.layout(self.key, grads[0])
        if layout is not None:
            n = self.recorder.n
            index = layout.front(self.index, n).flatten(1)
            right = layout.front(grads[0], n).flatten(1, -2)
            self.recorder.sink(self.weight, Rows(masked(index, self.padding_idx), right, self.weight.shape[0]))
        return ()


def masked(index: Tensor, padding_idx: int | None) -> Tensor:
    return index if padding_idx is None else index.masked_fill(index == padding_idx, -1)


def _refuse(recorder: Recorder, weight: Tensor, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    name = recorder.name_of(weight)
    if max_norm is not None:
        raise PrivacyError(
            f"embedding {name!r} has max_norm={max_norm}, which rewrites the rows that private examples use; "
            "drop max_norm, clipping bounds the update already"
        )
    if scale_grad_by_freq:
        raise PrivacyError(
            f"embedding {name!r} has scale_grad_by_freq=True, which divides by counts over the whole batch and so "
            "mixes examples; set it to False"
        )


def _arguments(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Tensor, int | None, float | None, bool]:
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return input, weight, padding_idx, max_norm, scale_grad_by_freq


def embedding(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    index, weight, padding_idx, max_norm, by_frequency = _arguments(*args, **kwargs)
    _refuse(recorder, weight, max_norm, by_frequency)
    if not recorder.is_parameter(weight):
        return NotImplemented
    return Embedding(recorder, index, weight, padding_idx).apply()


def constant_embedding(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Constant indices: the result is derived. Rows that are one row repeated are looked up once."""
    index, weight, padding_idx, max_norm, by_frequency = _arguments(*args, **kwargs)
    _refuse(recorder, weight, max_norm, by_frequency)
    repeated = index.dim() > 1 and index.shape[0] > 1 and index.stride(0) == 0
    first = index[:1] if repeated else index
    out = F.embedding(first, weight, padding_idx)
    recorder.mark_derived(out, weight, embedding=(weight, first, padding_idx))
    if not repeated:
        return out
    wide = out.expand(index.shape[0], *out.shape[1:])
    recorder.mark_derived(wide, weight, expanded=out)
    return wide


def expand(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """A derived tensor repeated along its first dimension (a class token, say) remembers the one row."""
    source, out = args[0], func(*args, **kwargs)
    if out is source:
        return out
    row = source
    origin = recorder.origin(source)
    if origin is not None and origin.expanded is not None:
        row = origin.expanded
    while row.dim() < out.dim():
        row = row.unsqueeze(0)
    one_row = row.shape[0] == 1 and out.shape[0] > 1 and row.shape[1:] == out.shape[1:]
    if one_row and not recorder.is_parameter(row):
        recorder.mark_derived(row, source)
    recorder.mark_derived(out, source, expanded=row if one_row else None)
    return out


DERIVE: dict[Any, Any] = {
    F.embedding: constant_embedding,
    **dict.fromkeys([Tensor.expand, Tensor.expand_as, Tensor.repeat], expand),
}
RULES: dict[Any, Any] = {F.embedding: embedding}
