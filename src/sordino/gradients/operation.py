"""One recorded operation: the same forward on detached parameters, a backward that records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import Unsupported

if TYPE_CHECKING:
    from .recorder import Recorder


class Tap(torch.autograd.Function):
    """`anchor` is a dummy leaf, so that the node runs in every backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, operation: Operation, *inputs: Tensor) -> Any:
        out, saved = operation.forward(*inputs)
        ctx.operation = operation
        ctx.save_for_backward(*saved)
        if isinstance(out, Tensor):
            if not out._is_view():
                return out
            return _unsafe_view(out, out.shape) if operation.fresh and out.is_contiguous() else _owned(out, inputs)
        return tuple(_owned(o, inputs) if o._is_view() else o for o in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unsupported(
                f"losses differentiates a derivative (create_graph=True, a gradient penalty say) through "
                f"{ctx.operation.name} with parameter(s) {ctx.operation.key[1]!r}; only physical_batch_size=1 can"
            )
        saved = ctx.saved_tensors  # outside the guard: an activation checkpoint recomputes here
        with torch._C.DisableTorchFunction():
            return None, None, *ctx.operation.backward(saved, grads, ctx.needs_input_grad[2:])


def _owned(out: Tensor, inputs: Iterable[Tensor]) -> Tensor:
    """`out`, which a kernel returned as a view of its result, as a tensor that may be written to."""
    if any(out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in inputs):
        return out.clone()
    return _unsafe_view(out, out.shape) if out.is_contiguous() else out.clone()


_unsafe_view = torch.ops.aten._unsafe_view.default


class Operation:
    """A rule for one operation.

    `inputs` of forward are the batched tensors; parameters are attributes. Both
    directions run without gradients, so parameters need no detaching there; under
    autocast they do (`plain`), for it keeps the casts it makes of parameters, without
    their graph, for whoever uses the parameter next.
    """

    name: str
    fresh = False  # whether the result never lies in the memory of an input

    def __init__(self, recorder: Recorder, tensors: Iterable[Tensor | None]) -> None:
        """`tensors` may be parameters."""
        self.recorder = recorder
        self.key = recorder.next_key(self.name, tuple(tensors))

    def forward(self, *inputs: Any, **never: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The result, and what the backward needs saved."""
        raise NotImplementedError

    def backward(
        self, saved: tuple[Any, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError

    def apply(self, *inputs: Tensor) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unsupported(
                f"{self.name} uses parameter(s) {self.key[1]!r} inside torch.func.vmap or torch.func.grad, where a "
                "private step cannot follow it; write the batch dimension out, or set physical_batch_size=1"
            )
        for x in inputs:
            if x.is_nested:
                raise Unsupported(
                    f"{self.name} with parameter(s) {self.key[1]!r} is given a nested tensor, whose rows cannot be "
                    "told apart by example; pass a padded tensor and mask the loss instead"
                )
        with torch._C.DisableTorchFunction():
            # what `Function.apply` adds to its base is for functorch, which was just ruled out
            out = super(torch.autograd.Function, Tap).apply(self.recorder.anchor, self, *inputs)
        if isinstance(out, Tensor) and out.dtype == torch.float16:
            self.recorder.half = True
        return out

    def trains(self, tensor: Any) -> bool:
        """Whether `tensor` is a parameter (or derived from one), noting that a use of it will follow."""
        key, recorder = id(tensor), self.recorder
        if key not in recorder.names and key not in recorder.derived:
            return False
        recorder.expected[key] = recorder.expected.get(key, 0) + 1
        return True


def plain(*parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """The parameters as a forward may use them: see `Operation`."""
    if torch._C._is_any_autocast_enabled():
        return tuple([None if p is None else p.detach() for p in parameters])
    return parameters
