"""What must not change while `losses` runs: buffers, gradients, and nobody else's loss scaling."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PrivacyError, SordinoError
from .walk import Walk


class Buffers:
    """The model's buffers as they were. What the forward writes there would be released as it is, with the model.

    A version counter says whether a buffer was written to, so that looking costs next to nothing; only one that was
    is compared. Copies are kept, so that a refused step leaves the buffers as it found them.
    """

    def __init__(self, model: nn.Module, walk: Walk | None = None) -> None:
        self.model = model
        self.walk = Walk(model) if walk is None else walk
        self.kept: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, a copy

    def _now(self) -> dict[str, Tensor]:
        self.walk.moved()
        return self.walk.buffers

    def remember(self) -> None:
        """Before a step. Copies only what was changed since the last time (by the user, between steps)."""
        now = self._now()
        self.kept = {
            name: old if (old := self.kept.get(name)) is not None and old[0] is b and old[1] == version(b)
            else (b, version(b), b.detach().clone())
            for name, b in now.items()
        }  # fmt: skip

    def changed(self) -> list[str]:
        """Names of buffers that differ from what was remembered, those that came or went included."""
        now = self._now()
        names = [name for name in {**self.kept, **now} if name not in now or name not in self.kept]
        for name, b in now.items():
            if name in self.kept:
                tensor, written, copy = self.kept[name]
                if (tensor is not b or written != version(b) or written < 0) and not same(b, copy):
                    names.append(name)
        return names

    def verify(self) -> None:
        """Put everything back and say which buffer it was, if one changed."""
        changed = self.changed()
        if changed:
            self.restore()
            raise PrivacyError(
                f"buffer {changed[0]!r} changes in the forward pass, and would be released as it is with the model; "
                "freeze it (running statistics: .eval(); observers and codebooks: switch their updates off)"
            )

    @torch.no_grad()
    def restore(self) -> None:
        for name, b in list(self.model.named_buffers()):
            if name not in self.kept:
                owner, _, last = name.rpartition(".")
                delattr(self.model.get_submodule(owner), last)
            else:
                self._put(name, b)
        present = dict(self.model.named_buffers())
        for name in self.kept:
            if name not in present:
                self._put(name, None)

    def _put(self, name: str, now: Tensor | None) -> None:
        tensor, written, copy = self.kept[name]
        if now is tensor and version(tensor) == written >= 0:
            return
        owner, _, last = name.rpartition(".")
        if now is not tensor:
            self.model.get_submodule(owner)._buffers[last] = tensor
        if not same(tensor, copy):
            if tensor.shape != copy.shape:
                tensor.resize_(copy.shape)
            tensor.copy_(copy)


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


@contextmanager
def losses_only() -> Iterator[None]:
    """While `losses` runs, it may neither scale what it returns nor call backward.

    An external GradScaler's factor would be clipped away, then divided out; a backward would put the raw gradient
    into p.grad.
    """
    scaler: Any = torch.amp.GradScaler
    autograd: Any = torch.autograd
    original, backward, thread = scaler.scale, autograd.backward, threading.get_ident()

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled() and threading.get_ident() == thread:
            raise SordinoError(
                "losses was scaled by a GradScaler; leave it out (return the losses as they are, and call "
                "optimizer.step() itself): float16 losses are scaled inside backward"
            )
        return original(self, outputs)

    def no_backward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise PrivacyError(
                "losses called backward() itself, which would leave the raw gradient in p.grad; return the losses, one "
                "per example, and leave the backward pass to private.backward"
            )
        return backward(*args, **kwargs)

    scaler.scale, autograd.backward = scale, no_backward
    try:
        yield
    finally:
        scaler.scale, autograd.backward = original, backward


def refuse_raw_gradients(parameters: Mapping[str, Tensor]) -> None:
    """After `losses`: a gradient that was not there before is the raw one, of a backward inside `losses`."""
    for name, p in parameters.items():
        if p.grad is not None:
            for q in parameters.values():
                q.grad = None
            raise PrivacyError(
                f"losses left a gradient in parameter {name!r}; p.grad may hold nothing but the private gradient: "
                "return the losses, one per example, and write nothing there"
            )
