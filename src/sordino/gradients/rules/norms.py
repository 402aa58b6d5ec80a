"""Normalisation layers. ∂L_i/∂w = Σ_t g_it x̂_it, ∂L_i/∂b = Σ_t g_it, with x̂ the normalised input.

LayerNorm and GroupNorm, the common ones, are rules of their own; the others are
the same normalisation without weights, then `· w + b`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import PrivacyError
from ..operation import Operation, plain
from ..precision import kernels_for
from ..uses import PerExample, exact

if TYPE_CHECKING:
    from ..layout import Layout
    from ..recorder import Recorder


class LayerNorm(Operation):
    name = "layer_norm"

    def __init__(self, recorder: Recorder, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__(recorder, (weight, bias))
        self.shape, self.weight, self.bias, self.eps = list(shape), weight, bias, eps
        self.trains_weight, self.trains_bias = self.trains(weight), self.trains(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        weight, bias = plain(self.weight, self.bias)
        y, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return y, (x, mean, rstd)

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        (g,), (x, mean, rstd) = grads, saved
        layout = self.recorder.layout(self.key, g)
        if layout is not None:
            weight_grad, bias_grad = self._per_example(g, x, mean, rstd, layout)
            if self.trains_weight:
                self.recorder.sink(self.weight, PerExample(weight_grad))
            if self.trains_bias:
                self.recorder.sink(self.bias, PerExample(bias_grad))
        if not needed[0]:
            return (None,)
        back = torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, self.shape, mean, rstd, self.weight, self.bias, [True, False, False]
        )
        return (back[0],)

    def _per_example(self, g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Σ_t g_it x̂_it and Σ_t g_it, (n, *shape) each."""
        n, d = self.recorder.n, len(self.shape)
        if layout.dim == 0 and layout.slow and kernels_for(g, x):
            from ..kernels import layer_norm_sums

            weight, bias = torch.empty(2, n, math.prod(self.shape), device=g.device)
            layer = (g.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), weight, bias)
            self.recorder.later.add(layer_norm_sums, layer)
            return weight.view(n, *self.shape), bias.view(n, *self.shape)
        # Σ_t g x̂ = Σ_t rstd_t·(g x)_t − Σ_t (mean·rstd)_t·g_t: one product to write, the sums as matrix products
        g_, x_ = (exact(layout.front(t, n)).flatten(1, -1 - d).flatten(2) for t in (g, x))  # (n, T, D)
        mean_, rstd_ = (exact(layout.front(t, n)).reshape(n, 1, -1) for t in (mean, rstd))
        first = torch.bmm(rstd_, g_ * x_)
        second = torch.bmm(torch.cat([mean_ * rstd_, torch.ones_like(mean_)], 1), g_)
        return (first[:, 0] - second[:, 0]).reshape(n, *self.shape), second[:, 1].reshape(n, *self.shape)


def largest_grid(g: Tensor) -> float:
    """How many groups torch's kernel takes as those of one row."""
    return 65535 if g.is_cuda else math.inf


