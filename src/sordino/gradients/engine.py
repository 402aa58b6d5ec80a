"""From a physical batch to clipped sums: forward, one backward, norms, one weighted sum per parameter.

`Engine.clipped_sums` is all that a private step needs of this room. What the
recorder cannot see inside (a custom autograd function, say) is found by its
gradient; the smallest module around it is then differentiated as one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyError, Unsupported
from ..geometry.base import Geometry, Meter
from .backward import backward, in_half, is_reentrant
from .clipping import Clipping
from .layout import NeedsProbe
from .opaque import opaque_modules, smallest_enclosing
from .precision import launches_are_dear
from .probe import probe
from .recorder import Recorder, check_losses, nowhere
from .rules.fallback import rng_state, set_rng_state

Losses = Callable[..., Tensor]
FP16_SCALE = 2.0**14


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
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield


class Engine:
    """Per-example gradients of one model; keeps what it learns about it (layouts, opaque modules)."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        self.model, self.parameters = model, parameters
        self.recorder = Recorder(parameters)
        self.opaque: list[str] = []  # modules differentiated as one operation
        self.reentrant = False  # whether the model uses reentrant activation checkpoints
        # after a batch, by parameter: None if no use was met, else whether any gradient was not zero
        self.reached: dict[str, bool | None] = {}
        self.watch_reached = True

    def state_dict(self) -> dict[str, Any]:
        """What was learnt about the model, so that a resumed run takes the same path."""
        return {
            "opaque": list(self.opaque),
            "reentrant": self.reentrant,
            "layouts": self.recorder.layouts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.opaque, self.reentrant = list(state["opaque"]), bool(state["reentrant"])
        self.recorder.layouts.load_state_dict(state["layouts"])

    def measure(self, losses: Losses, data: Any, n: int, rows: int, meter: Meter, scaled: bool = False) -> Tensor:
        """One forward and one backward; the uses go to the meter. Returns the losses, (n,).

        With `scaled`, losses computed in float16 are scaled up so that their gradients do not vanish; the meter
        knows by how much (`meter.scale`). Every pass over the batch draws the same random numbers.
        """
        random = rng_state(self.recorder.device)
        self.recorder.layouts.new_batch()
        scale = FP16_SCALE if scaled else 1.0
        while True:
            try:
                value = self._measure(losses, data, n, rows, meter, scale)
                if meter.scale == 1.0 or self._in_range(meter, value):
                    return value
                scale = max(1.0, scale / 16)
                self.recorder.layouts.new_batch()  # what overflowed may arrive now
            except NeedsProbe as missing:
                self.probe(losses, data, n, rows, random, scale, missing)
            meter.reset()
            set_rng_state(self.recorder.device, random)

    def _in_range(self, meter: Meter, value: Tensor) -> bool:
        """No overflow in float16, but for examples whose very loss is not finite."""
        if self.recorder.layouts.poisoned:
            return False
        with torch.no_grad(), without_autocast(self.recorder.device):
            total = torch.stack(list(meter.finish().values())).sum(0)
        return bool((total.isfinite() | ~value.isfinite()).all())

    def _measure(self, losses: Losses, data: Any, n: int, rows: int, meter: Meter, scale: float) -> Tensor:
        recorder = self.recorder
        recorder.begin(n, meter.add)
        with opaque_modules(self.model, self.opaque, recorder):
            value = self._forward(losses, data, rows)
            meter.scale = scale if recorder.half else 1.0
            self._backward(value, torch.full_like(value, meter.scale * n / rows))
        with torch.no_grad():
            return value.detach().float().reshape(n, -1).mean(1)

    def _forward(self, losses: Losses, data: Any, rows: int) -> Tensor:
        recorder = self.recorder
        recorder.mark_data(data, rows)
        with torch.enable_grad(), recorder:
            value = call(losses, data)
        recorder.check_data()
        return check_losses(value, rows)

    def _backward(self, value: Tensor, cotangent: Tensor) -> None:
        recorder = self.recorder
        with without_autocast(recorder.device), recorder:
            recorder.collecting = True
            passed = backward(value, cotangent, recorder.anchor, list(self.parameters.values()), self.reentrant)
            recorder.later.flush()
        unseen = [name for name, g in zip(self.parameters, passed, strict=True) if g is not None]
        if unseen:
            self._make_opaque(unseen)
            raise NeedsProbe(None)

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

    def probe(
        self,
        losses: Losses,
        data: Any,
        n: int,
        rows: int,
        random: list[Tensor],
        scale: float = 1.0,
        missing: NeedsProbe | None = None,
    ) -> None:
        """Send the gradients of single examples back, as large as the pass sends them, and see where they arrive."""

        def send(mask: Tensor) -> None:
            set_rng_state(self.recorder.device, random)
            self.recorder.begin(n, nowhere)
            with opaque_modules(self.model, self.opaque, self.recorder):
                value = self._forward(losses, data, rows)
                self.reentrant = self.reentrant or is_reentrant(value)
                factor = scale if self.recorder.half else 1.0
                self._backward(value, factor * mask.to(value.dtype).repeat_interleave(rows // n))

        if n > 1:
            probe(self.recorder, n, send, missing)

    def clipped_sums(
        self, losses: Losses, data: Any, n: int, rows: int, geometry: Geometry, clipping: Clipping
    ) -> Clipped:
        """Σ_i of the clipped gradients of n examples (rows = n · augmentations), in the geometry's coordinates."""
        if n == 1:
            return self._single(losses, data, rows, geometry, clipping)
        # measuring many parameters at once saves launches: worth it on a GPU
        joint = launches_are_dear(self.recorder.device) and clipping.style != "layer-wise" and not self.watch_reached
        meter = Meter(geometry, self.recorder, n, joint)
        try:
            value = self.measure(losses, data, n, rows, meter, scaled=True)
            with torch.no_grad(), without_autocast(self.recorder.device):
                return self._clip(meter, value, clipping)
        finally:
            self.recorder.end()

    def _clip(self, meter: Meter, value: Tensor, clipping: Clipping) -> Clipped:
        norms = meter.true_norms()
        if self.watch_reached:
            arrived = self.recorder.reached()
            self.reached = {
                name: bool((norms[name] != 0).any()) if uses else False if name in arrived else None
                for name, uses in meter.uses.items()
            }
        weights, total, active = clipping.weights(norms)
        if not self.recorder.layouts.poisoned and math.isfinite(float(total.sum())):  # none of them is negative
            return Clipped(meter.sums(weights, None), total, active, value, 0)
        finite = torch.isfinite(total) & (not self.recorder.layouts.poisoned)
        bad = meter.n - int(finite.sum())
        if bad == meter.n:
            meter.reset()
            sums: dict[str, Tensor] = {}
        else:
            sums = meter.sums(weights, finite if bad else None)
        return Clipped(sums, total, active & finite, value, bad)

    def _single(self, losses: Losses, data: Any, rows: int, geometry: Geometry, clipping: Clipping) -> Clipped:
        """A batch of one needs no recorder: its gradient is the ordinary one. Any model works here."""
        from .uses import PerExample

        leaves, random, scale = list(self.parameters.values()), rng_state(self.recorder.device), FP16_SCALE
        while True:
            with torch.enable_grad():
                value = check_losses(call(losses, data), rows)
            half = scale > 1 and (value.dtype == torch.float16 or in_half(value))
            scale = scale if half else 1.0
            with without_autocast(value.device):
                grads = backward(value, torch.full_like(value, scale / rows), None, leaves, is_reentrant(value))
            if scale == 1.0 or all(g is None or bool(g.isfinite().all()) for g in grads):
                break
            scale = max(1.0, scale / 16)
            set_rng_state(self.recorder.device, random)
        meter = Meter(geometry, self.recorder, 1)
        meter.scale, self.recorder.layouts.poisoned = scale, False
        with torch.no_grad(), without_autocast(value.device):
            for name, g in zip(self.parameters, grads, strict=True):
                if g is not None:
                    meter.uses[name].append(PerExample((g.to_dense() if g.is_sparse else g)[None]))
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
