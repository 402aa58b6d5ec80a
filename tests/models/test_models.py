"""Shapes, sizes and the absence of anything that mixes examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino.errors import SordinoError
from sordino.models import MODELS, build
from sordino.models.residual import StandardizedConv2d

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("shape", [CIFAR, MNIST, DIGITS])
@pytest.mark.parametrize("name", MODELS.names())
def test_every_model_runs_on_every_image_size(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = build(name, shape, 7)
    x = torch.randn(3, *shape)
    out = model(x)
    assert out.shape == (3, 7) and out.isfinite().all()
    # No example sees another one.
    torch.testing.assert_close(model(x[1:2]), out[1:2], rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "name, shape, parameters",
    [
        ("logistic", MNIST, 7_850),
        ("mlp", MNIST, 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10_250),
        # 3·16·9+16, 16·32·9+32, 32·64·9+64, two per normalised channel, 257·128, 129·10
        ("small-cnn", CIFAR, 448 + 4_640 + 18_496 + 224 + 32_896 + 1_290),
        ("small-cnn-maxpool", CIFAR, 448 + 4_640 + 18_496 + 32_896 + 1_290),
        ("small-vgg", CIFAR, 896 + 9_248 + 18_496 + 36_928 + 73_856 + 147_584 + 262_272 + 1_290),
        ("wrn-16-4", CIFAR, 2_748_890),  # the figure published for WRN-16-4
        ("resnet-20", CIFAR, 269_722),  # 0.27M in He et al., with their shortcut without parameters
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], parameters: int) -> None:
    assert size(build(name, shape, 10)) == parameters


def test_options() -> None:
    assert size(build("mlp", (64,), 10, hidden=[32])) == 65 * 32 + 33 * 10
    assert build("small-cnn", CIFAR, 10, dense=16)(torch.zeros(1, *CIFAR)).shape == (1, 10)
    relu = build("small-vgg", CIFAR, 10, activation="relu")
    assert any(isinstance(m, nn.ReLU) for m in relu.modules())
    plain, standard = build("wrn-16-4", CIFAR, 10), build("wrn-16-4", CIFAR, 10, weight_standardization=True)
    assert size(plain) == size(standard)
    assert not any(isinstance(m, StandardizedConv2d) for m in plain.modules())


def test_weight_standardization() -> None:
    torch.manual_seed(0)
    conv = StandardizedConv2d(8, 4, 3, bias=False)
    x = torch.randn(2, 8, 9, 9)
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(5).add_(3)  # scale and mean do not matter
    torch.testing.assert_close(conv(x), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS.names())
def test_no_running_statistics(name: str) -> None:
    assert list(build(name, CIFAR, 10).buffers()) == []


def test_mistakes() -> None:
    for call, message in [
        (lambda: build("wrn164", CIFAR, 10), "did you mean 'wrn-16-4'"),
        (lambda: build("wrn-16-4", (64,), 10), "needs images .* use model='mlp'"),
        (lambda: build("small-vgg", (3, 4, 4), 10), "at least 8×8"),
        (lambda: build("mlp", (64,), 10, hidden=64), "hidden=64 must be a list"),
        (lambda: build("mlp", (64,), 10, hidden=[0]), "hidden=0"),
        (lambda: build("mlp", (64,), 0), "classes=0"),
        (lambda: build("logistic", (64,), 2, hidden=[1]), "has no option 'hidden'; known: .none."),
        (lambda: build("small-vgg", CIFAR, 10, activation="gelu"), "activation='gelu'"),
    ]:
        with pytest.raises(SordinoError, match=message):
            call()
