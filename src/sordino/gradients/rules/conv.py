"""Convolutions and transposed convolutions in one, two and three dimensions.

The weight gradient of one example is its output gradients times the patches of
its image; patches are cut only when a norm needs them, and the weighted sum of
all examples is an ordinary convolution backward with scaled gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import Operation, plain
from ..patches import ConvSpec, Patches
from ..uses import PerExample, exact
from .linear import lower

if TYPE_CHECKING:
    from ..recorder import Recorder


class Conv(Operation):
    name = "conv"

    def __init__(self, recorder: Recorder, spec: ConvSpec, bias: Tensor | None) -> None:
        super().__init__(recorder, (spec.weight, bias))
        self.spec, self.bias = spec, bias
        self.trains_weight, self.trains_bias = self.trains(spec.weight), self.trains(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, spec = lower(x), self.spec
        weight, bias = (t if t is None else t.to(x.dtype) for t in plain(spec.weight, self.bias))
        assert weight is not None
        y = torch.convolution(
            x, weight, bias, spec.stride, spec.padding, spec.dilation,
            spec.transposed, spec.output_padding, spec.groups,
        )  # fmt: skip
        return y, (x,)

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        (g,), (x,) = grads, saved
        layout = self.recorder.layout(self.key, g)
        if layout is not None:
            n = self.recorder.n
            if not (layout.dim == 0 and layout.slow):
                g_, x_ = (layout.front(t, n).flatten(0, 1) for t in (g, x))
            else:
                g_, x_ = g, x
            if self.trains_weight:
                self.recorder.sink(self.spec.weight, Patches(x_, g_, self.spec, n))
            if self.trains_bias:
                grad = exact(g_).flatten(2).sum(2).reshape(n, -1, g_.shape[1]).sum(1)
                self.recorder.sink(self.bias, PerExample(grad))
        return (self.spec.backward(g, x, [True, False, False])[0] if needed[0] else None,)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(tuple(value)) == 1 else 1)


def conv(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    def of(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        return _apply(recorder, input, weight, bias, stride, padding, dilation, None, groups)

    return of(*args, **kwargs)


def conv_transpose(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    def of(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return _apply(recorder, input, weight, bias, stride, padding, dilation, output_padding, groups)

    return of(*args, **kwargs)


def _apply(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    output_padding: Any,
    groups: int,
) -> Any:
    """Both kinds; a convolution has no `output_padding`."""
    if not _plain(recorder, input, weight, bias):
        return NotImplemented
    dims = weight.dim() - 2
    dilations = _tuple(dilation, dims)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        with recorder:
            input = F.pad(input, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    if padding in ("same", "valid"):
        padding = 0
    spec = ConvSpec(
        weight, _tuple(stride, dims), _tuple(padding, dims), dilations,
        output_padding is not None, _tuple(output_padding or 0, dims), groups,
    )  # fmt: skip
    return Conv(recorder, spec, bias).apply(input)


def _plain(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if input.dim() != weight.dim() or not recorder.is_batched(input) or recorder.is_batched(weight):
        return False
    return bias is None or not recorder.is_batched(bias)


RULES: dict[Any, Any] = {
    torch.conv1d: conv,
    torch.conv2d: conv,
    torch.conv3d: conv,
    torch.conv_transpose1d: conv_transpose,
    torch.conv_transpose2d: conv_transpose,
    torch.conv_transpose3d: conv_transpose,
}
