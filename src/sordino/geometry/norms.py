"""Squared Euclidean norms of per-example gradients, from whatever form is cheapest.

For grad_i = Σ_t l_t r_tᵀ the norm is either read off the materialised gradient
(T·p·q multiplications) or off two Gram matrices,

    ‖grad_i‖² = Σ_{s,t} ⟨l_s, l_t⟩ ⟨r_s, r_t⟩        (T²·(p + q) multiplications),

which need no p·q numbers in memory. Gram entries can cancel: their rounding is relative
to S² with S = Σ_t ‖l_t‖‖r_t‖, not to the norm, so that a norm much below S could come out
too small and be clipped too little. Norms from Gram matrices are therefore given as
‖grad_i‖² + 4u·S² (u the machine epsilon): never too small, and for gradients that do not
cancel too large by about 2uT of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..gradients.patches import Patches
from ..gradients.precision import full_precision, kernels_for, tf32_convolutions
from ..gradients.uses import Factors, PerExample, Rows, Use, add, exact

Measure = Callable[[Tensor], Tensor]  # (m, *shape) -> (m,) squared norms


def squares(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad.reshape(len(grad), -1), dim=1).square()


def chunk(use: Use, numbers: int, device: torch.device) -> int:
    """How many examples to materialise at once, `numbers` being what one of them takes."""
    room = 2**26 if device.type == "cuda" else 2**20
    return max(1, min(use.n, room // max(1, numbers)))


def keeps(uses: list[Use]) -> bool:
    """Whether the gradients themselves may be kept for the sum: it saves forming them twice, and takes memory.

    How many numbers are worth keeping for one that is freed: little more than one, but for convolutions on a GPU, where
    forming them is dear and there is room.
    """
    cuda, convolution = uses[0].device.type == "cuda", isinstance(uses[0], Patches)
    factor = 1.0 if not convolution else 3.0 if cuda else 1.65
    return uses[0].each() * uses[0].n <= factor * sum(use.stored() for use in uses)


def materialised(uses: list[Use], measure: Measure, numbers: int) -> tuple[Tensor, list[Use]]:
    """Norms chunk by chunk; the gradients themselves are kept for the sum if there is room.

    Kept gradients may be formed in TF32 where the user allows it: the norms are those of the very numbers summed.
    """
    n, device = uses[0].n, uses[0].device
    keep = keeps(uses)
    size = chunk(uses[0], numbers, device)
    found: list[Tensor] = []
    kept: Tensor | None = None
    for lo in range(0, n, size):
        with nullcontext() if keep else full_precision(device):
            grad = add(use.per_example(lo, min(n, lo + size)) for use in uses)
        found.append(measure(grad))
        if keep and size >= n:
            kept = grad
        elif keep:
            kept = grad.new_empty(n, *grad.shape[1:]) if kept is None else kept
            kept[lo : lo + size] = grad
    return torch.cat(found), uses if kept is None else [PerExample(kept)]


def lengths(tensor: Tensor) -> Tensor:
    """‖x_it‖ of (n, T, ·), in float32 at least."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(tensor, dim=2, dtype=wide)


