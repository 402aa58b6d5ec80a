"""How exactly a device computes: TF32 on and off, and whether there are kernels of our own."""

from __future__ import annotations

from collections.abc import Iterator
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


def sums_in_tf32(device: torch.device) -> bool:
    """Whether weighted sums (matrix products and convolutions) may round their factors to TF32."""
    if device.type != "cuda":
        return False
    matmul = torch.backends.cuda.matmul
    products = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return bool(products) or tf32_convolutions()


def tf32_convolutions() -> bool:
    """Whether the user lets convolutions compute in TF32."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv") and hasattr(cudnn.conv, "fp32_precision"):
        return cudnn.conv.fp32_precision == "tf32"
    return bool(cudnn.allow_tf32)


def kernels_for(*tensors: Tensor) -> bool:
    """Whether there is a GPU kernel for these; importing Triton is left until a tensor lies on a GPU."""
    try:
        from .kernels import usable
    except ImportError:
        return False
    return usable(*tensors)
