"""What every trainable parameter did in one call of `losses`.

The recorder is a torch-function mode: it sees every operation at the level a
person writes it (`F.linear`, `torch.matmul`, `x + p`), whoever calls it. A
module, a tied weight, `F.linear(h, embedding.weight)` and a bare parameter are
therefore the same thing. Each tensor is one of

    parameter   a trainable parameter
    derived     computed from parameters and constants only
    batched     depends on the batch (or needs a gradient for any other reason)
    constant    everything else, a foreign leaf that requires a gradient included

An operation that joins a parameter (or a derived tensor) with batched tensors
is replaced by a `Tap`: the same forward on detached parameters; its backward
hands what the rule needs to `sink` and computes input gradients only. So no
ordinary weight gradient is computed, and a parameter that still receives one
was used where the recorder cannot see: that is found in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ..errors import PrivacyError, SordinoError, Unsupported
from . import ragged
from .later import Later
from .layout import Key, Layout, Layouts, mixed
from .operation import Operation, Tap
from .uses import Use

# differentiation inside `losses` (a penalty on gradients, say) is not an operation on parameters
TRANSPARENT = {torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.register_hook}
# questions about a tensor that are answered without looking at its numbers
METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_leaf", "is_meta",
            "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "grad_fn", "_version", "_base",
            "grad", "_backward_hooks", "_post_accumulate_grad_hooks",
        )),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.ndimension, Tensor.get_device,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.data_ptr, Tensor.__len__,
        Tensor.storage_offset, torch.is_floating_point, torch.is_complex, torch.numel,
    ]
)  # fmt: skip


UNRECORDED = METADATA | TRANSPARENT


class Marks:
    """A set of tensors by identity that keeps none of them alive."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor) -> None:
        self.refs[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: Tensor) -> bool:
        ref = self.refs.get(id(tensor))
        return ref is not None and ref() is tensor


@dataclass
class Derived:
    """A tensor computed from parameters, and how, where that saves work. Kept alive until the next batch."""

    tensor: Tensor
    names: frozenset[str]  # of the parameters below it
    embedding: tuple[Tensor, Tensor, int | None] | None = None  # (parameter, constant index, padding index)
    expanded: Tensor | None = None  # the one-row tensor it was expanded from


