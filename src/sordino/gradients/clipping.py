"""How per-example norms become weights: flat, layer-wise and automatic clipping.

All three bound the norm of Σ_l w_l g_l by ζ for every example:

    flat         w   = min(1, ζ/‖g‖)
    layer-wise   w_l = min(1, ζ_l/‖g_l‖),  Σ_l ζ_l² = ζ²
    automatic    w   = ζ/(‖g‖ + γ)                         (Bu et al. 2023)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import SordinoError
from ..registry import Entry, Registry


@dataclass(frozen=True)
class Clipping:
    """`bound` is ζ; there is no second place where it is kept."""

    bound: float
    style: str = "flat"
    gamma: float = 0.01
    layers: dict[str, float] | None = field(default=None)  # ζ_l by module name, for layer-wise

    def __post_init__(self) -> None:
        bound = self.bound
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not math.isfinite(bound) or bound <= 0:
            raise SordinoError(f"clip_norm={bound!r} must be a positive, finite number")
        CLIPPINGS.find(self.style)
        if not (isinstance(self.gamma, (int, float)) and self.gamma > 0):
            raise SordinoError(f"gamma={self.gamma!r} of automatic clipping must be positive")
        if self.layers is not None:
            total = math.sqrt(sum(b * b for b in self.layers.values()))
            if abs(total - bound) > 1e-6 * bound:
                raise SordinoError(
                    f"the layers' clip norms have root sum of squares {total:.6g}, but clip_norm is {bound:g}; "
                    "scale them so that Σ ζ_l² = ζ²"
                )

    def weights(self, norms: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Weights by parameter, the whole norm, and where clipping was active, from ‖g_i‖² by parameter."""
        stacked = torch.stack(list(norms.values()))
        total = stacked.sum(0).sqrt()
        if self.style == "layer-wise":
            groups: dict[str, list[str]] = {}
            for name in norms:
                groups.setdefault(name.rpartition(".")[0], []).append(name)
            weights, active = {}, torch.zeros_like(total, dtype=torch.bool)
            for layer, names in groups.items():
                norm = torch.stack([norms[name] for name in names]).sum(0).sqrt()
                limit = self._layer_bound(layer, len(groups))
                w = limited(limit, norm)
                weights.update(dict.fromkeys(names, w))
                active |= norm > limit
            return weights, total, active
        w = self.bound / (total + self.gamma) if self.style == "automatic" else limited(self.bound, total)
        return dict.fromkeys(norms, w), total, total > self.bound

    def _layer_bound(self, layer: str, count: int) -> float:
        if self.layers is None:
            return self.bound / math.sqrt(count)
        if layer not in self.layers:
            raise SordinoError(f"no clip norm was given for layer {layer!r}; given: {', '.join(self.layers)}")
        return self.layers[layer]


def limited(bound: float, norm: Tensor) -> Tensor:
    """min(1, ζ/‖g‖), 1 where the norm is zero."""
    return (bound / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)


CLIPPINGS: Registry[str] = Registry("clipping")
for _name, _text, _paper in (
    ("flat", "one norm over all parameters", "Abadi et al. 2016"),
    ("layer-wise", "a bound for each layer, Σ ζ_l² = ζ²", "McMahan et al. 2018"),
    ("automatic", "normalise instead of clip: ζ·g/(‖g‖ + γ)", "Bu et al. 2023"),
):
    CLIPPINGS.add(Entry(_name, lambda: "", _text, _paper))
