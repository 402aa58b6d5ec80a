"""One backward pass that leaves no trace: `p.grad` is afterwards what it was before.

`torch.autograd.grad` would do, but for reentrant activation checkpoints: they
refuse it, or are skipped in silence where nothing but their parameters trains.
Those run as `loss.backward()`, and what they accumulate is taken away again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def graph(value: Tensor) -> Iterator[Any]:
    """Every node of the graph below `value`."""
    todo, done = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        yield node
        todo.extend(below for below, _ in node.next_functions)


def is_reentrant(value: Tensor) -> bool:
    """Whether a reentrant checkpoint (or its like, DeepSpeed's say) was used in the forward."""
    return any("CheckpointFunction" in type(node).__name__ for node in graph(value))


def in_half(value: Tensor) -> bool:
    """Whether anything below `value` was computed in float16."""
    for node in graph(value):
        for place in getattr(node, "_input_metadata", ()):
            if place.dtype == torch.float16:
                return True
    return False


@contextmanager
def grads_put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    with torch._C.DisableTorchFunction():  # else the recorder would look at every access
        before = [t.grad for t in tensors]
        for t in tensors:
            t.grad = None
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            for t, grad in zip(tensors, before, strict=True):
                t.grad = grad


def backward(
    value: Tensor, cotangent: Tensor, anchor: Tensor | None, leaves: Sequence[Tensor], reentrant: bool
) -> list[Tensor | None]:
    """Gradients of the leaves, None where none arrives."""
    tensors = list(leaves)
    if reentrant:
        known = {id(t) for t in tensors}
        found = (getattr(node, "variable", None) for node in graph(value))
        tensors += {id(t): t for t in found if t is not None and id(t) not in known}.values()
    inputs = () if reentrant else (*leaves,) if anchor is None else (anchor, *leaves)
    # torch.autograd.grad is itself a torch function, which would switch the recorder off;
    # recomputation inside a checkpoint must meet the recorder, so it may not run on another thread
    with grads_put_back(tensors), torch.autograd.set_multithreading_enabled(False):
        grads = _engine_run_backward(
            (value,), (cotangent,), False, False, inputs, allow_unreachable=True, accumulate_grad=reentrant
        )
        if reentrant:
            return [t.grad for t in leaves]
        grads = grads[len(grads) - len(leaves) :]
        with torch._C.DisableTorchFunction():
            return [g if g is not None else t.grad for g, t in zip(grads, leaves, strict=True)]
