"""Models without convolutions: logistic regression and the multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ..errors import SordinoError
from ..registry import Entry
from .base import MODELS, Shape, positive


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression: convex, and its Hessian is known in closed form."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: int, hidden: Sequence[int] = (1024, 1024)) -> nn.Module:
    """Fully connected layers with ReLU between them; 784-1024-1024-10 on MNIST."""
    if isinstance(hidden, (str, int)):
        raise SordinoError(f"hidden={hidden!r} must be a list of widths, such as [1024, 1024]")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, positive("hidden", size)), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


MODELS.add(Entry("logistic", logistic, "multinomial logistic regression"))
MODELS.add(Entry("mlp", mlp, "fully connected with ReLU, by default two hidden layers of 1024"))
