"""What must not change while `losses` runs: buffers, parameters, gradients, and nobody else's loss scaling."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PrivacyError, SordinoError
from .walk import Walk

SMALL = 1 << 20  # numbers in buffers that are compared one by one in every step
PLAIN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
}  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Mark = tuple[int, int, int]  # a tensor's identity, its version, where its numbers lie


class Buffers:
    """The model's buffers and parameters as they were. What the forward writes there would be released as it is.

    Version counters and addresses are compared in every step, which costs next to nothing. A write through `.data`
    shows in neither: while `losses` runs, a parameter whose `.data` is asked for is copied first, and small buffers
    are compared by value (on a GPU only if there are floating ones: to look is to wait for the device). With `values`,
    everything is, by `verify_values`. Copies of buffers are kept, so that a refused step leaves them as it found them.
    """

    def __init__(self, model: nn.Module, walk: Walk | None = None, values: bool = False) -> None:
        self.model, self.values = model, values
        self.walk = Walk(model) if walk is None else walk
        self.kept: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, a copy
        self.marks: dict[str, Mark | None] = {}  # parameters
        self.places: dict[str, int] = {}
        self.small: dict[str, Tensor] = {}
        self.flat: list[Tensor] = []  # the numbers of `small`
        self.sums: dict[str, int] = {}
        self.touched: dict[int, tuple[str, Tensor, Tensor]] = {}  # parameters whose `.data` was asked for, and a copy

    def _now(self) -> dict[str, Tensor]:
        self.walk.moved()
        return self.walk.buffers

    def remember(self) -> None:
        """Before a step. Copies only what was changed since the last time (by the user, between steps)."""
        now = self._now()
        self.touched = {}
        self.small = self._small(now)
        flat = flattened(self.small)
        fresh = len(flat) != len(self.flat) or (bool(flat) and not alike(flat, self.flat))
        self.flat = flat
        self.kept = {
            name: old
            if (old := self.kept.get(name)) is not None and old[0] is b and old[1] == version(b)
            and place(b) == self.places[name] and not (fresh and name in self.small)
            else (b, version(b), b.detach().clone())
            for name, b in now.items()
        }  # fmt: skip
        self.places = {name: place(b) for name, b in now.items()}
        self.marks = marks(self.walk.parameters)
        if self.values:
            self.sums = {name: fingerprint(p) for name, p in self.walk.parameters.items()}

    def _small(self, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers whose values are compared in every step."""
        if not self.values and not any(b.is_floating_point() or not b.is_cuda for b in now.values()):
            return {}
        found, left = {}, SMALL
        for name, b in now.items():
            size = b.numel()
            if (size <= left or self.values) and b.dtype in PLAIN and b.layout == torch.strided and not b.is_meta:
                found[name], left = b, left - size
        return found

    def changed(self) -> list[str]:
        """Names of buffers that differ from what was remembered, those that came or went included."""
        now = self._now()
        names = [name for name in {**self.kept, **now} if name not in now or name not in self.kept]
        for name, b in now.items():
            if name in self.kept:
                tensor, written, copy = self.kept[name]
                moved = tensor is not b or written != version(b) or written < 0 or self.places[name] != place(b)
                if moved and not same(b, copy):
                    names.append(name)
        if not names and self.flat and not alike(flattened({name: now[name] for name in self.small}), self.flat):
            names = [name for name in self.small if not same(now[name], self.kept[name][2])]
        return names

    def written(self) -> list[str]:
        """Names of parameters, frozen ones too, that are not what was remembered. After `changed`."""
        now = self.walk.parameters
        if marks(now) == self.marks:
            return []
        return [name for name in {**self.marks, **now} if marks({name: now.get(name)}) != {name: self.marks.get(name)}]

    def verify(self) -> None:
        """Put buffers back and say which one it was, if one changed."""
        changed = self.changed()
        if changed:
            self.restore()
            raise PrivacyError(
                f"buffer {changed[0]!r} changes in the forward pass, and would be released as it is with the model; "
                "freeze it (running statistics: .eval(); observers and codebooks: switch their updates off)"
            )
        self._refuse(self.written())
        changed = [name for name, p, copy in self.touched.values() if not same(p, copy)]
        self._put_back()
        self._refuse(changed)

    def touch(self, tensor: Tensor) -> None:
        """`.data` of it is about to be given to `losses`: what is written there leaves no trace but the numbers."""
        if id(tensor) in self.touched:
            return
        for name, p in self.walk.parameters.items():
            if p is tensor:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self.touched[id(tensor)] = (name, tensor, tensor.detach().clone())

    @torch.no_grad()
    def _put_back(self) -> None:
        for _, p, copy in self.touched.values():
            if p.shape == copy.shape and not same(p, copy):
                p.copy_(copy)

    def verify_values(self) -> None:
        """`verify`, and the numbers of all parameters."""
        self.verify()
        self._refuse([name for name, p in self.walk.parameters.items() if fingerprint(p) != self.sums[name]])

    @staticmethod
    def _refuse(names: list[str]) -> None:
        if names:
            raise PrivacyError(
                f"parameter {names[0]!r} is written to in the forward pass, and would be released with what the data "
                "put there; take the write out, and load the parameter anew: it may not have been put back"
            )

    @torch.no_grad()
    def restore(self) -> None:
        self._put_back()
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
        tensor, _, copy = self.kept[name]
        owner, _, last = name.rpartition(".")
        if now is not tensor:
            self.model.get_submodule(owner)._buffers[last] = tensor
        if not same(tensor, copy):
            if tensor.shape != copy.shape:
                tensor.resize_(copy.shape)
            tensor.copy_(copy)


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def marks(tensors: Mapping[str, Tensor | None]) -> dict[str, Mark | None]:
    try:
        return {n: None if t is None else (id(t), t._version, t.data_ptr()) for n, t in tensors.items()}
    except RuntimeError:  # inference tensors have no version, some kinds no address
        return {n: None if t is None else (id(t), version(t), place(t)) for n, t in tensors.items()}


