"""What a user hands in, looked at before anything is done with it: one line an error, with the value and the remedy."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from .errors import SordinoError, Unsupported

TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}


def refuse(model: Any) -> None:
    """Models that hide or spread what they do."""
    if not isinstance(model, nn.Module):
        raise SordinoError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    kind = type(model).__name__
    if kind == "OptimizedModule":
        raise Unsupported(
            "model is under torch.compile, which hides its operations from the private step; pass the model that was "
            "compiled (model._orig_mod)"
        )
    for name, module in model.named_modules():
        label = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise Unsupported(
                f"{label} was compiled in place with .compile(), which hides its operations from the private step; "
                "pass a model that was not compiled"
            )
        if type(module).__name__ in WRAPPERS and name == "" and kind != "OptimizedModule":
            raise Unsupported(
                f"model is wrapped in {kind}, and a private step runs in one process on one device for now; pass the "
                "model inside it (model.module)"
            )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise Unsupported(
                f"{size} processes are training together (torch.distributed); a private step runs in one process for "
                "now: sums over several would be separate releases that nobody accounts for"
            )


def trainable(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The trainable parameters by name; the optimizer must hold them all, and no one else's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SordinoError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise SordinoError("the model has no trainable parameter; set requires_grad_(True) on what is to be trained")
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise SordinoError(f"parameter {name!r} has no shape yet (a lazy module); call the model once before")
        if p.layout != torch.strided:
            raise SordinoError(f"parameter {name!r} is {p.layout}; only dense parameters can be trained: to_dense()")
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            raise Unsupported(f"parameter {name!r} is spread over processes; a private step runs in one for now")
        if p.is_complex():
            raise Unsupported(
                f"parameter {name!r} is {p.dtype}; store its real and imaginary parts, and join them in the forward "
                "with torch.view_as_complex"
            )
        if p.dtype not in TRAINABLE:
            raise SordinoError(
                f"parameter {name!r} is {p.dtype}; parameters of float16, bfloat16, float32 or float64 can be "
                "trained: freeze it with requires_grad_(False), or convert it"
            )
        if p.device.type == "meta":
            raise SordinoError(f"parameter {name!r} is on the meta device and has no values; load the weights first")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in parameters.items() if id(p) not in held]
    if left_out:
        raise SordinoError(
            f"parameter {left_out[0]!r} is trainable but not in the optimizer ({len(left_out)} such); give it to the "
            "optimizer, or freeze it with requires_grad_(False): it would only use up the clip norm"
        )
    ours = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if foreign:
        raise SordinoError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's (one of shape "
            f"{tuple(foreign[0].shape)}); make the optimizer from model.parameters()"
        )
    return parameters


def one_device(parameters: dict[str, Tensor]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise SordinoError(f"the trainable parameters lie on several devices ({names}); put the model on one")
    return devices.pop()


def unchanged(model: nn.Module, parameters: dict[str, Tensor], device: torch.device) -> None:
    """Before every step: the same parameters, where they were."""
    now = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if now.keys() != parameters.keys() or any(now[name] is not p for name, p in parameters.items()):
        changed = sorted(now.keys() ^ parameters.keys()) or [n for n, p in parameters.items() if now[n] is not p]
        raise SordinoError(
            f"the trainable parameters changed after make_private: {changed[0]!r}; set requires_grad and add modules "
            "before make_private"
        )
    for name, p in parameters.items():
        if p.device != device:
            raise SordinoError(
                f"parameter {name!r} was on {device} when make_private was called and is on {p.device} now; move the "
                "model before make_private"
            )


def matrices(model: nn.Module, parameters: dict[str, Tensor]) -> set[str]:
    """The weights of linear layers: two-dimensional, and not a table."""
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    return {name for name, p in parameters.items() if p.dim() == 2 and id(p) not in tables}


def shown(value: Any) -> str:
    """A value on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def whole(name: str, value: Any, least: int) -> int:
    """A whole number, numpy's too."""
    try:
        number = None if isinstance(value, (bool, Tensor)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise SordinoError(f"{name}={shown(value)} must be a whole number of at least {least}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SordinoError(f"{name}={shown(value)} must be True or False")
    return value


def physical(value: Any) -> tuple[int | None, bool]:
    """How many examples at once, and whether to halve that when memory runs out."""
    if value is None or value == "auto":
        return None, value == "auto"
    if isinstance(value, str):
        raise SordinoError(f"physical_batch_size={value!r} must be a whole number, 'auto' or None")
    return whole("physical_batch_size", value, 1), False


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_of_memory(error: BaseException) -> bool:
    """Memory ran out: torch says so by type on a GPU, in words elsewhere."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(w in str(error) for w in words)
