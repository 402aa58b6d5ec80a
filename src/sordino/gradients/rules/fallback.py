"""Any other operation that joins parameters with the batch.

The operation runs as it is; its backward differentiates it again, once for the
inputs and once per example for the parameters, with `torch.func.vmap` or, where
that fails, one example at a time. In both, the operation sees batches of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import Unsupported
from ..layout import Layout
from ..recorder import Operation
from ..uses import OwnRow, PerExample

if TYPE_CHECKING:
    from ..recorder import Recorder


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED


_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__"}


class Generic(Operation):
    """`func(*leaves)` with some leaves parameters and some batched."""

    def __init__(self, recorder: Recorder, func: Any, leaves: list[Any], spec: Any, label: str) -> None:
        self.name, self.func, self.spec = label, func, spec
        self.leaves = leaves
        tensors = [(i, t) for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        self.batched = [i for i, t in tensors if recorder.is_batched(t)]
        self.trained = [i for i, t in tensors if recorder.is_parameter(t)]
        self.originals = {i: leaves[i] for i in self.trained}
        super().__init__(recorder, [leaves[i] for i in self.trained])
        self.rows: dict[int, Tensor] = {}  # one-row originals of expanded derived tensors
        for i in self.trained:
            tensor = leaves[i]
            origin = recorder.derived.get(tensor) if id(tensor) not in recorder.names else None
            if origin is not None and origin.expanded is not None:
                self.rows[i] = origin.expanded
            self.trains(self.rows.get(i, tensor))
            # several uses may follow from one operation, so these parameters wait for the end
            recorder.expect(self.rows.get(i, tensor))
        self.parameters = {i: leaves[i].detach() for i in self.trained}
        for i in self.batched + self.trained:
            leaves[i] = None  # the batch is saved by autograd, not by this object

    def call(self, batched: tuple[Tensor, ...], parameters: dict[int, Tensor]) -> list[Any]:
        leaves = list(self.leaves)
        for i, t in zip(self.batched, batched, strict=True):
            leaves[i] = t
        for i, t in parameters.items():
            leaves[i] = t
        args, kwargs = tree_unflatten(leaves, self.spec)
        flat, self.out_spec = tree_flatten(self.func(*args, **kwargs))
        return flat

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
        return tuple(flat[i].clone() if any(flat[i] is x for x in inputs) else flat[i] for i in self.tensors), inputs

    def rebuild(self, outs: tuple[Tensor, ...]) -> Any:
        flat = list(self.flat)
        for i, out in zip(self.tensors, outs, strict=True):
            flat[i] = out
        return tree_unflatten(flat, self.out_spec)

    def backward(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        recorder, n = self.recorder, self.recorder.n
        shown = [g for g in grads if g is not None and g.is_floating_point()]
        live = [g for g in shown if bool((g != 0).any())]
        for g in live if recorder.probing is not None else live[:1] or shown[:1]:
            layout = recorder.layout(self.key, g if g.dim() else g[None])
        if recorder.probing is None and live:
            self.saved = saved
            self._record(saved, grads, layout, n)
            del self.saved
        return self._inputs(saved, grads, needed)

    def _inputs(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
        if not any(needed):
            return (None,) * len(saved)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(saved, needed, strict=True)]
            flat = self.call(tuple(inputs), self.parameters)
            outs = [flat[i] for i in self.tensors]
            pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
            wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
                if pairs
                else [None] * len(wanted)
            )
            return tuple(next(found) if need else None for need in needed)

    def _record(self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], layout: Layout, n: int) -> None:
        """Split every batched tensor into examples and differentiate each alone."""
        sink = self.recorder.sink
        parts = [self._split(t, layout, n) for t in saved]
        pieces = [self._split(g, layout, n) for g in grads]
        if any(p is None for p in pieces):
            raise self.recorder.no_layout(self.key, grads[0].shape)
        error: Exception | None = None
        for choice in self._choices(n):
            try:
                found = self._per_example(parts, pieces, choice, n)
            except (RuntimeError, ValueError, NotImplementedError) as problem:
                error = problem
                continue
            for i, grad in found.items():
                target = self.target(i)
                if choice.get(i) == "own":
                    sink(target, OwnRow(grad.reshape(n, *target.shape[1:])))
                else:
                    sink(target, PerExample(grad.reshape(n, *target.shape)))
            return
        raise Unsupported(
            f"{self.name} with parameter(s) {self.key[1]!r} cannot be differentiated one example at a time "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); rewrite it with "
            "batch-first operations, or set physical_batch_size=1"
        )

    def target(self, i: int) -> Tensor:
        return self.rows.get(i, self.originals[i])

    def _split(self, tensor: Tensor, layout: Layout, n: int) -> Tensor | None:
        """(n, example with its batch dimension kept), or None if the tensor has no batch dimension."""
        if n == 1:
            return tensor[None]
        for candidate in (layout, Layout(0)):
            if candidate.fits(tensor.shape, n):
                fronted = candidate.front(tensor, n)  # (n, m, remaining)
                return fronted if candidate.dim == 0 else fronted.movedim(1, candidate.dim + 1)
        return None

    def _choices(self, n: int) -> list[dict[int, str]]:
        """How derived tensors meet one example: whole; by their one original row; by their own row."""
        originals = self.originals
        choices: list[dict[int, str]] = [{}]
        if self.rows:
            choices.insert(0, dict.fromkeys(self.rows, "row"))
        own = {i: "own" for i in self.trained if i not in self.rows and id(originals[i]) not in self.recorder.names
               and originals[i].dim() and originals[i].shape[0] == n}  # fmt: skip
        if own and n > 1:
            choices.append({**dict.fromkeys(self.rows, "row"), **own})
        return choices

    def _per_example(
        self, parts: list[Tensor | None], pieces: list[Tensor | None], choice: dict[int, str], n: int
    ) -> dict[int, Tensor]:
        whole: dict[int, Tensor] = {}
        sliced: dict[int, Tensor] = {}
        for i, p in self.parameters.items():
            if choice.get(i) == "row":
                whole[i] = self.rows[i].detach()
            elif choice.get(i) == "own":
                sliced[i] = p[:, None]
            else:
                whole[i] = p
        saved = self.saved

        def one(parts_i: tuple, pieces_i: tuple, own_i: dict[int, Tensor]) -> dict[int, Tensor]:
            inputs = tuple(s if a is None else b for a, b, s in zip(parts, _holes(parts, parts_i), saved, strict=True))

            def outputs(parameters: dict[int, Tensor]) -> Tensor:
                flat = self.call(inputs, parameters)
                total = torch.zeros((), device=self.recorder.device, dtype=pieces_i[0].dtype)
                for j, g in zip(self.tensors, pieces_i, strict=True):
                    if not flat[j].is_floating_point():
                        continue
                    if flat[j].shape != g.shape:
                        raise ValueError(f"one example gives {tuple(flat[j].shape)}, not {tuple(g.shape)}")
                    total = total + (flat[j] * g).sum()
                return total

            return torch.func.grad(outputs)({**whole, **own_i})

        present = tuple(p for p in parts if p is not None)
        cotangents = tuple(p for p in pieces if p is not None)
        if n > 1:
            try:
                return torch.func.vmap(one, in_dims=(0, 0, 0), randomness="error")(present, cotangents, sliced)
            except (RuntimeError, NotImplementedError):
                pass
        each = [
            self._one_by_autograd(
                tuple(p[i] for p in present), tuple(p[i] for p in cotangents),
                {k: t[i] for k, t in sliced.items()}, whole, parts,
            )
            for i in range(n)
        ]  # fmt: skip
        return {k: torch.stack([e[k] for e in each]) for k in each[0]}

    def _one_by_autograd(
        self, parts_i: tuple, pieces_i: tuple, own_i: dict[int, Tensor], whole: dict[int, Tensor], parts: list
    ) -> dict[int, Tensor]:
        """One example through ordinary autograd, which also knows custom autograd functions."""
        inputs = tuple(s if a is None else b for a, b, s in zip(parts, _holes(parts, parts_i), self.saved, strict=True))
        with torch.enable_grad():
            leaves = {k: t.detach().requires_grad_() for k, t in {**whole, **own_i}.items()}
            flat = self.call(inputs, leaves)
            outs, cotangents = [], []
            for j, g in zip(self.tensors, pieces_i, strict=True):
                if flat[j].shape != g.shape:
                    raise ValueError(f"one example gives {tuple(flat[j].shape)}, not {tuple(g.shape)}")
                if flat[j].requires_grad:
                    outs.append(flat[j])
                    cotangents.append(g)
            grads = torch.autograd.grad(outs, list(leaves.values()), cotangents, allow_unused=True)
        return {
            k: torch.zeros_like(leaf) if g is None else g for (k, leaf), g in zip(leaves.items(), grads, strict=True)
        }


def _holes(parts: list, present: tuple) -> list:
    values = iter(present)
    return [None if p is None else next(values) for p in parts]


def rng_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def generic(recorder: Recorder, func: Any, args: tuple, kwargs: dict, label: str) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    originals = list(leaves)
    operation = Generic(recorder, func, leaves, spec, label)
    outs = operation.apply(*[originals[i] for i in operation.batched])
    return operation.rebuild(outs)


def run(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    label = getattr(func, "__name__", str(func)).strip("_")
    if not in_place(func):
        return generic(recorder, func, args, kwargs, label)
    target = args[0]
    if id(target) in recorder.names:
        raise Unsupported(
            f"{label} writes into parameter {recorder.name_of(target)!r} during the forward pass; a private step "
            "cannot follow that, compute a new tensor instead"
        )

    def out_of_place(first: Tensor, *rest: Any, **named: Any) -> Tensor:
        copy = first.clone()
        func(copy, *rest, **named)
        return copy

    with torch._C.DisableTorchFunction():
        before = target.clone()
    if recorder.is_batched(target):
        if not before.requires_grad:
            recorder.batched[before] = True
    elif recorder.is_parameter(target):
        recorder.mark_derived(before, recorder.derived[target])
    out = generic(recorder, out_of_place, (before, *args[1:]), kwargs, label)
    with torch._C.DisableTorchFunction():
        target.copy_(out)
    if target in recorder.derived:
        del recorder.derived[target]
    return target
