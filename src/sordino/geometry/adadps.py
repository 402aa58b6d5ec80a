"""AdaDPS: clip g/(√v + ε), v the public second moment of each coordinate, and keep the scaled update."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SordinoError
from ..gradients.precision import full_precision
from ..gradients.uses import Factors, PerExample, Use, exact
from .base import Geometry
from .norms import materialised, squares

if TYPE_CHECKING:
    from ..public import Public


class AdaDPS(Geometry):
    """An element-wise scale 1/(√v + ε), learnt once from public gradients.

    `epsilon` is relative to the root of the largest second moment, so that it means the same on every model.
    """

    name = "adadps"
    needs_public = True

    def __init__(self, epsilon: float = 1e-3, examples: int | None = None) -> None:
        number = isinstance(epsilon, Real) and not isinstance(epsilon, bool)
        if not number or not 0 < epsilon < math.inf:
            raise SordinoError(f"AdaDPS(epsilon={epsilon!r}) must be a positive, finite number; 1e-3 is the default")
        if examples is not None and (isinstance(examples, bool) or not isinstance(examples, int) or examples < 1):
            raise SordinoError(f"AdaDPS(examples={examples!r}) must be at least 1, or None for all public examples")
        self.epsilon, self.examples = float(epsilon), examples
        self.scale: dict[str, Tensor] = {}

    def prepare(self, model: torch.nn.Module, parameters: dict[str, Tensor], public: Public | None, keys: Any) -> None:
        if public is None:
            raise SordinoError("geometry='adadps' needs public data; pass public=sordino.Public(dataset, losses=...)")
        moments = public.second_moments(model, parameters, keys, self.examples)
        for name, v in moments.items():
            if not bool(torch.isfinite(v).all()):
                raise SordinoError(
                    f"the public gradients of parameter {name!r} are not finite; look for NaN or infinity in the "
                    "public examples"
                )
        top = max(float(v.max()) for v in moments.values()) ** 0.5
        if not top > 0:
            raise SordinoError(
                f"the public gradients' largest second moment is {top**2}; AdaDPS needs gradients that move"
            )
        raw = {name: 1 / (v.sqrt() + self.epsilon * top) for name, v in moments.items()}
        # one common factor changes nothing but the units of the clip norm: make the typical scale 1
        mean = sum(float(s.double().pow(-2).sum()) for s in raw.values()) / sum(s.numel() for s in raw.values())
        self.scale = {name: s * mean**0.5 for name, s in raw.items()}

    def square_norms(self, name: str, uses: list[Use]) -> tuple[Tensor, list[Use]]:
        scale = self.scale[name]
        if len(uses) == 1 and isinstance(uses[0], PerExample):
            return squares(uses[0].grad * scale), uses
        if len(uses) == 1 and isinstance(uses[0], Factors) and uses[0].length == 1:
            left, right = (exact(t[:, 0]).square() for t in (uses[0].left, uses[0].right))
            with full_precision(left.device):
                return ((left @ scale.square()) * right).sum(1), uses
        return materialised(uses, lambda grad: squares(grad * scale), max(use.numbers() for use in uses))

    def into(self, name: str, total: Tensor) -> Tensor:
        return total * self.scale[name]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.scale)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale = dict(state)

    def describe(self) -> str:
        some = "" if self.examples is None else f", first {self.examples} public examples"
        return f"adadps (ε = {self.epsilon:g} of the largest root second moment{some})"
