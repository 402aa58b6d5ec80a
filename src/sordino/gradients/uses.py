"""What one backward pass leaves of one use of a parameter.

`Factors` and `PerExample` are the two types every layer rule ends in; `Rows`,
`Patches` (patches.py) and `Derived` (derived.py) are factors in a cheaper
spelling (a one-hot left factor, patches not yet cut out of an image, a tensor
computed from parameters).
Each can be materialised for a slice of the examples and summed with weights;
what a norm costs, and which form is cheaper, is the geometry's business.

Everything here is float32 (float64 for float64 models), whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .precision import full_precision, shortened, tf32_convolutions, tf32_products


def exact(tensor: Tensor) -> Tensor:
    """float64 (and complex) stays, everything else becomes float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Weights:
    """The examples' weights, (n,), in the forms that sums take: each is made once for all parameters."""

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact
        self._products: dict[torch.dtype, Tensor] = {}
        self._convolutions: dict[torch.dtype, Tensor] = {}

    def plain(self, dtype: torch.dtype) -> Tensor:
        return self.exact.to(dtype)

    def products(self, dtype: torch.dtype) -> Tensor:
        """(n, 1, 1), for a matrix product that may round its factors."""
        found = self._products.get(dtype)
        if found is None:
            found = self._products[dtype] = shortened(self.exact, tf32_products()).to(dtype)[:, None, None]
        return found

    def convolutions(self, dtype: torch.dtype) -> Tensor:
        found = self._convolutions.get(dtype)
        if found is None:
            found = self._convolutions[dtype] = shortened(self.exact, tf32_convolutions()).to(dtype)
        return found

    def split(self, size: int) -> list[Weights]:
        return [Weights(part) for part in self.exact.split(size)]


class Use:
    """One use of one parameter by n examples; grad_i has the parameter's shape.

    Not an ABC: `isinstance` on those is slow, and is asked hundreds of times in a step.
    """

    n: int

    def per_example(self, lo: int, hi: int) -> Tensor:
        """grad_i for lo ≤ i < hi: (hi − lo, *shape)."""
        raise NotImplementedError

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Σ_i weights_i · grad_i. Rows of weight 0 must hold finite numbers: see `select`."""
        raise NotImplementedError

    def select(self, keep: Tensor) -> Use:
        """The same use for the examples where `keep` is true (0 · NaN is NaN, so bad rows are taken out)."""
        raise NotImplementedError

    def stored(self) -> int:
        """Numbers held in memory."""
        raise NotImplementedError

    def each(self) -> int:
        """Numbers in the gradient of one example."""
        raise NotImplementedError

    def numbers(self) -> int:
        """Numbers in memory while the gradient of one example is materialised."""
        return self.each()

    @property
    def device(self) -> torch.device:
        raise NotImplementedError


@dataclass
class PerExample(Use):
    """The gradients themselves, (n, *shape)."""

    grad: Tensor

    def __post_init__(self) -> None:
        self.grad = exact(self.grad)
        self.n = self.grad.shape[0]

    def per_example(self, lo: int, hi: int) -> Tensor:
        return self.grad[lo:hi]

    def weighted_sum(self, weights: Weights) -> Tensor:
        flat = self.grad.reshape(self.n, -1)
        with full_precision(flat.device):  # the norms were those of these very numbers
            return (weights.plain(flat.dtype) @ flat).reshape(self.grad.shape[1:])

    def select(self, keep: Tensor) -> PerExample:
        return PerExample(self.grad[keep])

    def stored(self) -> int:
        return self.grad.numel()

    def each(self) -> int:
        return self.grad.numel() // max(1, self.n)

    @property
    def device(self) -> torch.device:
        return self.grad.device


@dataclass
class Factors(Use):
    """grad_i = Σ_t left_it ⊗ right_it, with left (n, T, out) and right (n, T, in)."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        self.n, self.length = self.left.shape[:2]

    def per_example(self, lo: int, hi: int) -> Tensor:
        left, right = (self.left, self.right) if hi - lo == self.n else (self.left[lo:hi], self.right[lo:hi])
        return torch.bmm(exact(left).transpose(1, 2), exact(right))

    def weighted_sum(self, weights: Weights) -> Tensor:
        left, right = exact(self.left), exact(self.right)
        p, q, scale = left.shape[2], right.shape[2], weights.products(left.dtype)
        # the smaller factor carries the weights
        left, right = (left * scale, right) if p <= q else (left, right * scale)
        return left.reshape(-1, p).t() @ right.reshape(-1, q)

    def select(self, keep: Tensor) -> Factors:
        return Factors(self.left[keep], self.right[keep])

    def stored(self) -> int:
        return self.left.numel() + self.right.numel()

    def each(self) -> int:
        return self.left.shape[2] * self.right.shape[2]

    @property
    def device(self) -> torch.device:
        return self.left.device


@dataclass
class Rows(Use):
    """Factors whose left factor is one-hot: grad_i[index_it] += right_it, out of `size` rows (an embedding)."""

    index: Tensor  # (n, T), −1 where the row takes no part (padding)
    right: Tensor  # (n, T, in)
    size: int

    def __post_init__(self) -> None:
        self.n, self.length = self.index.shape

    def per_example(self, lo: int, hi: int) -> Tensor:
        index, right = self.index[lo:hi], exact(self.right[lo:hi])
        m = index.shape[0]
        out = right.new_zeros(m, self.size, right.shape[2])
        used = (index >= 0)[:, :, None]
        index = index.clamp(min=0)[:, :, None].expand_as(right)
        return out.scatter_add_(1, index, torch.where(used, right, 0.0))

    def weighted_sum(self, weights: Weights) -> Tensor:
        right = exact(self.right)
        scale = weights.plain(right.dtype)[:, None] * (self.index >= 0)
        out = right.new_zeros(self.size, right.shape[2])
        scaled = (right * scale[:, :, None]).reshape(-1, right.shape[2])
        return out.index_add_(0, self.index.clamp(min=0).reshape(-1), scaled)

    def select(self, keep: Tensor) -> Rows:
        return Rows(self.index[keep], self.right[keep], self.size)

    def stored(self) -> int:
        return self.right.numel()

    def each(self) -> int:
        return self.size * self.right.shape[2]

    @property
    def device(self) -> torch.device:
        return self.right.device


def add(tensors: Iterable[Tensor]) -> Tensor:
    total: Any = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    return total
