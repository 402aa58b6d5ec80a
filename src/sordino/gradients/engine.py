"""From a physical batch to clipped sums: forward, one backward, norms, one weighted sum per parameter.

`Engine.clipped_sums` is all that a private step needs of this room. What the
recorder cannot see inside (a custom autograd function, say) is found by its
gradient; the smallest module around it is then differentiated as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from ..errors import PrivacyError, Unsupported
from ..geometry.base import Geometry, Meter
from .clipping import Clipping
from .layout import Layout
from .opaque import opaque_modules, smallest_enclosing
from .recorder import NeedsProbe, Recorder, check_losses

Losses = Callable[..., Tensor]


@dataclass
class Clipped:
    """What one physical batch gives. Everything here but `sums` is private and for the console only."""

    sums: dict[str, Tensor]
    norms: Tensor  # (n,) of the whole gradient, in coordinates
    clipped: Tensor  # (n,) true where the bound was active
    losses: Tensor  # (n,)
    bad: int  # examples with a non-finite gradient, which contribute zero


def call(losses: Losses, data: Any) -> Any:
    """`losses(*data)` for a tuple, `losses(**data)` for a mapping, else `losses(data)`."""
    if isinstance(data, dict) or hasattr(data, "keys"):
        return losses(**data)
    if isinstance(data, (tuple, list)):
        return losses(*data)
    return losses(data)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield


class Engine:
    """Per-example gradients of one model; keeps what it learns about it (layouts, opaque modules)."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor], *, verify: bool = True) -> None:
        self.model, self.parameters = model, parameters
        self.recorder = Recorder(parameters)
        self.recorder.verify = verify
        self.opaque: list[str] = []  # modules differentiated as one operation
        # after a batch, by parameter: None if no use was met, else whether any gradient was not zero
        self.reached: dict[str, bool | None] = {}
        self.watch_reached = True

    def state_dict(self) -> dict[str, Any]:
        """What was learnt about the model, so that a resumed run takes the same path."""
        return {
            "opaque": list(self.opaque),
            "layouts": [[*key, layout.dim, layout.slow] for key, layout in self.recorder.layouts.items()],
            "verified": [list(key) for key in self.recorder.verified],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.opaque = list(state["opaque"])
        self.recorder.layouts = {(a, b, c): Layout(dim, slow) for a, b, c, dim, slow in state["layouts"]}
        self.recorder.verified = {(a, b, c) for a, b, c in state["verified"]}

    def measure(self, losses: Losses, data: Any, n: int, rows: int, meter: Meter) -> Tensor:
        """One forward and one backward; the uses go to the meter. Returns the losses, (n,)."""
        scale = 1.0
        while True:
            try:
                return self._measure(losses, data, n, rows, meter, scale)
            except NeedsProbe:
                self.probe(losses, data, n, rows)
                meter.__init__(meter.geometry, meter.recorder, n)  # type: ignore[misc]

    def _measure(self, losses: Losses, data: Any, n: int, rows: int, meter: Meter, scale: float) -> Tensor:
        recorder = self.recorder
        recorder.begin(n, meter.add)
        value = self._forward(losses, data, rows)
        cotangent = torch.full_like(value, n / rows)
        self._backward(value, cotangent, losses, data, n, rows)
        with torch.no_grad():
            return value.detach().float().reshape(n, -1).mean(1)

    def _forward(self, losses: Losses, data: Any, rows: int) -> Tensor:
        recorder = self.recorder
        recorder.mark_data(data)
        with torch.enable_grad(), opaque_modules(self.model, self.opaque, recorder), recorder:
            value = call(losses, data)
        return check_losses(value, rows)

    def _backward(self, value: Tensor, cotangent: Tensor, losses: Losses, data: Any, n: int, rows: int) -> None:
        recorder = self.recorder
        names = list(self.parameters)
        # recomputation inside a checkpoint must meet the recorder, so it may not run on another thread
        with torch.autograd.set_multithreading_enabled(False), without_autocast(recorder.device), recorder:
            # torch.autograd.grad is itself a torch function, which would switch the recorder off
            grads = _engine_run_backward(
                (value,), (cotangent,), False, False, (recorder.anchor, *self.parameters.values()),
                allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
        unseen = [name for name, g in zip(names, grads[1:], strict=True) if g is not None]
        if unseen:
            self._make_opaque(unseen)
            raise NeedsProbe(("opaque", unseen[0], 0))

    def _make_opaque(self, names: list[str]) -> None:
        """Some gradient by-passed the recorder: differentiate the smallest module around it as a whole."""
        name = names[0]
        module = smallest_enclosing(self.model, name, self.opaque)
        if module is None:
            raise Unsupported(
                f"parameter {name!r} is used by an operation that cannot be recorded (compiled or custom code) "
                "outside any module of the model; rewrite it in torch operations, or set physical_batch_size=1"
            )
        self.opaque = [m for m in self.opaque if not (m == module or m.startswith(module + "."))] + [module]

    def probe(self, losses: Losses, data: Any, n: int, rows: int) -> None:
        """Send the gradient of single examples back and see where it arrives (layout.py)."""
        recorder = self.recorder
        if n == 1:
            return
        found: dict[Any, Any] = {}
        examples = dict.fromkeys([0, n - 1, min(1, n - 1)])
        todo = list(examples)
        attempts = 0
        while todo:
            i = todo[0]
            recorder.begin(n, lambda tensor, use: None)
            recorder.probing, recorder.probed_example = found, i
            try:
                value = self._forward(losses, data, rows)
                cotangent = torch.zeros_like(value)
                cotangent.view(n, -1)[i] = 1.0
                self._backward(value, cotangent, losses, data, n, rows)
                todo.pop(0)
            except NeedsProbe:
                attempts += 1
                if attempts > 50:
                    raise Unsupported(
                        "the model's operations could not be recorded; set physical_batch_size=1"
                    ) from None
                found.clear()
                todo = list(examples)
            finally:
                recorder.probing = None

    def clipped_sums(
        self, losses: Losses, data: Any, n: int, rows: int, geometry: Geometry, clipping: Clipping
    ) -> Clipped:
        """Σ_i of the clipped gradients of n examples (rows = n · augmentations), in the geometry's coordinates."""
        if n == 1:
            return self._single(losses, data, rows, geometry, clipping)
        meter = Meter(geometry, self.recorder, n)
        value = self.measure(losses, data, n, rows, meter)
        with torch.no_grad(), without_autocast(self.recorder.device):
            return self._clip(meter, value, clipping)

    def _clip(self, meter: Meter, value: Tensor, clipping: Clipping) -> Clipped:
        norms = meter.finish()
        if self.watch_reached:
            self.reached = {name: bool((norms[name] != 0).any()) if uses else None for name, uses in meter.uses.items()}
        weights, total, active = clipping.weights(norms)
        finite = torch.isfinite(total)
        bad = meter.n - int(finite.sum())
        if bad:
            weights = {name: torch.where(finite, w, 0.0) for name, w in weights.items()}
        if bad == meter.n:
            meter.uses.clear()
            sums: dict[str, Tensor] = {}
        else:
            sums = meter.sums(weights, finite if bad else None)
        return Clipped(sums, total, active & finite, value, bad)

    def _single(self, losses: Losses, data: Any, rows: int, geometry: Geometry, clipping: Clipping) -> Clipped:
        """A batch of one needs no recorder: its gradient is the ordinary one. Any model works here."""
        from .uses import PerExample

        with torch.enable_grad():
            value = check_losses(call(losses, data), rows)
        with without_autocast(value.device):
            names = list(self.parameters)
            grads = torch.autograd.grad(value.mean(), list(self.parameters.values()), allow_unused=True)
        meter = Meter(geometry, self.recorder, 1)
        with torch.no_grad(), without_autocast(value.device):
            for name, g in zip(names, grads, strict=True):
                if g is not None:
                    meter.uses[name].append(PerExample(g[None]))
            return self._clip(meter, value.detach().float().mean()[None], clipping)


def check_model(model: nn.Module) -> None:
    """Refuse what is known to mix examples or to hide operations, by name."""
    for name, module in model.named_modules():
        label = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise Unsupported(
                f"{label} is under torch.compile, which hides its operations from the private step; pass the "
                "uncompiled model (model._orig_mod) to make_private"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise Unsupported(f"{label} is a TorchScript module, whose operations cannot be recorded; use the original")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if isinstance(module, nn.SyncBatchNorm) or module.training or module.running_mean is None:
                raise PrivacyError(
                    f"{label} computes statistics over the batch and so mixes examples; replace it with GroupNorm, or "
                    "freeze its statistics with .eval() before each step"
                )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
            raise PrivacyError(
                f"{label} updates running statistics from private examples; set track_running_stats=False or .eval()"
            )
