"""Convolutions and group normalisations with a cheap second derivative.

Torch differentiates a convolution's backward by convolutions whose kernels are whole images, and a group
normalisation's by some fifty passes over its input. Inside ``Twice()`` both are replaced by functions that give the
same numbers and differentiate twice at the price of the operations involved; what they do not know is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
    stride, padding, dilation, groups = how
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _gradients(g: Tensor, x: Tensor, weight: Tensor, how: Geometry, mask: tuple[bool, bool, bool]) -> tuple:
    """What a convolution with `weight` at `x` gives back for input, weight and bias."""
    stride, padding, dilation, groups = how
    zeros, bias = [0] * len(stride), [weight.shape[0]]
    return torch.ops.aten.convolution_backward(
        g, x, weight, bias, stride, padding, dilation, False, zeros, groups, list(mask)
    )


class Convolution(torch.autograd.Function):
    """y = W * x + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.mask = how, (x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        return _convolution(x, weight, bias, how)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (*ConvolutionBackward.apply(g, x, weight, ctx.how, ctx.mask), None)


class ConvolutionBackward(torch.autograd.Function):
    """(g, x, W) → (W ⋆ g, x ⋆ g, Σ g): linear in each of the three, so its derivatives are convolutions again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, how: Geometry, mask: tuple[bool, bool, bool]) -> tuple:
        ctx.save_for_backward(g, x, weight)
        ctx.how, ctx.mask = how, mask
        ctx.set_materialize_grads(False)
        return _gradients(g, x, weight, how, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cx: Tensor | None, cw: Tensor | None, cb: Tensor | None) -> tuple:  # type: ignore[override]
        g, x, weight = ctx.saved_tensors
        how, need = ctx.how, ctx.needs_input_grad
        to_g: Tensor | None = None
        if need[0]:
            if cw is not None:
                to_g = _convolution(x, cw, cb, how)
            elif cb is not None:
                to_g = cb.reshape(1, -1, *[1] * (g.dim() - 2)).expand_as(g)
            if cx is not None:
                more = _convolution(cx, weight, None, how)
                to_g = more if to_g is None else more.add_(to_g)
        to_x = _gradients(g, x, cw, how, (True, False, False))[0] if need[1] and cw is not None else None
        to_w = _gradients(g, cx, weight, how, (False, True, False))[1] if need[2] and cx is not None else None
        return to_g, to_x, to_w, None, None


class GroupNorm(torch.autograd.Function):
    """y = γx̂ + β, x̂ = r(x − mean x) over each group of channels of each example, r = 1/√(var x + ε)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        x = x.contiguous()
        n, channels = x.shape[:2]
        y, mean, r = torch.native_group_norm(x, weight, bias, n, channels, x[0, 0].numel(), groups, eps)
        ctx.save_for_backward(x, weight, mean, r)
        ctx.groups, ctx.mask = groups, (x.requires_grad, *(p is not None and p.requires_grad for p in (weight, bias)))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, weight, mean, r = ctx.saved_tensors
        return (*GroupNormBackward.apply(g, x, weight, mean, r, ctx.groups, ctx.mask), None, None)


def _norm_gradients(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, r: Tensor, groups: int, mask: tuple[bool, bool, bool]
) -> tuple:
    """rP(γg), Σ g x̂ and Σ g, with ``P u = u − mean(u) − x̂·mean(x̂ u)`` in each group."""
    n, channels = x.shape[:2]
    return torch.ops.aten.native_group_norm_backward(
        g, x, mean, r, weight, n, channels, x[0, 0].numel(), groups, list(mask)
    )


class GroupNormBackward(torch.autograd.Function):
    """(g, x, γ) → rP(γg), Σ g x̂, Σ g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, r: Tensor, *how: Any) -> tuple:
        groups, mask = how
        g = g.contiguous()
        d, dw, db = _norm_gradients(g, x, weight, mean, r, groups, mask)
        ctx.how, ctx.has_weight = how, weight is not None
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):  # the means over a group that every derivative needs
            unit = ((x.reshape(*r.shape, -1) - mean[..., None]) * r[..., None]).reshape(x.shape)
            ctx.save_for_backward(g, x, weight, mean, r, d, unit, *_rows(g, x, mean, r)[1:])
        return d, dw, db

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor | None, cw: Tensor | None, cb: Tensor | None) -> tuple:  # type: ignore[override]
        """⟨c, rPu⟩, u = γg, is symmetric in c and u; its derivative in x is −r(a_u rPc + a_c rPu) − r²x̂·m with
        a_v = mean(x̂v) and m = mean(cu) − mean(c)mean(u) − a_c a_u. What γ's own output adds is rP(cw·g)."""
        g, x, weight, mean, r, d, unit, g_unit, g_one = ctx.saved_tensors
        groups, mask = ctx.how
        need, shape = ctx.needs_input_grad, [1, -1] + [1] * (x.dim() - 2)
        to_g = to_x = to_w = None
        if need[0] and cw is not None:
            to_g = unit * cw.view(shape) if cb is None else torch.addcmul(cb.view(shape), unit, cw.view(shape))
        elif need[0] and cb is not None:
            to_g = cb.view(shape).expand_as(g).clone()
        if need[1] and cw is not None:
            to_x = _norm_gradients(g, x, cw, mean, r, groups, (True, False, False))[0]
        if c is None:
            return to_g, to_x, None, None, None, None, None
        q, c_unit, c_one = _rows(c.contiguous(), x, mean, r)
        c_g = _dots(c.contiguous(), g) if need[1] else None
        if need[2] and weight is not None:
            to_w = _dots(g, q).sum(0)
        if need[0]:
            if weight is None:
                to_g = q.clone() if to_g is None else to_g.add_(q)
            else:
                to_g = q * weight.view(shape) if to_g is None else to_g.addcmul_(q, weight.view(shape))
        if c_g is not None:
            rows, size = (*r.shape, -1), x[0].numel() // groups

            def mean_of(sums: Tensor, scale: Tensor | None = None) -> Tensor:
                """From sums over channels the mean over each group."""
                return (sums if scale is None else sums * scale).reshape(rows).sum(-1, keepdim=True) / size

            a_u, m_u, m_cu = mean_of(g_unit, weight), mean_of(g_one, weight), mean_of(c_g, weight)
            a_c, m_c, scale = mean_of(c_unit), mean_of(c_one), r[..., None]
            along = torch.mul(q.view(rows), -scale * a_u) if to_x is None else to_x.view(rows)
            if to_x is not None:
                along.addcmul_(q.view(rows), -scale * a_u)
            along.addcmul_(d.view(rows), -scale * a_c)
            along.addcmul_(unit.view(rows), -scale.square() * (m_cu - m_c * m_u - a_c * a_u))
            to_x = along.view(x.shape)
        return to_g, to_x, to_w, None, None, None, None


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ ab over each channel of each example, in one pass: Σ g x̂ of a normalisation with mean 0 and r = 1."""
    n, channels = a.shape[:2]
    zero, one, ones = a.new_zeros(1, 1), a.new_ones(1, 1), a.new_ones(n * channels)
    where = (1, n * channels, a[0, 0].numel(), 1, [False, True, False])
    return torch.ops.aten.native_group_norm_backward(a, b, zero, one, ones, *where)[1].view(n, channels)


def _rows(g: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> tuple:
    """rP g, and Σ g x̂ and Σ g over each channel of each example (as if all were channels of one)."""
    n, channels = x.shape[:2]
    ones, where = g.new_ones(n * channels), (1, n * channels, x[0, 0].numel(), mean.numel(), [True, True, True])
    d, along, total = torch.ops.aten.native_group_norm_backward(g, x, mean.view(1, -1), r.view(1, -1), ones, *where)
    return d.view(x.shape), along.view(n, channels), total.view(n, channels)


def _wide(*tensors: Tensor | None) -> bool:
    """Float32 or float64 throughout, and no autocast: then the numbers are the ordinary ones."""
    kinds = {t.dtype for t in tensors if t is not None}
    device = next(t for t in tensors if t is not None).device.type
    return len(kinds) == 1 and kinds <= {torch.float32, torch.float64} and not torch.is_autocast_enabled(device)


def _conv(default: Any, dims: int) -> Any:
    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        if isinstance(padding, str) or input.dim() != dims + 2 or not _wide(input, weight, bias):
            return default(input, weight, bias, stride, padding, dilation, groups)
        each = [[v] * dims if isinstance(v, int) else list(v) * (dims // len(v)) for v in (stride, padding, dilation)]
        return Convolution.apply(input, weight, bias, (*each, groups))

    return run


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    known = input.dim() >= 3 and input.shape[1] % num_groups == 0 and input.numel() > 0
    if not known or not _wide(input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    return GroupNorm.apply(input, weight, bias, num_groups, eps)


REPLACED = {
    F.conv1d: _conv(F.conv1d, 1),
    F.conv2d: _conv(F.conv2d, 2),
    F.conv3d: _conv(F.conv3d, 3),
    F.group_norm: _group_norm,
}


class Twice(TorchFunctionMode):
    """While it is active, the operations above stand in for torch's own, whoever calls them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return REPLACED.get(func, func)(*args, **(kwargs or {}))