def margin(spread: Tensor) -> Tensor:
    """4u·S² with S = Σ_t spread_it: what rounding can take off a norm formed from Gram matrices."""
    return 4 * torch.finfo(spread.dtype).eps * spread.sum(1).square()


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Σ_{s,t} ⟨l_s, l_t⟩⟨r_s, r_t⟩ for (n, T, p) and (n, T, q), with its margin."""
    if kernels_for(left, right):
        from ..gradients.kernels import gram_norms

        return gram_norms([(left, right)], 4 * torch.finfo(torch.float32).eps)[0]
    left, right = exact(left), exact(right)
    with full_precision(left.device):
        a = torch.bmm(left, left.transpose(1, 2))
        b = torch.bmm(right, right.transpose(1, 2))
    a.mul_(b)
    return a.sum((1, 2)).clamp_(min=0) + margin(a.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt())


def gram_is_cheaper(length: int, p: int, q: int) -> bool:
    return length * (p + q) <= p * q


def factor_norms(use: Factors) -> Tensor:
    """The norms of Factors without materialising."""
    if use.length == 1:
        return (lengths(use.left) * lengths(use.right)).square().reshape(-1)
    return gram(use.left, use.right)


def many_factor_norms(uses: Sequence[Factors]) -> list[Tensor]:
    """`factor_norms` of each, in as few launches as there are shapes."""
    found: list[Any] = [None] * len(uses)
    single = [i for i, use in enumerate(uses) if use.length == 1]
    tiled = [i for i, use in enumerate(uses) if use.length > 1 and kernels_for(use.left, use.right)]
    if single:
        sides = [torch.cat([lengths(t(uses[i])) for i in single], 1) for t in (lambda u: u.left, lambda u: u.right)]
        for i, norms in zip(single, (sides[0] * sides[1]).square().unbind(1), strict=True):
            found[i] = norms
    if tiled:
        from ..gradients.kernels import gram_norms

        pairs = [(uses[i].left, uses[i].right) for i in tiled]
        for i, norms in zip(tiled, gram_norms(pairs, 4 * torch.finfo(torch.float32).eps), strict=True):
            found[i] = norms
    return [factor_norms(use) if norms is None else norms for use, norms in zip(uses, found, strict=True)]


def row_norms(use: Rows) -> Tensor:
    """Σ_{s,t} [index_s = index_t] ⟨r_s, r_t⟩."""
    right = exact(use.right)
    used = use.index >= 0
    same = (use.index[:, :, None] == use.index[:, None, :]) & used[:, :, None]
    with full_precision(right.device):
        inner = torch.bmm(right, right.transpose(1, 2))
    return torch.where(same, inner, 0.0).sum((1, 2)).clamp_(min=0) + margin(lengths(right) * used)


def cross(first: Use, second: Use) -> Tensor:
    """⟨grad_i of first, grad_i of second⟩ for two uses of one matrix in factored form."""
    with full_precision(first.device):
        return _cross(*((first, second) if isinstance(first, Rows) else (second, first)))


def _cross(a: Use, b: Use) -> Tensor:
    ra, rb = exact(a.right), exact(b.right)  # type: ignore[attr-defined]
    inner = torch.bmm(ra, rb.transpose(1, 2))  # (n, Ta, Tb)
    if isinstance(a, Rows) and isinstance(b, Rows):
        same = (a.index[:, :, None] == b.index[:, None, :]) & (a.index >= 0)[:, :, None]
        return torch.where(same, inner, 0.0).sum((1, 2))
    assert isinstance(b, Factors)
    left = exact(b.left)
    if isinstance(a, Rows):  # ⟨e_{index_s}, l_t⟩ = l_t[index_s]
        index = a.index.clamp(min=0)[:, None, :].expand(-1, b.length, -1)
        picked = left.gather(2, index).transpose(1, 2)  # (n, Ta, Tb)
        return (picked * inner * (a.index >= 0)[:, :, None]).sum((1, 2))
    assert isinstance(a, Factors)
    return (torch.bmm(exact(a.left), left.transpose(1, 2)) * inner).sum((1, 2))


def several_norms(uses: list[Use]) -> Tensor:
    """The norms of a sum of Factors and Rows of one matrix (an embedding tied to an output layer)."""
    own = [row_norms(u) if isinstance(u, Rows) else factor_norms(u) for u in uses]  # type: ignore[arg-type]
    total = add(own)
    for i, first in enumerate(uses):
        for second in uses[:i]:
            total = total + 2 * cross(first, second)
    spread = [lengths(u.right) * (u.index >= 0 if isinstance(u, Rows) else lengths(u.left)) for u in uses]  # type: ignore[attr-defined]
    return total.clamp(min=0) + margin(torch.cat(spread, 1))


def patch_norms(use: Patches) -> tuple[Tensor, Tensor | None] | None:
    """Norms and, if they are to be kept, gradients of a plain two-dimensional convolution, in one GPU kernel."""
    spec = use.spec
    if spec.transposed or spec.groups != 1 or spec.weight.dim() != 4 or not kernels_for(use.x, use.g):
        return None
    from ..gradients.kernels import conv_gradients

    keep = keeps([use])
    kernel = (spec.weight.shape[2], spec.weight.shape[3])
    exactly = not (keep and tf32_convolutions())
    return conv_gradients(use.x, use.g, use.n, kernel, spec.stride, spec.padding, spec.dilation, keep, exactly)
