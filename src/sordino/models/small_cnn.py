"""The two small convolutional networks of NoiseCurve (its Table 4), whose full Hessian can still be computed.

The paper leaves open the width of the dense layer and the number of groups; 128 and 8 are chosen here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..registry import Entry
from .base import MODELS, Shape, group_norm, images, positive


def _small(channels: int, classes: int, dense: int, between: Callable[[int, int], list[nn.Module]]) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (width, stride) in enumerate([(16, 1), (32, 2), (64, 2)]):
        layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1), *between(i, width)]
        channels = width
    head = [nn.Linear(256, positive("dense", dense)), nn.ReLU(), nn.Linear(dense, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *head)


def small_cnn(shape: Shape, classes: int, dense: int = 128, groups: int = 8) -> nn.Module:
    """Three 3×3 convolutions, each with GroupNorm and ReLU."""
    channels, _, _ = images("small-cnn", shape, 4)
    return _small(channels, classes, dense, lambda _, width: [group_norm(width, groups), nn.ReLU()])


def small_cnn_maxpool(shape: Shape, classes: int, dense: int = 128) -> nn.Module:
    """The same without normalisation and with 2×2 max pooling after the first two convolutions."""
    channels, _, _ = images("small-cnn-maxpool", shape, 8)
    return _small(channels, classes, dense, lambda i, _: [nn.ReLU(), nn.MaxPool2d(2)] if i < 2 else [nn.ReLU()])


MODELS.add(Entry("small-cnn", small_cnn, "three convolutions with GroupNorm, 58k parameters", paper="NoiseCurve"))
MODELS.add(Entry("small-cnn-maxpool", small_cnn_maxpool, "three convolutions with max pooling", paper="NoiseCurve"))
