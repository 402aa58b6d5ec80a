"""What one backward pass leaves of one use of a parameter.

`Factors` and `PerExample` are the two types every layer rule ends in; `Rows`,
`Patches` and `Derived` are factors in a cheaper spelling (a one-hot left
factor, patches not yet cut out of an image, a tensor computed from parameters).
Each can be materialised for a slice of the examples and summed with weights;
what a norm costs, and which form is cheaper, is the geometry's business.

Everything here is float32 (float64 for float64 models), whatever the model computes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .precision import full_precision, shortened, tf32_convolutions, tf32_products


def exact(tensor: Tensor) -> Tensor:
    """float64 (and complex) stays, everything else becomes float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Use(ABC):
    """One use of one parameter by n examples; grad_i has the parameter's shape."""

    n: int

    @abstractmethod
    def per_example(self, lo: int, hi: int) -> Tensor:
        """grad_i for lo ≤ i < hi: (hi − lo, *shape)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · grad_i. Rows of weight 0 must hold finite numbers: see `select`."""

    @abstractmethod
    def select(self, keep: Tensor) -> Use:
        """The same use for the examples where `keep` is true (0 · NaN is NaN, so bad rows are taken out)."""

    @abstractmethod
    def stored(self) -> int:
        """Numbers held in memory."""

    @abstractmethod
    def each(self) -> int:
        """Numbers in the gradient of one example."""

    def numbers(self) -> int:
        """Numbers in memory while the gradient of one example is materialised."""
        return self.each()

    @property
    @abstractmethod
    def device(self) -> torch.device: ...


@dataclass
class PerExample(Use):
    """The gradients themselves, (n, *shape)."""

    grad: Tensor

    def __post_init__(self) -> None:
        self.grad = exact(self.grad)
        self.n = self.grad.shape[0]

    def per_example(self, lo: int, hi: int) -> Tensor:
        return self.grad[lo:hi]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.grad.reshape(self.n, -1)
        with full_precision(flat.device):  # the norms were those of these very numbers
            return (weights.to(flat.dtype) @ flat).reshape(self.grad.shape[1:])

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
        return torch.bmm(exact(self.left[lo:hi]).transpose(1, 2), exact(self.right[lo:hi]))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = exact(self.left), exact(self.right)
        scale = shortened(weights, tf32_products()).to(left.dtype)[:, None, None]
        # the smaller factor carries the weights
        left, right = (left * scale, right) if left.shape[2] <= right.shape[2] else (left, right * scale)
        return left.reshape(-1, left.shape[2]).T @ right.reshape(-1, right.shape[2])

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

    def weighted_sum(self, weights: Tensor) -> Tensor:
        right = exact(self.right)
        weights = weights.to(right.dtype)[:, None] * (self.index >= 0)
        out = right.new_zeros(self.size, right.shape[2])
        scaled = (right * weights[:, :, None]).reshape(-1, right.shape[2])
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

    def weighted_sum(self, weights: Tensor) -> Tensor:
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


def add(tensors: Iterable[Tensor]) -> Tensor:
    total: Any = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    return total


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

    def weighted_sum(self, weights: Tensor) -> Tensor:
        out = self.grad.new_zeros(self.total, *self.grad.shape[1:])
        out[self.rows] = self.grad * weights.to(self.grad.dtype).reshape(-1, *[1] * (self.grad.dim() - 1))
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


@dataclass(frozen=True)
class ConvSpec:
    """The geometry of a convolution, as `aten.convolution` takes it."""

    weight: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def backward(self, g: Tensor, x: Tensor, mask: list[bool]) -> tuple[Any, ...]:
        weight = self.weight.detach().to(g.dtype)
        return torch.ops.aten.convolution_backward(
            g, x, weight, None, self.stride, self.padding, self.dilation,
            self.transposed, self.output_padding, self.groups, mask,
        )  # fmt: skip


ENOUGH = 2**22  # multiplications in one example's weight gradient


