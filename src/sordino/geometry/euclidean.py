"""The ordinary norm. Owns the choice between Gram matrices and materialised gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gradients.patches import Patches
from ..gradients.uses import Factors, PerExample, Rows, Use
from .base import Geometry
from .norms import (
    chunk,
    exact,
    factor_norms,
    gram,
    gram_is_cheaper,
    many_factor_norms,
    materialised,
    patch_norms,
    row_norms,
    several_norms,
    squares,
)


class Euclidean(Geometry):
    name = "euclidean"

    def waits(self, use: Use) -> bool:
        if not isinstance(use, Factors):
            return False
        return use.length == 1 or gram_is_cheaper(use.length, use.left.shape[2], use.right.shape[2])

    def together(self, uses: list[Use]) -> list[Tensor]:
        return many_factor_norms(uses)  # type: ignore[arg-type]

    def square_norms(self, name: str, uses: list[Use]) -> tuple[Tensor, list[Use]]:
        if len(uses) == 1:
            return self._one(uses[0])
        if all(isinstance(u, Factors) for u in uses):
            joined = Factors(
                torch.cat([exact(u.left) for u in uses], 1),  # type: ignore[attr-defined]
                torch.cat([exact(u.right) for u in uses], 1),  # type: ignore[attr-defined]
            )
            return self._one(joined)
        if all(isinstance(u, (Factors, Rows)) for u in uses) and uses[0].right.shape[2] == uses[-1].right.shape[2]:  # type: ignore[attr-defined]
            return several_norms(uses), uses
        return self._materialise(uses, max(use.numbers() for use in uses))

    def _one(self, use: Use) -> tuple[Tensor, list[Use]]:
        if isinstance(use, PerExample):
            return squares(use.grad), [use]
        if isinstance(use, Rows):
            return row_norms(use), [use]
        if isinstance(use, Factors):
            p, q = use.left.shape[2], use.right.shape[2]
            if use.length == 1 or gram_is_cheaper(use.length, p, q):
                return factor_norms(use), [use]
            return self._materialise([use], p * q)
        if isinstance(use, Patches):
            return self._patches(use)
        return self._materialise([use], use.numbers())

    def _patches(self, use: Patches) -> tuple[Tensor, list[Use]]:
        weight, groups = use.spec.weight, use.spec.groups
        size, length = weight.numel(), use.positions
        p = weight.shape[0] // groups
        q = size // weight.shape[0]
        unfolded = length * q * groups
        if not gram_is_cheaper(length, p, q):
            found = patch_norms(use)
            if found is not None:
                return found[0], [use] if found[1] is None else [PerExample(found[1])]
            return self._materialise([use], size + unfolded)
        step = chunk(use, unfolded + 2 * groups * length**2, use.g.device)
        parts = []
        for lo in range(0, use.n, step):
            hi = min(use.n, lo + step)
            parts.append(gram(*use.factors(lo, hi)).reshape(hi - lo, groups).sum(1))
        return torch.cat(parts), [use]

    def _materialise(self, uses: list[Use], numbers: int) -> tuple[Tensor, list[Use]]:
        return materialised(uses, squares, numbers)
