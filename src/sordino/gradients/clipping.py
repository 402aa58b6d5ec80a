"""How per-example norms become weights: flat, layer-wise and automatic clipping.

All three bound the norm of Σ_l w_l g_l by ζ for every example:

    flat         w   = min(1, ζ/‖g‖)
    layer-wise   w_l = min(1, ζ_l/‖g_l‖),  Σ_l ζ_l² = ζ²
    automatic    w   = ζ/(‖g‖ + γ)                         (Bu et al. 2023)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import SordinoError
from ..registry import Entry, Registry


class Fixed(dict):
    """A dict nobody writes to."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("the layers' clip norms cannot be changed; make another Clipping")

    __setitem__ = __delitem__ = update = pop = popitem = setdefault = clear = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:  # copies are made by the constructor, which may write
        return Fixed, (dict(self),)


@dataclass(frozen=True)
class Clipping:
    """`bound` is ζ; there is no second place where it is kept."""

    bound: float
    style: str = "flat"
    gamma: float = 0.01
    layers: Mapping[str, float] | None = field(default=None)  # ζ_l by module name, for layer-wise

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _positive("clip_norm", self.bound))
        object.__setattr__(self, "gamma", _positive("gamma", self.gamma))
        if not isinstance(self.style, str):
            kind = type(self.style).__name__
            raise SordinoError(f"clipping must be a name ({', '.join(CLIPPINGS.names())}) or a Clipping, not a {kind}")
        CLIPPINGS.find(self.style)
        if self.layers is None:
            return
        if self.style != "layer-wise" or not isinstance(self.layers, Mapping):
            raise SordinoError(
                f"clipping={self.style!r} takes no layers; Clipping({self.bound:g}, 'layer-wise', layers={{...}})"
            )
        # a copy nobody can write to: the bound has one owner
        layers = {str(name): _positive(f"the clip norm of layer {name!r}", b) for name, b in self.layers.items()}
        object.__setattr__(self, "layers", Fixed(layers))
        total = math.sqrt(sum(b * b for b in layers.values()))
        if not abs(total - self.bound) <= 1e-6 * self.bound:
            raise SordinoError(
                f"the layers' clip norms have root sum of squares {total:.6g}, but clip_norm is {self.bound:g}; "
                "scale them so that Σ ζ_l² = ζ²"
            )

    def fits(self, parameters: Collection[str]) -> None:
        """Whether the layers named are those of the trainable parameters."""
        if self.layers is None:
            return
        layers = {layer_of(name) for name in parameters}
        for name in layers - set(self.layers):
            raise SordinoError(f"no clip norm was given for layer {name!r}; given: {', '.join(self.layers)}")
        for name in set(self.layers) - layers:
            raise SordinoError(
                f"layers={{{name!r}: ...}}: no trainable parameter is in it; known: {', '.join(sorted(layers))}"
            )

    def describe(self) -> str:
        """Everything that was chosen, in words.

        >>> Clipping(1.0, "automatic").describe()
        'automatic at 1 (γ = 0.01)'
        """
        text = f"{self.style} at {self.bound:g}"
        if self.style == "automatic":
            return f"{text} (γ = {self.gamma:g})"
        if self.layers is not None:
            return f"{text} ({', '.join(f'{name}: {b:.6g}' for name, b in self.layers.items())})"
        return text

    def weights(self, norms: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Weights by parameter, the whole norm, and where clipping was active, from ‖g_i‖² by parameter."""
        stacked = torch.stack(list(norms.values()))
        total = stacked.sum(0).sqrt()
        if self.style == "layer-wise":
            groups: dict[str, list[str]] = {}
            for name in norms:
                groups.setdefault(layer_of(name), []).append(name)
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
        return self.layers[layer]


def layer_of(parameter: str) -> str:
    """The module that holds a parameter."""
    return parameter.rpartition(".")[0]


LEAST = 1e-15  # a gradient whose squared norm rounds to zero stays far below this


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        shown = " ".join(repr(value).split())
        raise SordinoError(f"{name}={shown[:60]} must be a positive, finite number")
    if value < LEAST:
        raise SordinoError(
            f"{name}={value:g} is below {LEAST:g}, where squared norms vanish in float32; scale the loss up"
        )
    return float(value)


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
