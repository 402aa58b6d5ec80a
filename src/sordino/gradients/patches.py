"""Convolutions: factors whose right factor is the patches of an image, cut out only where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .uses import Use, Weights, exact


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
        weight = self.weight.detach() if self.weight.dtype == g.dtype else self.weight.detach().to(g.dtype)
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

    def weighted_sum(self, weights: Weights) -> Tensor:
        m = self.g.shape[0] // self.n
        x, g = exact(self.x), exact(self.g)
        rows = weights.convolutions(g.dtype)
        rows = rows if m == 1 else rows.repeat_interleave(m)
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
