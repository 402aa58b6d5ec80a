"""How exactly a device computes: TF32 on and off, and whether there are kernels of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No TF32 in matrix products: a bound is a bound."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    if before == exact:
        yield
        return
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def tf32_products() -> bool:
    """Whether the user lets matrix products compute in TF32."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


def shortened(weights: Tensor, tf32: bool) -> Tensor:
    """Weights of a sum whose factors may be rounded to TF32, which can lengthen a product by 2⁻¹⁰ of itself."""
    return weights * (1 - 2**-10) if tf32 and weights.device.type == "cuda" else weights


def tf32_convolutions() -> bool:
    """Whether the user lets convolutions compute in TF32."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv") and hasattr(cudnn.conv, "fp32_precision"):
        return cudnn.conv.fp32_precision == "tf32"
    return bool(cudnn.allow_tf32)


INTERPRETED = False  # tests set it: kernels of our own on a CPU too, in Triton's interpreter


def launches_are_dear(device: torch.device) -> bool:
    """Whether few large kernels beat many small ones by far: the host launches them, and the device waits for it."""
    return device.type == "cuda" or INTERPRETED


def kernels_for(*tensors: Tensor) -> bool:
    """Whether there is a GPU kernel for these; importing Triton is left until a tensor lies on a GPU."""
    if not (tensors[0].is_cuda or INTERPRETED):
        return False
    usable = _usable()
    return usable is not None and usable(*tensors)


@functools.cache
def _usable() -> Callable[..., bool] | None:
    try:
        from .kernels import usable
    except ImportError:
        return None
    return usable


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Full float32 in products and convolutions of the forward pass too."""
    if device.type != "cuda":
        yield
        return
    holders = [h for h in (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None)) if h is not None]
    if all(hasattr(h, "fp32_precision") for h in holders) and len(holders) == 2:
        before = [h.fp32_precision for h in holders]
        try:
            for h in holders:
                h.fp32_precision = "ieee"
            yield
        finally:
            for h, value in zip(holders, before, strict=True):
                h.fp32_precision = value
        return
    old = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = old
