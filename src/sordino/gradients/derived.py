"""Uses of tensors that were themselves computed from parameters (`weight.T`, `g·v/‖v‖`, a position table)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout
from .uses import PerExample, Use, Weights, add, exact


@dataclass
class Derived(Use):
    """A use of a tensor that was itself computed from parameters (`weight.T`, `g·v/‖v‖`, a position table).

    Sums are linear, so they are pulled back once; norms need every example's gradient pulled back.
    """

    uses: Sequence[Use]  # uses of the derived tensor
    derived: Tensor
    parameter: Tensor

    def __post_init__(self) -> None:
        self.n = self.uses[0].n

    def _pull(self, cotangent: Tensor, batched: bool) -> Tensor:
        (grad,) = torch.autograd.grad(
            self.derived,
            [self.parameter],
            cotangent.to(self.derived.dtype),
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
        )
        if grad is None:
            shape = (cotangent.shape[0], *self.parameter.shape) if batched else self.parameter.shape
            grad = cotangent.new_zeros(shape)
        return exact(grad.to_dense() if grad.is_sparse else grad)

    def per_example(self, lo: int, hi: int) -> Tensor:
        total = add(use.per_example(lo, hi) for use in self.uses)
        total = total.reshape(hi - lo, *self.derived.shape)
        if hi - lo > 1:
            try:
                return self._pull(total, batched=True)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError):
                pass  # an operation without a batching rule
        return torch.stack([self._pull(each, batched=False) for each in total])

    def weighted_sum(self, weights: Weights) -> Tensor:
        if torch.finfo(self.derived.dtype).bits < 32:  # a sum rounded to half precision would not be bounded
            step = max(1, 2**24 // self.numbers())
            parts = (PerExample(self.per_example(lo, min(self.n, lo + step))) for lo in range(0, self.n, step))
            return add(part.weighted_sum(w) for part, w in zip(parts, weights.split(step), strict=True))
        total = add(use.weighted_sum(weights) for use in self.uses)
        return self._pull(total.reshape(self.derived.shape), batched=False)

    def select(self, keep: Tensor) -> Derived:
        return Derived([use.select(keep) for use in self.uses], self.derived, self.parameter)

    def stored(self) -> int:
        return sum(use.stored() for use in self.uses)

    def numbers(self) -> int:
        return 2 * self.parameter.numel() + 2 * self.derived.numel() + sum(use.numbers() for use in self.uses)

    def each(self) -> int:
        return self.parameter.numel()

    @property
    def device(self) -> torch.device:
        return self.parameter.device


@dataclass
class OwnRows(Use):
    """A use of a derived tensor that has rows for every example: grad_i is zero but in the rows of example i."""

    grad: Tensor  # (n, m, *rest)
    layout: Layout  # where the rows lie in the derived tensor

    def __post_init__(self) -> None:
        self.grad = exact(self.grad)
        self.n = self.total = self.grad.shape[0]
        self.rows = torch.arange(self.n, device=self.grad.device)

    def per_example(self, lo: int, hi: int) -> Tensor:
        out = self.grad.new_zeros(hi - lo, self.total, *self.grad.shape[1:])
        out[torch.arange(hi - lo, device=out.device), self.rows[lo:hi]] = self.grad[lo:hi]
        return self.layout.back_many(out)

    def weighted_sum(self, weights: Weights) -> Tensor:
        out = self.grad.new_zeros(self.total, *self.grad.shape[1:])
        out[self.rows] = self.grad * weights.plain(self.grad.dtype).reshape(-1, *[1] * (self.grad.dim() - 1))
        return self.layout.back(out)

    def select(self, keep: Tensor) -> OwnRows:
        out = OwnRows(self.grad[keep], self.layout)
        out.rows, out.total = self.rows[keep], self.total
        return out

    def stored(self) -> int:
        return self.grad.numel()

    def each(self) -> int:
        return self.total * self.grad.numel() // max(1, self.n)

    @property
    def device(self) -> torch.device:
        return self.grad.device
