"""Matrix products with a parameter: `F.linear`, `x @ W`, `torch.addmm` (the transformers library's Conv1D).

y = x Wᵀ + b    ⇒    ∂L_i/∂W = Σ_t g_it x_itᵀ,   ∂L_i/∂b = Σ_t g_it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import Operation, plain
from ..uses import Factors, PerExample, exact

if TYPE_CHECKING:
    from ..recorder import Recorder


def lower(x: Tensor) -> Tensor:
    """x as autocast would give it to a matrix product, so that what is saved is what autocast would save."""
    if not torch._C._is_any_autocast_enabled():
        return x
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


class Linear(Operation):
    """y = x Wᵀ + b with W (out, in), or y = x W + b with W (in, out) if `flipped`."""

    name = "linear"
    fresh = True

    def __init__(self, recorder: Recorder, weight: Tensor, bias: Tensor | None, flipped: bool) -> None:
        super().__init__(recorder, (weight, bias))
        self.weight, self.bias, self.flipped = weight, bias, flipped
        self.trains_weight, self.trains_bias = self.trains(weight), self.trains(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        weight, bias = self.weight, self.bias
        if torch._C._is_any_autocast_enabled():
            x = lower(x)
            weight, bias = plain(weight, bias)  # type: ignore[assignment]
        y = _linear_of_torch(x, weight.T if self.flipped else weight, bias)
        return y, (x if self.trains_weight else None,)

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        (g,), (x,) = grads, saved
        recorder = self.recorder
        layout = recorder.layout(self.key, g)
        if layout is not None:
            n = recorder.n
            left = layout.rows(g, n)
            if self.trains_weight:
                right = layout.rows(x, n)
                recorder.sink(self.weight, Factors(right, left) if self.flipped else Factors(left, right))
            if self.trains_bias:
                recorder.sink(self.bias, PerExample(exact(left).sum(1) if left.shape[1] > 1 else left[:, 0]))
        if not needed[0]:
            return (None,)
        weight = self.weight if self.weight.dtype == g.dtype else self.weight.to(g.dtype)
        return (g @ (weight.T if self.flipped else weight),)


def _simple(recorder: Recorder, *others: Tensor | None) -> bool:
    return not any(t is not None and recorder.is_batched(t) for t in others)


_linear_of_torch = F.linear


def linear(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    if not kwargs and len(args) == 3:
        input, weight, bias = args
        names = recorder.names
        if id(weight) in names and (bias is None or id(bias) in names) and weight.dim() == 2 and input.dim() >= 2:
            return Linear(recorder, weight, bias, False).apply(input)  # parameters, so it is the input that is batched
    return _linear(recorder, *args, **kwargs)


def _linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() < 2:
        return NotImplemented
    if not recorder.is_batched(input) or not _simple(recorder, weight, bias):
        return NotImplemented
    source = transposed_parameter(recorder, weight)
    if source is not None:
        return Linear(recorder, source, bias, flipped=True).apply(input)
    return Linear(recorder, weight, bias, flipped=False).apply(input)


def transposed_parameter(recorder: Recorder, tensor: Tensor) -> Tensor | None:
    """p if `tensor` is exactly p.T for a two-dimensional parameter p."""
    base = tensor._base
    if base is None or id(base) not in recorder.names or base.dim() != 2 or recorder.origin(tensor) is None:
        return None
    same = tensor.shape == base.shape[::-1] and tensor.stride() == base.stride()[::-1]
    plain = tensor.grad_fn is not None and tensor.grad_fn.name() in ("TBackward0", "TransposeBackward0",
                                                                     "PermuteBackward0")  # fmt: skip
    return base if same and plain and tensor.data_ptr() == base.data_ptr() else None


def matmul(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    x, weight = args
    if func is Tensor.__rmatmul__:
        x, weight = weight, x
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    if not recorder.is_batched(x) or not _simple(recorder, weight):
        return NotImplemented
    source = transposed_parameter(recorder, weight)
    if source is not None:
        return Linear(recorder, source, None, flipped=False).apply(x)
    return Linear(recorder, weight, None, flipped=True).apply(x)


def addmm(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    bias, x, weight = args
    if bias.dim() != 1 or not recorder.is_batched(x) or not _simple(recorder, weight, bias):
        return NotImplemented
    return Linear(recorder, weight, bias, flipped=True).apply(x)


RULES: dict[Any, Any] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    Tensor.matmul: matmul,
    Tensor.mm: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
}
