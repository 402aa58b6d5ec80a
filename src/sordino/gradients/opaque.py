"""Modules differentiated as one operation.

A custom autograd function or other code that no torch-function mode sees is
handled through the smallest module around it: that module's forward is run as a
function of its parameters, by the generic rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

if TYPE_CHECKING:
    from .recorder import Recorder


def smallest_enclosing(model: nn.Module, parameter: str, opaque: list[str]) -> str | None:
    """The next larger module around a parameter: its owner first, then the owner's parent, last the model ('')."""
    path = parameter.rpartition(".")[0]
    while True:
        if not any(path == m or not m or path.startswith(m + ".") for m in opaque):
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]


@contextmanager
def opaque_modules(model: nn.Module, names: list[str], recorder: Recorder) -> Iterator[None]:
    """While this lasts, calling one of the named modules is one recorded operation."""
    patched: list[tuple[nn.Module, Any]] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            original = module.__dict__.get("forward")
            patched.append((module, original))
            module.__dict__["forward"] = _as_one(module, name, original, recorder)
        yield
    finally:
        for module, original in patched:
            _restore(module, original)


def _restore(module: nn.Module, original: Any) -> Any:
    """Give the module its own forward back; returns what stood in its place."""
    ours = module.__dict__.pop("forward", None)
    if original is not None:
        module.__dict__["forward"] = original
    return ours


def _as_one(module: nn.Module, name: str, original: Any, recorder: Recorder) -> Callable[..., Any]:
    from .rules import fallback

    trained = {k: p for k, p in module.named_parameters() if id(p) in recorder.names}

    def function(parameters: dict, *inner: Any, **named: Any) -> Any:
        ours = _restore(module, original)
        try:
            return functional_call(module, parameters, inner, named)
        finally:
            module.__dict__["forward"] = ours

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(trained, *args, **kwargs)
        label = f"module {name or type(module).__name__!r}"
        with torch._C.DisableTorchFunction():
            return fallback.generic(recorder, function, (trained, *args), kwargs, label)

    return forward
