"""What every trainable parameter did in one call of `losses`.

The recorder is a torch-function mode: it sees every operation at the level a
person writes it (`F.linear`, `torch.matmul`, `x + p`), whoever calls it. A
module, a tied weight, `F.linear(h, embedding.weight)` and a bare parameter are
therefore the same thing. Each tensor is one of

    parameter   a trainable parameter
    derived     computed from parameters and constants only
    batched     depends on the batch (or needs a gradient for any other reason)
    constant    everything else

An operation that joins a parameter (or a derived tensor) with batched tensors
is replaced by a `Tap`: the same forward on detached parameters; its backward
hands what the rule needs to `record` and computes input gradients only. So no
ordinary weight gradient is computed, and a parameter that still receives one
was used where the recorder cannot see: that is found in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import PrivacyError, SordinoError
from .layout import Layout, candidates
from .uses import Use

Key = tuple[str, str, int]  # operation, parameter, how often before in this forward


# differentiation inside `losses` (a penalty on gradients, say) is not an operation on parameters
TRANSPARENT = {torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.register_hook}


class NeedsProbe(Exception):
    """A use was met whose layout nobody has verified yet."""


@dataclass
class Origin:
    """How a derived tensor came about, where that saves work."""

    embedding: tuple[Tensor, Tensor, int | None] | None = None  # (parameter, constant index, padding index)
    expanded: Tensor | None = None  # the one-row tensor it was expanded from


class Tap(torch.autograd.Function):
    """One recorded operation. `anchor` is a dummy leaf, so that the node runs in every backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, operation: Operation, *inputs: Tensor) -> Any:
        out, saved = operation.forward(*inputs)
        ctx.operation = operation
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # outside the guard: an activation checkpoint recomputes here
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return None, None, *ctx.operation.backward(saved, grads, ctx.needs_input_grad[2:])