@dataclass
class Patches(Use):
    """A convolution: Factors whose right factor is the patches of x, not yet cut out.

    x and g are (n·m, channels, *space); example i owns m consecutive rows.
    """

    x: Tensor
    g: Tensor
    spec: ConvSpec
    n: int

    @property
    def positions(self) -> int:
        m = self.g.shape[0] // self.n
        image = self.x if self.spec.transposed else self.g
        return m * image.shape[2:].numel()

    def factors(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """left (e·G, L, out/G) and right (e·G, L, in/G·kernel) for the examples lo..hi, e = hi − lo, G groups.

        A transposed convolution is the convolution that maps its output to its input,
        so its weight gradient is that one's with x and g changed over.
        """
        m, groups = self.g.shape[0] // self.n, self.spec.groups
        rows = slice(lo * m, hi * m)
        image, grad = exact(self.x[rows]), exact(self.g[rows])
        if self.spec.transposed:
            image, grad = grad, image
        e, kernel = hi - lo, self.spec.weight.shape[2:]
        patches = cut(image, kernel, self.spec, grad.shape[2:])  # (e·m, C, K, L)
        right = patches.reshape(e, m, groups, image.shape[1] // groups * kernel.numel(), -1)
        left = grad.reshape(e, m, groups, grad.shape[1] // groups, -1)
        return (
            left.permute(0, 2, 1, 4, 3).reshape(e * groups, -1, left.shape[3]),
            right.permute(0, 2, 1, 4, 3).reshape(e * groups, -1, right.shape[3]),
        )

    def per_example(self, lo: int, hi: int) -> Tensor:
        if self._one_by_one():
            m = self.g.shape[0] // self.n
            x, g = exact(self.x), exact(self.g)
            out = g.new_empty(hi - lo, *self.spec.weight.shape)
            for i in range(lo, hi):
                rows = slice(i * m, (i + 1) * m)
                out[i - lo] = self.spec.backward(g[rows], x[rows], [False, True, False])[1]
            return out
        if self.g.shape[0] == self.n and not self.spec.transposed and self.spec.groups == 1:
            image, grad = exact(self.x[lo:hi]), exact(self.g[lo:hi])
            kernel = self.spec.weight.shape[2:]
            patches = cut(image, kernel, self.spec, grad.shape[2:]).flatten(1, 2)
            return torch.bmm(grad.flatten(2), patches.transpose(1, 2)).reshape(hi - lo, *self.spec.weight.shape)
        left, right = self.factors(lo, hi)
        return torch.bmm(left.transpose(1, 2), right).reshape(hi - lo, *self.spec.weight.shape)

    def _one_by_one(self) -> bool:
        """On a CPU, the library's weight gradient of one example beats cutting patches where there is enough to do."""
        work = self.positions * self.spec.weight.numel() // self.spec.groups
        return self.g.device.type == "cpu" and work >= ENOUGH

    def weighted_sum(self, weights: Tensor) -> Tensor:
        m = self.g.shape[0] // self.n
        x, g = exact(self.x), exact(self.g)
        rows = shortened(weights, tf32_convolutions()).to(g.dtype).repeat_interleave(m)
        scale = rows.reshape(-1, *[1] * (g.dim() - 1))
        if x.numel() < g.numel():
            x = x * scale
        else:
            g = g * scale
        return self.spec.backward(g, x, [False, True, False])[1]

    def select(self, keep: Tensor) -> Patches:
        m = self.g.shape[0] // self.n
        rows = keep.repeat_interleave(m)
        return Patches(self.x[rows], self.g[rows], self.spec, int(keep.sum()))

    def stored(self) -> int:
        return self.x.numel() + self.g.numel()

    def numbers(self) -> int:
        return self.spec.weight.numel() * (1 + self.positions // max(1, self.spec.weight.shape[0]))

    def each(self) -> int:
        return self.spec.weight.numel()

    @property
    def device(self) -> torch.device:
        return self.g.device


def cut(image: Tensor, kernel: torch.Size, spec: ConvSpec, space: torch.Size) -> Tensor:
    """The patches under a convolution: (rows, C, *space) -> (rows, C, kernel positions, output positions)."""
    pads = [p for p in reversed(spec.padding) for _ in (0, 1)]
    # an output padded by output_padding can reach past the end: those positions see zeros
    for d, (k, s, dil) in enumerate(zip(kernel, spec.stride, spec.dilation, strict=True)):
        reach = (space[d] - 1) * s + (k - 1) * dil + 1
        have = image.shape[2 + d] + 2 * spec.padding[d]
        pads[2 * (len(kernel) - 1 - d) + 1] += max(0, reach - have)
    image = torch.nn.functional.pad(image, pads)
    strides = image.stride()
    view = image.as_strided(
        (*image.shape[:2], *kernel, *space),
        (
            *strides[:2],
            *(st * dil for st, dil in zip(strides[2:], spec.dilation, strict=True)),
            *(st * s for st, s in zip(strides[2:], spec.stride, strict=True)),
        ),
    )
    return view.reshape(*image.shape[:2], kernel.numel(), space.numel())
