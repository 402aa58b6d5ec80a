"""Any other operation that joins parameters with the batch.

The operation runs as it is; its backward differentiates it again, once for the
inputs and once per example for the parameters, with `torch.func.vmap` or, where
that fails, one example at a time. In both, the operation sees batches of one.

How the operation is taken apart is not guessed: of the ways in split.py, the one
is taken under which every example alone gives the very numbers it gave in the
batch. An operation for which there is none mixes examples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import PrivacyError, Unsupported
from ..derived import OwnRows
from ..layout import Layout
from ..operation import Operation
from ..uses import PerExample
from .split import Split, one_by_one, same_numbers, splits, together

if TYPE_CHECKING:
    from ..recorder import Recorder

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


class Generic(Operation):
    """`func(*leaves)` with some leaves parameters and some batched."""

    def __init__(self, recorder: Recorder, func: Any, leaves: list[Any], spec: Any, label: str) -> None:
        self.name, self.func, self.spec = label, func, spec
        self.leaves = leaves
        tensors = [(i, t) for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        self.batched = [i for i, t in tensors if recorder.is_batched(t)]
        self.trained = [i for i, t in tensors if recorder.is_parameter(t)]
        self.originals: dict[int, Tensor] = {i: leaves[i] for i in self.trained}
        super().__init__(recorder, self.originals.values())
        self.rows: dict[int, Tensor] = {}  # one-row originals of expanded derived tensors
        for i, tensor in self.originals.items():
            origin = recorder.origin(tensor)
            if origin is not None and origin.expanded is not None:
                self.rows[i] = origin.expanded
                self.trains(origin.expanded)
            self.trains(tensor)
        self.parameters = {i: leaves[i].detach() for i in self.trained}
        for i in self.batched + self.trained:
            leaves[i] = None  # the batch is saved by autograd, not by this object
        self.autocast = autocast_state(recorder.device)

    def call(self, batched: tuple[Tensor, ...], parameters: dict[int, Tensor]) -> list[Any]:
        leaves = list(self.leaves)
        for i, t in zip(self.batched, batched, strict=True):
            leaves[i] = t
        for i, t in parameters.items():
            leaves[i] = t
        args, kwargs = tree_unflatten(leaves, self.spec)
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            flat, self.out_spec = tree_flatten(self.func(*args, **kwargs))
        return flat

    def outputs(self, batched: tuple[Tensor, ...], parameters: dict[int, Tensor]) -> list[Tensor]:
        flat = self.call(batched, parameters)
        return [flat[i] for i in self.tensors]

    def forward(self, *inputs: Tensor) -> tuple[Any, tuple[Tensor | None, ...]]:
        device = self.recorder.device
        before = rng_state(device)
        flat = self.call(inputs, self.parameters)
        if not all(torch.equal(a, b) for a, b in zip(before, rng_state(device), strict=True)):
            raise Unsupported(
                f"{self.name} draws random numbers (dropout?) together with parameter(s) {self.key[1]!r}, where only "
                "the generic rule applies; move the random part out of it, or set physical_batch_size=1"
            )
        self.tensors = [i for i, out in enumerate(flat) if isinstance(out, Tensor)]
        self.flat = [None if i in self.tensors else out for i, out in enumerate(flat)]
        outs = [flat[i] for i in self.tensors]
        known = [*inputs, *self.parameters.values()]
        return tuple(out.clone() if any(out is t for t in known) else out for out in outs), inputs

    def rebuild(self, outs: tuple[Tensor, ...]) -> Any:
        flat = list(self.flat)
        for i, out in zip(self.tensors, outs, strict=True):
            flat[i] = out
        return tree_unflatten(flat, self.out_spec)

    # -- backward -----------------------------------------------------------------------

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        shown = [j for j, g in enumerate(grads) if g is not None and (g.is_floating_point() or g.is_complex())]
        layout = None
        for j in shown:
            g = grads[j]
            key = (f"{self.name}[{j}]" if j else self.name, *self.key[1:])
            found = self.recorder.layout(key, g if g.dim() else g[None])
            layout = found if layout is None else layout
        if layout is not None:
            self._record(saved, [grads[j] for j in shown], shown, layout)
        return self._inputs(saved, grads, needed)

    def _inputs(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        if not any(needed):
            return (None,) * len(saved)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(saved, needed, strict=True)]
            outs = self.outputs(tuple(inputs), self.parameters)
            pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
            wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
                if pairs
                else [None] * len(wanted)
            )
            return tuple(next(found) if need else None for need in needed)

    def _record(self, saved: tuple[Tensor, ...], grads: list[Tensor], shown: list[int], layout: Layout) -> None:
        n = self.recorder.n
        layouts = [self._place(g, layout) for g in grads]
        split = self.recorder.choices.get(self.key)
        if split is None or not split.fits(saved, self.parameters, n):
            split = self._choose(saved, grads, shown, layouts, layout)
        found = together(self, split, saved, grads, shown, layouts) if n > 1 else None
        if found is None:
            found = self._attempt(lambda: one_by_one(self, split, saved, grads, shown, layouts))
        for i, grad in found.items():
            own = split.parameters[i]
            if own == "row":
                self.recorder.sink(self.rows[i], PerExample(grad.reshape(n, *self.rows[i].shape)))
            elif not isinstance(own, Layout):
                self.recorder.sink(self.originals[i], PerExample(grad.reshape(n, *self.originals[i].shape)))
            else:
                fronted = torch.stack([own.front(each, 1)[0] for each in grad])
                self.recorder.sink(self.originals[i], OwnRows(fronted, own))

    def _place(self, g: Tensor, layout: Layout) -> Layout:
        for choice in (layout, Layout(0)):
            if choice.fits(g.shape, self.recorder.n):
                return choice
        raise self.recorder.no_layout(self.key, g.shape)

    def _choose(
        self, saved: tuple[Tensor, ...], grads: list[Tensor], shown: list[int], layouts: list[Layout], layout: Layout
    ) -> Split:
        """The way to take the operation apart under which each example gives its own numbers."""
        n, problem = self.recorder.n, None
        truth = [self.outputs(saved, self.parameters)[j] for j in shown]
        right: list[Split] = []
        for split in splits(saved, self.parameters, self.rows, layout, n):
            try:
                if same_numbers(self, split, saved, truth, shown, layouts):
                    right.append(split)
            except torch.OutOfMemoryError:
                raise  # less at once will do
            except FAILURES as error:
                problem = problem or error
        if not right and problem is None:
            raise PrivacyError(
                f"{self.name} with parameter(s) {self.key[1]!r} gives an example other numbers alone than in the "
                "batch, so it mixes examples; remove what mixes them, or set physical_batch_size=1"
            )
        if not right:
            raise self._cannot(problem)
        if len(right) == 1 and not (self.key in self.recorder.layouts.now or self.key in self.recorder.layouts.loose):
            self.recorder.choices[self.key] = right[0]  # else look again next time
        return right[0]

    def _attempt(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise self._cannot(error) from error

    def _cannot(self, error: Exception | None) -> Unsupported:
        message = str(error).splitlines()[0] if str(error) else "no message"
        return Unsupported(
            f"{self.name} with parameter(s) {self.key[1]!r} cannot be differentiated one example at a time "
            f"({type(error).__name__}: {message}); rewrite it with batch-first operations, or set physical_batch_size=1"
        )


def autocast_state(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    kinds = dict.fromkeys(["cpu", device.type])
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds if k != "meta"]


def rng_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def generic(recorder: Recorder, func: Any, args: tuple, kwargs: dict, label: str) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    originals = list(leaves)
    operation = Generic(recorder, func, leaves, spec, label)
    outs = operation.apply(*[originals[i] for i in operation.batched])
    return operation.rebuild(outs)


# -- writing in place ---------------------------------------------------------------------

_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__", "__ipow__"}


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED


def refuse_writing(recorder: Recorder, func: Any, target: Tensor) -> None:
    if id(target) in recorder.names:
        label = func.__name__.strip("_")
        raise Unsupported(
            f"{label} writes into parameter {recorder.name_of(target)!r} during the forward pass; a private step "
            "cannot follow that, compute a new tensor instead"
        )


def run(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    label = getattr(func, "__name__", str(func)).strip("_")
    if not in_place(func):
        return generic(recorder, func, args, kwargs, label)
    target = args[0]
    refuse_writing(recorder, func, target)

    def out_of_place(first: Tensor, *rest: Any, **named: Any) -> Tensor:
        copy = first.clone()
        func(copy, *rest, **named)
        return copy

    with torch._C.DisableTorchFunction():
        before = target.clone()
    if recorder.is_parameter(target):
        recorder.mark_derived(before, target)
    elif recorder.is_batched(target) and not before.requires_grad:
        recorder.batched.add(before)
    out = generic(recorder, out_of_place, (before, *args[1:]), kwargs, label)
    with torch._C.DisableTorchFunction():
        target.copy_(out)
    recorder.unmark_derived(target)
    return target
