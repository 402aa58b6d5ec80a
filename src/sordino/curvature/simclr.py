"""SimCLR's loss (Chen et al. 2020): of two views of a batch, each should be most similar to its own other view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SordinoError
from .prepare import images_of
from .views import view

TEMPERATURE, WIDTH = 0.5, 128


class Contrast(nn.Module):
    """The mean loss of a batch of images: views → the model's features → a projection → NT-Xent.

    The projection (two linear layers) is trained along and then thrown away, as in the paper.
    """

    def __init__(
        self, model: nn.Module, batch: Any, features: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._model = (model,)  # not a submodule: its weights are not ours
        self._features = features or before_the_last_linear(model)
        with torch.no_grad():
            seen = self._flat(images_of(batch))
        width = seen.shape[1]
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, WIDTH)).to(seen)

    def _flat(self, images: Tensor) -> Tensor:
        out = self._features(self._model[0], images)
        if not isinstance(out, Tensor) or out.dim() < 2 or len(out) != len(images):
            what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise SordinoError(
                f"SimCLR's features must be a tensor with one row an image, not {what}; pass features=, a function of "
                "the model and images"
            )
        return out.flatten(1)

    def forward(self, batch: Any) -> Tensor:
        images = images_of(batch)
        both = torch.cat([view(images), view(images)])
        return contrast(self.project(self._flat(both)))


def contrast(projected: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """NT-Xent of 2n rows, row i and row n + i being views of one image.

    >>> far = torch.eye(4)
    >>> near = torch.cat([torch.eye(2, 4), torch.eye(2, 4)])
    >>> bool(contrast(near) < contrast(far))
    True
    """
    z = F.normalize(projected.float(), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    other = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(similar, other)


def before_the_last_linear(model: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """What goes into the model's last linear layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise SordinoError(
            "method='simclr' compares what goes into the last linear layer, and the model has none; pass features=, a "
            "function of the model and images"
        )

    def features(called: nn.Module, images: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = layers[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            called(images)
        finally:
            hook.remove()
        if not seen:
            raise SordinoError("the model did not use its last linear layer; pass features= to method='simclr'")
        return seen[-1]

    return features
