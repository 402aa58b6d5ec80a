"""Optimal shrinkage of singular values, for the weights of linear layers.

The gradient of a linear layer is close to low rank; the noise added to it is not. For an m×n matrix ``Y = S + Δ``,
Δ i.i.d. with standard deviation s, all singular values of pure noise lie below the edge ``s(√m+√n)``. A singular value
``y`` above it is shrunk to the value that minimises the squared error (Shabalin & Nobel 2013, Gavish & Donoho 2014),

    η(y) = √((y² − (m+n)s²)² − 4mns⁴) / y,

which is Eq. 8 of "Sample-efficient differentially private fine-tuning via gradient matrix denoising", written without
the detour through λ = F⁻¹(y). The rest is dropped, and the result is given the norm of Y (its Theorem 1: only then do
gains of single layers add up). A layer whose largest singular value does not reach ``κ·s(√m+√n)`` is left alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import SordinoError
from ..registry import Entry
from .base import DENOISERS, Denoiser


def shrunk(y: Tensor, m: int, n: int, s: float) -> Tensor:
    """η(y), 0 at and below the edge.

    >>> shrunk(torch.tensor([5.0, 3.0]), 1, 4, 1.0)   # the edge is 1·(√1 + √4) = 3
    tensor([3.9192, 0.0000])
    """
    edge, inner = s * (math.sqrt(m) + math.sqrt(n)), s * (math.sqrt(m) - math.sqrt(n))
    # (y² − (m+n)s²)² − 4mns⁴ = (y² − edge²)(y² − inner²): no cancellation close to the edge.
    product = (y - edge).clamp_min(0) * (y + edge) * (y * y - inner * inner).clamp_min(0)
    return torch.where(y > edge, product.sqrt() / y.clamp_min(torch.finfo(y.dtype).tiny), torch.zeros_like(y))


def shrink(Y: Tensor, s: float, *, kappa: float = 1.02, rescale: bool = True) -> Tensor:
    """Denoise a batch of matrices, (…, m, n) → (…, m, n), each on its own."""
    m, n = Y.shape[-2:]
    if s == 0 or Y.numel() == 0:
        return Y
    wide = Y.to(torch.promote_types(Y.dtype, torch.float32))
    with torch.autocast(Y.device.type, enabled=False):
        U, y, Vh = torch.linalg.svd(wide, full_matrices=False)
        eta = shrunk(y, m, n, s)
        if rescale:  # ‖Σ η_i u_i v_iᵀ‖ = ‖η‖, ‖Y‖ = ‖y‖
            norm = torch.linalg.vector_norm(eta, dim=-1, keepdim=True)
            ratio = torch.linalg.vector_norm(y, dim=-1, keepdim=True) / norm
            eta = eta * torch.where(norm > 0, ratio, torch.zeros_like(ratio))
        denoised = (U * eta.unsqueeze(-2)) @ Vh
    signal = (y[..., :1] >= kappa * s * (math.sqrt(m) + math.sqrt(n))) & (eta[..., :1] > 0)
    return torch.where(signal.unsqueeze(-1), denoised.to(Y.dtype), Y)


@dataclass(frozen=True)
class Shrinkage(Denoiser):
    """Options of ``denoising="shrinkage"``.

    `kappa` is how far over the edge of pure noise the largest singular value must lie before a layer is touched, in
    units of the edge; `rescale=False` is the ablation without norm correction.

    >>> Shrinkage().options()
    {'name': 'shrinkage', 'kappa': 1.02, 'rescale': True}
    """

    name: ClassVar[str] = "shrinkage"

    kappa: float = 1.02
    rescale: bool = True

    def __post_init__(self) -> None:
        bad = isinstance(self.kappa, bool) or not isinstance(self.kappa, (int, float))
        if bad or not 1 <= self.kappa < math.inf:
            raise SordinoError(f"kappa={self.kappa!r} must be a number of at least 1; 1.02 is usual")
        if not isinstance(self.rescale, bool):
            raise SordinoError(f"rescale={self.rescale!r} must be True or False")

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "kappa": self.kappa, "rescale": self.rescale}

    @torch.no_grad()
    def __call__(self, updates: MutableMapping[str, Tensor], noise_std: float, matrices: Collection[str]) -> None:
        if not 0 <= noise_std < math.inf:
            raise SordinoError(f"noise_std={noise_std!r} must be a finite standard deviation of at least 0")
        if noise_std == 0:
            return
        # One decomposition for all layers of one shape.
        alike: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, update in updates.items():
            if name in matrices:
                if update.dim() != 2:
                    raise SordinoError(f"{name}: shrinkage works on matrices, not on shape {tuple(update.shape)}")
                alike[(update.shape, update.dtype, update.device)].append(name)
        for names in alike.values():
            stacked = torch.stack([updates[name] for name in names])
            for name, denoised in zip(
                names, shrink(stacked, noise_std, kappa=self.kappa, rescale=self.rescale), strict=True
            ):
                updates[name].copy_(denoised)


DENOISERS.add(
    Entry(
        "shrinkage",
        Shrinkage,
        "optimal shrinkage of the singular values of each linear layer's gradient",
        paper="Sample-efficient differentially private fine-tuning via gradient matrix denoising; Gavish & Donoho 2014",
        capabilities={"white_noise": True, "correlated_noise": "warn"},
    )
)
