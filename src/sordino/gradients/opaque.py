"""Modules differentiated as one operation.

A custom autograd function or other code that no torch-function mode sees is
handled through the smallest module around it: that module's forward is run as a
function of its parameters, by the generic rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.func import functional_call

if TYPE_CHECKING:
    from .recorder import Recorder


def smallest_enclosing(model: nn.Module, parameter: str, opaque: list[str]) -> str | None:
    """The next larger module around a parameter: its owner first, then the owner's parent, last the model ('')."""
    path = parameter.rpartition(".")[0]
    while True:
        if path not in opaque:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]


@contextmanager
def opaque_modules(model: nn.Module, names: list[str], recorder: Recorder) -> Iterator[None]:
    """While this lasts, calling one of the named modules is one recorded operation."""
    from .rules import fallback

    patched: list[nn.Module] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            trained = {k: p for k, p in module.named_parameters(remove_duplicate=False) if id(p) in recorder.names}
            original = module.forward

            def forward(*args: Any, _module: nn.Module = module, _trained: dict = trained, _name: str = name,
                        _original: Any = original, **kwargs: Any) -> Any:  # fmt: skip
                def function(parameters: dict, *inner: Any, **named: Any) -> Any:
                    ours = _module.__dict__.pop("forward")
                    try:
                        return functional_call(_module, parameters, inner, named)
                    finally:
                        _module.__dict__["forward"] = ours

                label = f"module {_name or type(_module).__name__!r}"
                return fallback.generic(recorder, function, (_trained, *args), kwargs, label)

            module.__dict__["forward"] = forward
            patched.append(module)
        yield
    finally:
        for module in patched:
            module.__dict__.pop("forward", None)