class Recorder(TorchFunctionMode):
    """See the module's docstring. One recorder serves one run; `begin` starts one pass over a physical batch."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, p in parameters.items():
            if p.is_complex():
                raise Unsupported(
                    f"parameter {name!r} is complex ({p.dtype}); store its real and imaginary parts, and join them in "
                    "the forward with torch.view_as_complex"
                )
        self.parameters = parameters
        self.names = {id(p): name for name, p in parameters.items()}
        self.labels: dict[tuple[Any, ...], tuple[str, str]] = {}  # what uses of parameters are called
        from .rules import run

        self.run = run
        self.layouts = Layouts()
        self.choices: dict[Key, Any] = {}  # how the generic rule takes an operation apart (rules/fallback.py)
        self.device = next(iter(parameters.values())).device
        self.anchor = torch.zeros((), requires_grad=True)
        self.begin(1, nowhere)

    def begin(self, n: int, sink: Callable[[Any, Use], None]) -> None:
        """Start a pass over n examples; every finished use goes to `sink`."""
        if sink is not nowhere:
            self.layouts.poisoned = False
        self.n = n
        self.sink = sink
        self.batched = Marks()
        self.derived: dict[int, Derived] = {}
        self.foreign = Marks()  # require a gradient, but only on behalf of leaves that are not trained here
        self.seen: dict[tuple[str, str], int] = {}
        self.expected: dict[int, int] = {}  # uses recorded by the forward, by parameter
        self.has_derived: set[str] = set()
        self.half = False  # whether anything was computed in float16
        self.collecting = False  # whether this is the backward of the losses themselves
        self.arrived: set[str] = set()  # parameters (as keys name them) that some gradient reached, zero or not
        self.later = Later()
        self.ragged = False
        self.reads = 0  # how many integers of the batch were read out
        self.versions: list[tuple[weakref.ref, int]] = []

    def end(self) -> None:
        """Let go of everything that belongs to the batch."""
        self.begin(1, nowhere)

    # -- what a tensor is ---------------------------------------------------------------

    def mark_data(self, data: Any, rows: int) -> None:
        """The tensors of the batch itself."""
        for tensor in data_tensors(data):
            self.batched.add(tensor)
            self.ragged = self.ragged or (tensor.dim() > 0 and rows not in tensor.shape)
            self.versions.append((weakref.ref(tensor), tensor._version))
        self.ragged = self.ragged or holds_numbers(data)

    def forget_layouts(self) -> None:
        """Find out again where examples lie, as for a model never seen."""
        self.layouts.forget()
        self.choices.clear()

    def check_data(self) -> None:
        for ref, version in self.versions:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                raise SordinoError(
                    f"losses writes into its own data (a tensor of shape {tuple(tensor.shape)}); it may be called "
                    "several times for one batch, so work on a copy: x = x.clone()"
                )

    def name_of(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        return name if name is not None else "+".join(sorted(self.derived[id(tensor)].names))

    def origin(self, tensor: Tensor) -> Derived | None:
        return self.derived.get(id(tensor))

    def is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self.names or id(tensor) in self.derived

    def is_batched(self, tensor: Tensor) -> bool:
        if id(tensor) in self.names or id(tensor) in self.derived:
            return False
        if tensor.requires_grad and not tensor.is_leaf:
            return tensor not in self.foreign
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
            if getattr(node, "_forward_cls", None) is Tap:
                raise Unsupported(
                    f"a tensor computed from parameter(s) {self.name_of(tensor)!r} was written to in place with values "
                    "of the batch; build a new tensor instead, or set physical_batch_size=1"
                )
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.names:
                found[id(variable)] = variable
            todo.extend(next_node for next_node, _ in node.next_functions)
        return sorted(found.values(), key=lambda p: self.names[id(p)])

    def next_key(self, operation: str, tensors: tuple[Tensor | None, ...]) -> Key:
        """The name of a use of those tensors that are parameters."""
        ids = (operation, *map(id, tensors))
        use = self.labels.get(ids)
        if use is None:
            trained = [t for t in tensors if t is not None and self.is_parameter(t)]
            use = (operation, ",".join([self.name_of(t) for t in trained]))
            if all(t is None or id(t) in self.names for t in tensors):  # these live as long as this object
                self.labels[ids] = use
        count = self.seen.get(use, 0)
        self.seen[use] = count + 1
        key = (*use, count)
        if self.ragged:
            self.layouts.loose.add(key)
        return key

    def layout(self, key: Key, g: Tensor) -> Layout | None:
        """Where the examples lie in g; None when there is nothing to record (a zero gradient, a probe, or a
        derivative that losses takes for itself)."""
        if not self.collecting:
            return None
        self.arrived.add(key[1])
        return self.layouts.find(key, g, self.n)

    def reached(self) -> set[str]:
        return {name for names in self.arrived for part in names.split(",") for name in part.split("+")}

    def no_layout(self, key: Key, shape: Iterable[int]) -> PrivacyError:
        return mixed(key, shape, self.n)

    # -- operations ---------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in UNRECORDED:
            if func in TRANSPARENT:
                self._refuse_weights(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        names, derived, marks, foreign = self.names, self.derived, self.batched.refs, self.foreign.refs
        parameters = batched = False
        for leaf in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(leaf, Tensor):
                key = id(leaf)
                if key in names or key in derived:
                    parameters = True
                elif leaf.requires_grad and not leaf.is_leaf:
                    if key not in foreign or leaf not in self.foreign:
                        batched = True
                elif key in marks and leaf in self.batched:
                    batched = True
            elif isinstance(leaf, (tuple, list, dict)):
                for inner in _tensors(leaf):
                    if self.is_batched(inner):
                        batched = True
                    elif id(inner) in names or id(inner) in derived:
                        parameters = True
        if parameters and torch.is_grad_enabled():
            return self.run(self, func, args, kwargs or {}, batched)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if batched:
            if func in ragged.WATCHED or not isinstance(out, Tensor) or not out.requires_grad:
                self._follow(func, args, kwargs, out)
        elif not parameters:
            for leaf in _tensors(out):
                if leaf.requires_grad:
                    self.foreign.add(leaf)
        return out

    def _refuse_weights(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Inside losses, weights have no gradient to ask for."""
        wanted = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        if func is torch.autograd.grad and not self.collecting:
            for tensor in _tensors(wanted):
                if self.is_parameter(tensor):
                    raise Unsupported(
                        f"losses asks torch.autograd.grad for the gradient of parameter {self.name_of(tensor)!r}; only "
                        "physical_batch_size=1 can do that"
                    )

    def _follow(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """What came out of an operation on batched tensors is batched."""
        if isinstance(out, Tensor):
            if not out.requires_grad and id(out) not in self.names:
                self.batched.add(out)
        elif out is None:  # x[...] = y
            if args and isinstance(args[0], Tensor) and id(args[0]) not in self.names:
                self._mark_written(args[0])
        elif isinstance(out, (tuple, list, dict)):
            for leaf in _tensors(out):
                if not leaf.requires_grad:
                    self.batched.add(leaf)
        if func in ragged.WATCHED and not self.ragged:
            self.ragged = ragged.chooses_rows(self, func, args, kwargs or {})

    def _mark_written(self, tensor: Tensor) -> None:
        for t in (tensor, tensor._base):
            if t is not None and not t.requires_grad:
                self.batched.add(t)

    def mark_derived(self, out: Any, sources: Iterable[Any], **origin: Any) -> None:
        """`out` was computed from the parameters and derived tensors among `sources`."""
        leaves = [out] if isinstance(out, Tensor) else list(_tensors(out))
        leaves = [t for t in leaves if t.requires_grad and id(t) not in self.names]
        if not leaves:
            return
        below: set[str] = set()
        for source in _tensors(sources):
            if id(source) in self.names:
                below.add(self.names[id(source)])
            elif id(source) in self.derived:
                below |= self.derived[id(source)].names
        self.has_derived |= below
        for leaf in leaves:
            self.derived[id(leaf)] = Derived(leaf, frozenset(below), **origin)

    def unmark_derived(self, tensor: Tensor) -> None:
        """It was written to with values of the batch."""
        for t in (tensor, tensor._base):
            if t is not None:
                self.derived.pop(id(t), None)


def nowhere(tensor: Any, use: Use) -> None:
    """Where uses go when nobody measures."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, (Tensor, tuple, list, dict)):
                yield from _tensors(item)


def _only_tensors(data: Any) -> bool:
    return type(data) in (tuple, list) and all(isinstance(item, Tensor) for item in data)


def data_tensors(data: Any) -> Iterator[Tensor]:
    """The tensors of a batch: nested tuples, lists, mappings, and objects that hold tensors."""
    if _only_tensors(data):
        yield from data
        return
    if hasattr(data, "keys") and not isinstance(data, dict):
        data = {key: data[key] for key in data.keys()}
    for leaf in tree_flatten(data)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "keys") and hasattr(leaf, "__getitem__"):
            yield from data_tensors(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from (t for t in vars(leaf).values() if isinstance(t, Tensor))


def holds_numbers(data: Any) -> bool:
    """Whether the batch holds numbers outside tensors (lengths as a list, an array): rows may be cut by them unseen."""
    if _only_tensors(data):
        return False
    if hasattr(data, "keys") and not isinstance(data, dict):
        data = {key: data[key] for key in data.keys()}
    for leaf in tree_flatten(data)[0]:
        if isinstance(leaf, (Tensor, str, bytes, type(None))):
            continue
        if isinstance(leaf, (bool, int, float, np.ndarray, np.generic)):
            return True
        if hasattr(leaf, "keys") and hasattr(leaf, "__getitem__"):
            if holds_numbers(leaf):
                return True
        elif (
            hasattr(leaf, "__dict__")
            and not isinstance(leaf, type)
            and any(isinstance(v, (bool, int, float, list, tuple, np.ndarray)) for v in vars(leaf).values())
        ):
            return True
    return False


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


__all__ = ["Operation", "Recorder", "Tap", "check_losses", "data_tensors"]
