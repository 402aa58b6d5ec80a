"""The small VGG on which DP-FTRL and its successors are compared on CIFAR-10.

Six 3×3 convolutions 32-32-64-64-128-128 with 2×2 max pooling after every second, a dense layer of 128, tanh
throughout, no normalisation: the network of Kairouz et al. 2021 ("Practical and private (deep) learning without
sampling or shuffling", following Papernot et al. 2021 on tanh), taken over by Denisov et al. 2022 and by
Choquette-Choo et al. 2023a and 2023b ("(Amplified) banded matrix factorization"), and from there by NoiseCurve.
Convolutions start from N(0, 1/fan-in), dense layers from Xavier's normal, biases from zero, as in the code of Kairouz
et al.
"""

from __future__ import annotations

import math

from torch import nn

from ..errors import SordinoError
from ..registry import Entry
from .base import MODELS, Shape, images, positive

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def small_vgg(shape: Shape, classes: int, dense: int = 128, activation: str = "tanh") -> nn.Module:
    """550,570 parameters for CIFAR-10."""
    channels, height, width = images("small-vgg", shape, 8)
    if activation not in _ACTIVATIONS:
        raise SordinoError(f"activation={activation!r} is not known; choose one of: {', '.join(_ACTIVATIONS)}")
    act = _ACTIVATIONS[activation]
    layers: list[nn.Module] = []
    for out in (32, 64, 128):
        layers += [nn.Conv2d(channels, out, 3, padding=1), act(), nn.Conv2d(out, out, 3, padding=1), act()]
        layers += [nn.MaxPool2d(2)]
        channels = out
    flat = 128 * (height // 8) * (width // 8)
    layers += [nn.Flatten(), nn.Linear(flat, positive("dense", dense)), act(), nn.Linear(dense, classes)]
    model = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.weight[0].numel()))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


MODELS.add(Entry("small-vgg", small_vgg, "six convolutions with max pooling and tanh", paper="Kairouz et al. 2021"))
