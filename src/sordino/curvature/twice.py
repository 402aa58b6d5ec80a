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
            ctx.save_for_backward(g, x, weight, mean, r, d, unit, _dots(g, unit), _dots(g))
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
        if cw is not None:
            if need[0]:
                to_g = unit * cw.reshape(shape)
            if need[1]:
                to_x = _norm_gradients(g, x, cw, mean, r, groups, (True, False, False))[0]
        if cb is not None and need[0]:
            to_g = cb.reshape(shape).expand_as(g).clone() if to_g is None else to_g.add_(cb.reshape(shape))
        if c is not None:
            c = c.contiguous()
            q = _norm_gradients(c, x, None, mean, r, groups, (True, False, False))[0]
            if need[0]:
                first = q if weight is None else q * weight.reshape(shape)
                to_g = first if to_g is None else to_g.add_(first)
            if need[2] and weight is not None:
                to_w = _dots(g, q).sum(0)
            if need[1]:
                # means over (examples, groups), from sums over (examples, channels)
                pick, size = (lambda sums: sums.reshape(*r.shape, -1).sum(-1)), x[0].numel() // groups
                scaled = (lambda sums: sums) if weight is None else (lambda sums: sums * weight)
                a_u, m_u = pick(scaled(g_unit)) / size, pick(scaled(g_one)) / size
                a_c, m_c, m_cu = (pick(s) / size for s in (_dots(c, unit), _dots(c), scaled(_dots(c, g))))
                rows = (*r.shape, -1)
                along = torch.mul(q.view(rows), (-r * a_u)[..., None])
                along.addcmul_(d.view(rows), (-r * a_c)[..., None])
                along.addcmul_(unit.view(rows), (-r.square() * (m_cu - m_c * m_u - a_c * a_u))[..., None])
                to_x = along.view(x.shape) if to_x is None else to_x.add_(along.view(x.shape))
        return to_g, to_x, to_w, None, None, None, None


def _dots(a: Tensor, b: Tensor | None = None) -> Tensor:
    """Σ ab over each channel of each example."""
    if b is None:
        return a.flatten(2).sum(2)
    return torch.linalg.vecdot(a.flatten(2), b.flatten(2))


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