def place(tensor: Tensor) -> int:
    """Where its numbers lie, as far as that can be told."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


@torch.no_grad()
def flattened(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The bits of all of them, one tensor for each device and dtype."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors.values():
        groups.setdefault((t.device, t.dtype), []).append(t.reshape(-1))
    return [torch.cat(parts).view(BITS[parts[0].element_size()]) for parts in groups.values()]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal bit for bit; waits for a GPU once."""
    if len(a) != len(b) or any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(a, b, strict=True)):
        return False
    if not any(x.is_cuda for x in a):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    home = next(x.device for x in a if x.is_cuda)
    return not bool(torch.stack([(x != y).any().to(home) for x, y in zip(a, b, strict=True)]).any())


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """64 bits of its numbers: any single change shows, several cancel with odds of about 2^-32 or less."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        return 0
    flat = tensor.detach().reshape(-1).view(BITS[tensor.element_size()])
    total = 0
    for start in range(0, flat.numel(), 1 << 20):
        part = flat[start : start + (1 << 20)].long()
        total = (total * 1000003 + int((part * _multipliers(part.device)[: len(part)]).sum())) & (2**64 - 1)
    return total


@functools.lru_cache(maxsize=2)
def _multipliers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (1 << 20,), generator=generator) * 2 + 1).to(device)


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
def losses_only(touch: Callable[[Tensor], None] | None = None) -> Iterator[None]:
    """While `losses` runs, it may neither scale what it returns nor call backward.

    An external GradScaler's factor would be clipped away, then divided out; a backward would put the raw gradient
    into p.grad. `touch` is told of every tensor whose `.data` is asked for.
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

    plain: Any = torch._C.TensorBase.data

    def data(self: Tensor) -> Any:
        assert touch is not None
        touch(self)
        return plain.__get__(self)

    scaler.scale, autograd.backward = scale, no_backward
    if patched := touch is not None and "data" not in torch.Tensor.__dict__:
        torch.Tensor.data = property(data, plain.__set__)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if patched:
            del torch.Tensor.data
        scaler.scale, autograd.backward = original, backward


def refuse_raw_gradients(parameters: Mapping[str, Tensor]) -> None:
    """After `losses`: a gradient that was not there before is the raw one, of a backward inside `losses`."""
    with torch._C.DisableTorchFunction():  # the recorder need not look at every access
        left = [name for name, p in parameters.items() if p.grad is not None]
        if left:
            for p in parameters.values():
                p.grad = None
            raise PrivacyError(
                f"losses left a gradient in parameter {left[0]!r}; p.grad may hold nothing but the private gradient: "
                "return the losses, one per example, and write nothing there"
            )


def refuse_hooks(parameters: Mapping[str, Tensor]) -> None:
    """A hook on a parameter would see, or change, gradients that are not private."""
    with torch._C.DisableTorchFunction():
        for name, p in parameters.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise PrivacyError(
                    f"parameter {name!r} carries a gradient hook, which could see raw gradients; take "
                    "it off, and work on p.grad after private.backward"
                )
