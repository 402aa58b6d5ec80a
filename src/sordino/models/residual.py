"""Residual networks with GroupNorm: WRN-16-4 (De et al. 2022) and ResNet-20 (He et al. 2016).

Weight standardisation is an option and off: it makes the weight that the convolution uses a function of the parameter,
which costs more per-example work than it is known to gain outside the recipe it comes from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Entry
from .base import MODELS, Shape, group_norm, images


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1/fan-in (Qiao et al. 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        w = self.weight
        mean = w.mean(dim=(1, 2, 3), keepdim=True)
        var = w.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        standard = (w - mean) * torch.rsqrt((var * w[0].numel()).clamp_min(1e-4))
        return F.conv2d(input, standard, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _conv(cin: int, cout: int, kernel: int, stride: int, standardize: bool) -> nn.Conv2d:
    make = StandardizedConv2d if standardize else nn.Conv2d
    conv = make(cin, cout, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class PreActivationBlock(nn.Module):
    """Norm-ReLU-conv twice (Zagoruyko & Komodakis 2016); where shapes change the first activation feeds a shortcut."""

    def __init__(self, cin: int, cout: int, stride: int, groups: int, standardize: bool) -> None:
        super().__init__()
        self.norm1 = group_norm(cin, groups)
        self.conv1 = _conv(cin, cout, 3, stride, standardize)
        self.norm2 = group_norm(cout, groups)
        self.conv2 = _conv(cout, cout, 3, 1, standardize)
        changes = stride != 1 or cin != cout
        self.shortcut = _conv(cin, cout, 1, stride, standardize) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(a)
        return skip + self.conv2(torch.relu(self.norm2(self.conv1(a))))


class BasicBlock(nn.Module):
    """Conv-norm-ReLU-conv-norm (He et al. 2016), with the shortcut of their CIFAR networks: no parameters."""

    def __init__(self, cin: int, cout: int, stride: int, groups: int, standardize: bool) -> None:
        super().__init__()
        self.conv1 = _conv(cin, cout, 3, stride, standardize)
        self.norm1 = group_norm(cout, groups)
        self.conv2 = _conv(cout, cout, 3, 1, standardize)
        self.norm2 = group_norm(cout, groups)
        self.stride, self.missing = stride, cout - cin

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        skip = x[:, :, :: self.stride, :: self.stride]
        if self.missing:
            skip = F.pad(skip, (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2))
        return torch.relu(out + skip)


def wrn_16_4(shape: Shape, classes: int, groups: int = 16, weight_standardization: bool = False) -> nn.Module:
    """2,748,890 parameters for CIFAR-10."""
    channels, _, _ = images("wrn-16-4", shape, 4)
    layers: list[nn.Module] = [_conv(channels, 16, 3, 1, weight_standardization)]
    cin = 16
    for cout, stride in ((64, 1), (128, 2), (256, 2)):
        for i in range(2):
            layers.append(PreActivationBlock(cin, cout, stride if i == 0 else 1, groups, weight_standardization))
            cin = cout
    layers += [group_norm(cin, groups), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes)]
    return nn.Sequential(*layers)


def resnet_20(shape: Shape, classes: int, groups: int = 16, weight_standardization: bool = False) -> nn.Module:
    """269,722 parameters for CIFAR-10."""
    channels, _, _ = images("resnet-20", shape, 4)
    layers: list[nn.Module] = [_conv(channels, 16, 3, 1, weight_standardization), group_norm(16, groups), nn.ReLU()]
    cin = 16
    for cout, stride in ((16, 1), (32, 2), (64, 2)):
        for i in range(3):
            layers.append(BasicBlock(cin, cout, stride if i == 0 else 1, groups, weight_standardization))
            cin = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes))


MODELS.add(Entry("wrn-16-4", wrn_16_4, "wide residual network with GroupNorm, 2.7M", paper="De et al. 2022"))
MODELS.add(Entry("resnet-20", resnet_20, "residual network with GroupNorm, 0.27M", paper="He et al. 2016"))