class Operation:
    """A rule for one operation: forward on detached parameters, backward that records.

    `inputs` of forward are the batched tensors; parameters are attributes.
    """

    name: str

    def __init__(self, recorder: Recorder, parameters: Iterable[Tensor]) -> None:
        self.recorder = recorder
        self.key = recorder.next_key(self.name, parameters)

    def forward(self, *inputs: Tensor) -> tuple[Any, tuple[Tensor | None, ...]]:
        raise NotImplementedError

    def backward(
        self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError

    def apply(self, *inputs: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return Tap.apply(self.recorder.anchor, self, *inputs)

    def trains(self, tensor: Any) -> bool:
        """Whether `tensor` is a parameter (or derived from one), noting that a use of it will follow."""
        if not isinstance(tensor, Tensor) or not self.recorder.is_parameter(tensor):
            return False
        self.recorder.expect(tensor)
        return True


class Recorder(TorchFunctionMode):
    """See the module's docstring. One recorder serves one run; `begin` starts a physical batch."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.names = {id(p): name for name, p in parameters.items()}
        self.layouts: dict[Key, Layout] = {}
        self.verified: set[Key] = set()
        self.verify = True
        self.anchor = torch.zeros((), requires_grad=True)
        self.device = next(iter(parameters.values())).device
        self.begin(1, lambda tensor, use: None)

    def begin(self, n: int, sink: Callable[[Tensor, Use], None]) -> None:
        """Start a physical batch of n examples; every finished use goes to `sink`."""
        self.n = n
        self.sink = sink
        self.batched: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.derived: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.seen: dict[tuple[str, str], int] = {}
        self.expected: dict[int, int] = {}  # uses recorded by the forward, by parameter
        self.keep_derived: list[Tensor] = []
        self.has_derived: set[str] = set()
        self.probing: dict[Key, list[Layout]] | None = None
        self.probed_example = 0

    # -- what a tensor is ---------------------------------------------------------------

    def mark_data(self, data: Any) -> None:
        """The tensors of the batch itself."""
        for leaf in tree_flatten(data)[0]:
            if isinstance(leaf, Tensor):
                self.batched[leaf] = True

    def name_of(self, tensor: Tensor) -> str:
        if id(tensor) in self.names:
            return self.names[id(tensor)]
        below = self.parameters_below(tensor)
        return "+".join(self.names[id(p)] for p in below)

    def is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self.names or (tensor.requires_grad and tensor in self.derived)

    def is_batched(self, tensor: Tensor) -> bool:
        if id(tensor) in self.names:
            return False
        if tensor.requires_grad:
            return tensor not in self.derived
        return tensor in self.batched

    def parameters_below(self, tensor: Tensor) -> list[Tensor]:
        """The trainable parameters that a derived tensor was computed from."""
        found: dict[int, Tensor] = {}
        todo, done = [tensor.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in done:
                continue
            done.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.names:
                found[id(variable)] = variable
            todo.extend(next_node for next_node, _ in node.next_functions)
        return sorted(found.values(), key=lambda p: self.names[id(p)])

    def next_key(self, operation: str, tensors: Iterable[Tensor]) -> Key:
        name = ",".join(self.name_of(t) for t in tensors)
        count = self.seen.get((operation, name), 0)
        self.seen[operation, name] = count + 1
        return operation, name, count

    def expect(self, tensor: Tensor) -> None:
        self.expected[id(tensor)] = self.expected.get(id(tensor), 0) + 1

    # -- operations ---------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            return func(*args, **kwargs)
        parameters = batched = False
        for leaf in _tensors(args, kwargs):
            if id(leaf) in self.names:
                parameters = True
            elif leaf.requires_grad:
                if leaf in self.derived:
                    parameters = True
                else:
                    batched = True
            elif leaf in self.batched:
                batched = True
        if not parameters or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if batched:
                self._mark_batched(out)
            return out
        from . import rules

        return rules.run(self, func, args, kwargs, batched)

    def _mark_batched(self, out: Any) -> None:
        if isinstance(out, Tensor):
            if not out.requires_grad and id(out) not in self.names:
                self.batched[out] = True
        elif isinstance(out, (tuple, list, dict)):
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor) and not leaf.requires_grad:
                    self.batched[leaf] = True

    def mark_derived(self, out: Any, origin: Origin | None = None) -> None:
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in self.names:
                self.derived[leaf] = origin or Origin()
                self.keep_derived.append(leaf)
                self.has_derived.update(self.names[id(p)] for p in self.parameters_below(leaf))

    # -- the backward's side ------------------------------------------------------------

    def layout(self, key: Key, g: Tensor) -> Layout | None:
        """Where the examples lie in g. None while probing: then there is nothing to record."""
        if self.probing is not None:
            self._look(key, g)
            return None
        if self.n == 1:
            return Layout(0)
        known = self.layouts.get(key)
        if self.verify and key not in self.verified:
            if bool((g != 0).any()):
                raise NeedsProbe(key)
        if known is None or not known.fits(g.shape, self.n):
            if known is not None and self.verify:
                raise NeedsProbe(key)
            possible = candidates(g.shape, self.n)
            if not possible:
                raise self.no_layout(key, g.shape)
            known = self.layouts[key] = possible[0]
        return known

    def no_layout(self, key: Key, shape: Iterable[int]) -> PrivacyError:
        operation, name, _ = key
        return PrivacyError(
            f"parameter {name!r}: the gradient of one example's loss at {operation} (output {tuple(shape)}, "
            f"{self.n} examples) does not stay in that example's own rows, so examples are mixed before or after it; "
            "remove what mixes them (batch statistics, a shared loss term), or set physical_batch_size=1"
        )

    def _look(self, key: Key, g: Tensor) -> None:
        assert self.probing is not None
        possible = self.probing.get(key)
        if possible is None:
            possible = candidates(g.shape, self.n)
        if bool((g != 0).any()):
            kept = []
            for layout in possible:
                mine = layout.front(g != 0, self.n).reshape(self.n, -1).any(1)
                mine[self.probed_example] = False
                if not bool(mine.any()):
                    kept.append(layout)
            if not kept:
                raise self.no_layout(key, g.shape)
            self.layouts[key] = kept[0]
            self.verified.add(key)
            possible = kept
        self.probing[key] = possible


def _tensors(args: tuple, kwargs: dict) -> Iterable[Tensor]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item
                elif isinstance(item, (tuple, list)):
                    yield from _tensors(tuple(item), {})
        elif isinstance(value, dict):
            yield from _tensors((), value)


def check_losses(losses: Any, rows: int) -> Tensor:
    """The vector of losses, or an error that says what came instead."""
    if not isinstance(losses, Tensor):
        raise SordinoError(
            f"losses returned {type(losses).__name__}, not a tensor; return one loss per example "
            "(reduction='none'), for a model's output object compute it from its logits"
        )
    if losses.dim() != 1 or losses.shape[0] != rows:
        shape = tuple(losses.shape)
        what = "a scalar" if losses.dim() == 0 else f"a tensor of shape {shape}"
        hint = "use reduction='none'" if losses.dim() == 0 else "average within each example, not over examples"
        raise PrivacyError(f"losses returned {what} for {rows} rows; it must have shape ({rows},): {hint}")
    if not losses.is_floating_point():
        raise SordinoError(f"losses returned {losses.dtype} numbers; a loss must be floating point")
    if not losses.requires_grad:
        raise SordinoError(
            "losses does not depend on any trainable parameter; was it computed under torch.no_grad() or detached?"
        )
    return losses
