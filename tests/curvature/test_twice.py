"""Convolutions and group normalisations give torch's own numbers, and both derivatives are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from sordino.curvature.twice import Twice


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CONVOLUTIONS = [
    (F.conv1d, (2, 4, 7), (6, 4, 3), {"padding": 1}),
    (F.conv2d, (2, 4, 5, 6), (6, 4, 3, 3), {"stride": 2, "padding": (1, 0)}),
    (F.conv2d, (2, 4, 5, 5), (6, 2, 2, 3), {"groups": 2, "dilation": (2, 1)}),
    (F.conv3d, (1, 2, 3, 4, 3), (3, 2, 2, 2, 2), {}),
]


@pytest.mark.parametrize(("operation", "inputs", "weights", "how"), CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(operation: Any, inputs: tuple, weights: tuple, how: dict, bias: bool) -> None:
    torch.manual_seed(0)
    x, w, b = leaf(*inputs), leaf(*weights), leaf(weights[0]) if bias else None

    def f(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        with Twice():
            return operation(x, w, b, **how)

    assert f(x, w, b).grad_fn.name() == "ConvolutionBackward"
    torch.testing.assert_close(f(x, w, b), operation(x, w, b, **how))
    assert gradcheck(f, (x, w, b)) and gradgradcheck(f, (x, w, b))
    frozen = w.detach()
    assert gradgradcheck(lambda x: f(x, frozen, None).square(), (x,))
    assert gradgradcheck(lambda w: f(x.detach(), w, b).square(), (w,))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 6, 3, 2)])
def test_group_norm(affine: bool, shape: tuple) -> None:
    torch.manual_seed(0)
    x = leaf(*shape)
    w, b = (leaf(shape[1]), leaf(shape[1])) if affine else (None, None)

    def f(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        with Twice():
            return F.group_norm(x, 2, w, b, 1e-2)

    assert f(x, w, b).grad_fn.name() == "GroupNormBackward"
    torch.testing.assert_close(f(x, w, b), F.group_norm(x, 2, w, b, 1e-2))
    assert gradcheck(f, (x, w, b)) and gradgradcheck(f, (x, w, b))
    if affine:
        assert gradgradcheck(lambda w, b: f(x.detach(), w, b).square(), (w, b))
        assert gradgradcheck(lambda x, b: f(x, w.detach(), b).square(), (x, b))  # type: ignore[union-attr]


def test_what_is_not_known_is_left_alone() -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    with Twice():
        assert "Convolution" in F.conv2d(x, w, padding="same").grad_fn.name()
        assert F.conv2d(x, w, padding="same").grad_fn.name() != "ConvolutionBackward"
        assert F.conv2d(x[0], w).shape == (4, 6, 6)
        assert F.conv2d(x.bfloat16(), w.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.conv2d(x, w).dtype == torch.bfloat16
        assert nn.GroupNorm(2, 4)(torch.randn(3, 4)).shape == (3, 4)
        with pytest.raises(RuntimeError, match="divisible"):
            F.group_norm(x, 2)