class GroupNorm(Operation):
    name = "group_norm"

    def __init__(self, recorder: Recorder, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__(recorder, (weight, bias))
        self.groups, self.weight, self.bias, self.eps = groups, weight, bias, eps
        self.trains_weight, self.trains_bias = self.trains(weight), self.trains(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = x.contiguous()
        rows, channels = x.shape[:2]
        weight, bias = plain(self.weight, self.bias)
        y, mean, rstd = torch.native_group_norm(
            x, weight, bias, rows, channels, x.shape[2:].numel(), self.groups, self.eps
        )
        return y, (x, mean, rstd)

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        g, (x, mean, rstd) = grads[0].contiguous(), saved
        layout = self.recorder.layout(self.key, g)
        if layout is None:
            return (self._backward(g, x, mean, rstd, needed[0])[0],)
        if g.dtype in (torch.bfloat16, torch.float16):
            back = self._backward(g, x, mean, rstd, needed[0])[0]
            _, weight_grad, bias_grad = self._row_by_row(exact(g), exact(x), exact(mean), exact(rstd), False)
        else:
            back, weight_grad, bias_grad = self._row_by_row(g, x, mean, rstd, needed[0])
        n, (rows, channels) = self.recorder.n, x.shape[:2]
        if layout.dim != 0 or rows != n:
            weight_grad, bias_grad = (
                layout.front(t, n).reshape(n, -1, channels).sum(1) for t in (weight_grad, bias_grad)
            )
        if self.trains_weight:
            self.recorder.sink(self.weight, PerExample(weight_grad))
        if self.trains_bias:
            self.recorder.sink(self.bias, PerExample(bias_grad))
        return (back,)

    def _backward(self, g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, needed: bool) -> tuple[Tensor | None, ...]:
        rows, channels = x.shape[:2]
        return torch.ops.aten.native_group_norm_backward(
            g, x, mean, rstd, self.weight, rows, channels, x.shape[2:].numel(), self.groups, [needed, False, False]
        )

    def _row_by_row(self, g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, needed: bool) -> tuple[Any, Tensor, Tensor]:
        """The input's gradient, and the weight's and the bias' of every row, (rows, channels): with all rows as the
        channels of one, torch's own kernel adds nothing up over rows."""
        rows, channels = x.shape[:2]
        if rows * self.groups > largest_grid(g):
            by_group = x.reshape(rows, self.groups, -1) - mean.reshape(rows, -1, 1)
            normal = (by_group * rstd.reshape(rows, -1, 1)).reshape(rows, channels, -1)
            flat = g.reshape(rows, channels, -1)
            return self._backward(g, x, mean, rstd, needed)[0], (flat * normal).sum(2), flat.sum(2)
        weight = None if self.weight is None else self.weight.to(g.dtype).repeat(rows)
        back, weight_grad, bias_grad = torch.ops.aten.native_group_norm_backward(
            g, x, mean.reshape(1, -1), rstd.reshape(1, -1), weight, 1, rows * channels, x.shape[2:].numel(),
            rows * self.groups, [needed, True, True],
        )  # fmt: skip
        return back, weight_grad.view(rows, channels), bias_grad.view(rows, channels)


def _affine_alone(recorder: Recorder, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether it is the input, and nothing else, that depends on the batch."""
    if weight is not None and id(weight) in recorder.names and (bias is None or id(bias) in recorder.names):
        return True  # something does
    return recorder.is_batched(input) and not any(t is not None and recorder.is_batched(t) for t in (weight, bias))


def layer_norm(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    return _layer_norm(recorder, *args, **kwargs)


def _layer_norm(
    recorder: Recorder, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    if not _affine_alone(recorder, input, weight, bias) or input.dim() <= len(normalized_shape):
        return NotImplemented
    return LayerNorm(recorder, normalized_shape, weight, bias, eps).apply(input)


def group_norm(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    return _group_norm(recorder, *args, **kwargs)


def _group_norm(
    recorder: Recorder, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    if not _affine_alone(recorder, input, weight, bias):
        return NotImplemented
    return GroupNorm(recorder, num_groups, weight, bias, eps).apply(input)


# -- the same normalisation without weights, then · w + b ---------------------------------


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (x.dim() - 2))
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    out = F.rms_norm(input, normalized_shape, None, eps)
    return out if weight is None else out * weight


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats and running_mean is not None:
        raise PrivacyError(
            "instance_norm updates running statistics (track_running_stats=True), which would be released as they "
            "are; set track_running_stats=False or call .eval() on the layer"
        )
    out = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _affine(out, weight, bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        raise PrivacyError(
            "batch_norm in training mode mixes the examples of a batch; replace it with GroupNorm, or freeze its "
            "statistics with .eval()"
        )
    return _affine(F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps), weight, bias)


RULES: dict[Any, Any] = {F.layer_norm: layer_norm, F.group_norm: group_norm}
DECOMPOSITIONS: dict[Any, Any] = {F.rms_norm: rms_norm, F.instance_norm: instance_norm, F.batch_norm: batch_norm}
