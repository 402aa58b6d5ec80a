"""Checks of the GPU kernels against float64: on a GPU, and (a script, TRITON_INTERPRET=1) in Triton's interpreter."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients import kernels


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm()
    assert error <= tolerance, f"relative error {error:.2g} > {tolerance:.2g}"


def gram(device: str, large: bool) -> None:
    shapes = [(3, 70, 20, 33), (2, 16, 5, 3), (4, 130, 64, 17), (2, 1, 9, 9)]
    opposite = torch.randn(3, 40, 6, device=device)  # factors that cancel almost wholly
    cancelling = (torch.cat([opposite, -opposite], 1), torch.cat([opposite, opposite * (1 + 1e-4)], 1))
    exact = torch.bmm(cancelling[0].double().transpose(1, 2), cancelling[1].double()).square().sum((1, 2))
    assert bool((kernels.gram_norms([cancelling], 4.8e-7)[0].double() >= exact).all())
    if large:
        shapes += [(64, 128, 768, 3072), (16, 197, 768, 768)]
    for (n, t, p, q), dtype in itertools.product(
        shapes, (torch.float32, torch.bfloat16) if large else (torch.float32,)
    ):
        left, right = torch.randn(n, t, p, device=device), torch.randn(n, q, t, device=device).transpose(1, 2)
        left, right = left.to(dtype), right.to(dtype)
        wanted = torch.bmm(left.double().transpose(1, 2), right.double()).square().sum((1, 2))
        spread = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1).square()
        # rounding is relative to the spread, not to the norm; the margin covers it
        assert bool(((kernels.gram_norms([(left, right)])[0].double() - wanted).abs() <= 2.5e-7 * spread).all())
        safe = kernels.gram_norms([(left, right)], 4.8e-7)[0].double()
        assert bool((safe >= wanted).all()) and bool((safe <= wanted + 4 * 4.8e-7 * spread + 2.5e-7 * spread).all())


def together(device: str, large: bool) -> None:
    """Many pairs at once give bit for bit what each gives alone, whatever their shapes, strides and addresses."""
    pairs = []
    for n, t, p, q in [(2, 70, 20, 12), (2, 70, 20, 12), (2, 68, 8, 16), (2, 70, 20, 12), (3, 5, 4, 4)]:
        pairs.append((torch.randn(n, t, p, device=device), torch.randn(n, t, q, device=device)))
    odd = torch.randn(2 * 70 * 20 + 1, device=device)[1:].view(2, 70, 20)  # not at a multiple of 16 bytes
    pairs += [(odd, pairs[0][1]), (pairs[0][0], pairs[0][1].transpose(1, 2).contiguous().transpose(1, 2))]
    if large:  # the interpreter multiplies bfloat16 as integers
        pairs += [(a.bfloat16(), b) for a, b in pairs[:2]]
        pairs += [(torch.randn(64, 197, 768, device=device), torch.randn(64, 197, 768, device=device)) for _ in "123"]
    for pair in pairs[:1] + pairs[4:5]:  # other tiles, one that holds all positions among them
        for how in ((128, 16, 4, 2), (32, 32, 4, 2)):
            close(kernels.gram_norms([pair], 0.0, how)[0], kernels.gram_norms([pair])[0], 1e-6)
    found = kernels.gram_norms(pairs, 4.8e-7)
    for pair, norms in zip(pairs, found, strict=True):
        assert torch.equal(norms, kernels.gram_norms([pair], 4.8e-7)[0])
        left, right = (x.double() for x in pair)
        close(norms, torch.bmm(left.transpose(1, 2), right).square().sum((1, 2)), 1e-3)


def convolution(device: str, large: bool) -> None:
    cases = [
        # n, rows each, in, out, image, kernel, stride, padding, dilation
        (3, 2, 5, 4, (9, 7), (3, 2), (2, 1), (1, 1), (1, 2)),
        (2, 1, 3, 17, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
        (2, 1, 20, 6, (5, 6), (1, 1), (2, 2), (0, 0), (1, 1)),
    ]
    if large:
        cases += [(32, 1, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),
                  (32, 1, 128, 256, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1))]  # fmt: skip
    for n, m, cin, cout, image, kernel, stride, padding, dilation in cases:
        x, w = torch.randn(n * m, cin, *image, device=device), torch.randn(cout, cin, *kernel, device=device)
        g = torch.randn_like(F.conv2d(x, w, None, stride, padding, dilation))
        wanted = []
        for i in range(n):
            wi = w.double().requires_grad_()
            rows = slice(i * m, (i + 1) * m)
            y = F.conv2d(x[rows].double(), wi, None, stride, padding, dilation)
            wanted.append(torch.autograd.grad(y, wi, g[rows].double())[0])
        grads = torch.stack(wanted)
        norms = grads.flatten(1).square().sum(1)
        for keep, exact in itertools.product((True, False), (True, False)):
            square, out = kernels.conv_gradients(x, g, n, kernel, stride, padding, dilation, keep, exact)
            tolerance = 2e-6 if exact or device == "cpu" else 3e-3
            close(square, norms, tolerance)
            assert (out is not None) == keep
            if out is not None:
                close(out, grads, tolerance)
                close(square, out.double().flatten(1).square().sum(1), 2e-6)  # the norms of the very numbers kept


def sums(device: str, large: bool) -> None:
    """Two layers of a shape in one launch."""
    for dtype in (torch.float32, torch.bfloat16):
        for n, t, d in [(3, 21, 40), (2, 1, 130), *([(64, 128, 768)] if large else [])]:
            layers = []
            for _ in "12":
                g, x = (torch.randn(n, t, d, device=device).to(dtype) for _ in range(2))
                mean, rstd = torch.randn(n * t, 1, device=device), torch.rand(n * t, 1, device=device)
                layers.append((g, x, mean, rstd, *torch.full((2, n, d), torch.nan, device=device)))
            kernels.layer_norm_sums(layers)
            for g, x, mean, rstd, weight, bias in layers:
                xhat = (x.double() - mean.view(n, t, 1).double()) * rstd.view(n, t, 1).double()
                close(weight, (g.double() * xhat).sum(1), 1e-5)
                close(bias, g.double().sum(1), 1e-5)


CASES = {"gram": gram, "together": together, "convolution": convolution, "sums": sums}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in CASES.values():
        case("cpu", False)
