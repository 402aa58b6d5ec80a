"""The yardstick of this room: every example alone, through ordinary autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino.geometry import Euclidean
from sordino.gradients.clipping import Clipping
from sordino.gradients.engine import Engine, call

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rows(data, lo: int, hi: int):
    """The rows lo..hi of every tensor of a batch."""
    if isinstance(data, dict):
        return {k: rows(v, lo, hi) for k, v in data.items()}
    if isinstance(data, (tuple, list)):
        return type(data)(rows(v, lo, hi) for v in data)
    return data[lo:hi] if isinstance(data, torch.Tensor) else data


def alone(model: nn.Module, losses, data, n: int, take=rows, multiplicity: int = 1) -> dict[str, torch.Tensor]:
    """Per-example gradients by micro-batches of one: (n, *shape) by parameter."""
    parameters = trainable(model)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    for i in range(n):
        call(losses, take(data, i * multiplicity, (i + 1) * multiplicity)).mean().backward()
        for name, p in parameters.items():
            g, p.grad = torch.zeros_like(p) if p.grad is None else p.grad, None
            found[name].append(g.to_dense() if g.is_sparse else g)
    return {name: torch.stack(g) for name, g in found.items()}


def expected(grads: dict[str, torch.Tensor], clipping: Clipping, scale: dict | None = None):
    """The clipped sum and the norms that follow from per-example gradients."""
    if scale is not None:
        grads = {k: g * scale[k] for k, g in grads.items()}
    squares = {k: g.double().reshape(len(g), -1).square().sum(1) for k, g in grads.items()}
    weights, total, _ = clipping.weights(squares)
    return {k: torch.einsum("n,n...->...", weights[k].to(g.dtype), g) for k, g in grads.items()}, total


def agree(got: dict, want: dict, tol: float) -> None:
    scale = max(float(w.norm()) for w in want.values()) + 1e-300
    for name, w in want.items():
        g = got.get(name, torch.zeros_like(w))
        assert g.shape == w.shape, name
        assert not g.requires_grad, name
        error = float((g - w).norm()) / max(float(w.norm()), 1e-3 * scale)
        assert error < tol, f"{name}: relative error {error:.2e}"


@pytest.fixture
def compare():
    """compare(model, losses, data, n): the engine against micro-batches of one, three batches in a row."""

    def run(
        model, losses, data, n, *, take=rows, multiplicity=1, geometry=None, style="flat", tol=1e-9, bound=None,
        batches=("first", "again", "smaller"), engine=None, parameters=None,
    ):  # fmt: skip
        geometry = geometry or Euclidean()
        parameters = parameters or trainable(model)
        engine = engine or Engine(model, parameters)
        grads = alone(model, losses, data, n, take, multiplicity)
        scale = getattr(geometry, "scale", None)
        if bound is None:
            _, norms = expected(grads, Clipping(1.0), scale)
            bound = float(norms.median()) or 1.0
        clipping = Clipping(bound, style)
        for kind in batches:
            m = n if kind != "smaller" else max(n - 1, 1)
            part = take(data, 0, m * multiplicity)
            want, norms = expected({k: g[:m] for k, g in grads.items()}, clipping, scale)
            got = engine.clipped_sums(losses, part, m, m * multiplicity, geometry, clipping)
            assert got.bad == 0
            torch.testing.assert_close(got.norms.double(), norms, rtol=tol, atol=tol * float(norms.max()))
            agree(got.sums, want, tol)
            assert all(p.grad is None for p in model.parameters())
        return engine

    return run
