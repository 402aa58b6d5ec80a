"""How the losses must be computed for a second derivative: without dropout, TF32 and fused attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..gradients.engine import without_autocast
from ..gradients.precision import full_precision


@contextmanager
def still(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Dropout off; recurrent layers and attention by kernels that can be differentiated twice."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device.type == "cuda" and any(isinstance(module, nn.RNNBase) for module, _ in modes):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """No autocast around, no TF32 in products and convolutions."""
    with without_autocast(device), full_precision(device), _exact_convolutions(device):
        yield


@contextmanager
def _exact_convolutions(device: torch.device) -> Iterator[None]:
    """cuDNN without TF32."""
    if device.type != "cuda":
        yield
        return
    holder: Any = torch.backends.cudnn
    name, exact = "allow_tf32", False
    if hasattr(getattr(holder, "conv", None), "fp32_precision"):
        holder, name, exact = holder.conv, "fp32_precision", "ieee"  # type: ignore[assignment]
    before = getattr(holder, name)
    setattr(holder, name, exact)
    try:
        yield
    finally:
        setattr(holder, name, before)


def free_bytes(device: torch.device) -> int:
    """What may be filled: half of a GPU's free memory, a quarter of main memory's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        return 2**31
