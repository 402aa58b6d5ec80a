"""A small problem, and one private step on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import Private

torch.set_num_threads(1)

FREE = sordino.Budget(math.inf, 1e-6)  # clip only: p.grad is the clipped sum over B


def points(n: int = 24, features: int = 5, classes: int = 3, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return TensorDataset(x, torch.randint(0, classes, (n,), generator=generator))


def mlp(features: int = 5, hidden: int = 8, classes: int = 3, seed: int = 0, extra: Any = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.Tanh()] if extra is None else [nn.Tanh(), extra]
        return nn.Sequential(nn.Linear(features, hidden), *middle, nn.Linear(hidden, classes))


def ce(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return losses


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def make(model: nn.Module, dataset: Any = None, optimizer: Any = None, **options: Any) -> Private:
    """A run over `dataset` in fixed order, everything in one batch, without noise, unless `options` say otherwise."""
    dataset = points() if dataset is None else dataset
    if "budget" not in options and "noise_multiplier" not in options:
        options["budget"] = FREE
    chosen = {"batch_size": len(dataset), "epochs": 50, "sampling": "fixed-order", "seed": 1, **options}
    return sordino.make_private(model, sgd(model) if optimizer is None else optimizer, dataset, **chosen)


def step(private: Private, losses: Any, count: int = 1) -> dict[str, Tensor]:
    """The next private gradients; of the last of `count` steps, without moving."""
    batches = iter(private.batches())
    for _ in range(count):
        private.backward(losses, next(batches))
    return grads(private.model)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def each_alone(model: nn.Module, losses: Any, data: tuple[Tensor, ...]) -> list[dict[str, Tensor]]:
    """Every example's gradient through ordinary autograd."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    out = []
    for i in range(len(data[0])):
        value = losses(*(t[i : i + 1] for t in data))
        found = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), found, strict=True)
        out.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return out


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt())


def clipped_sum(each: list[dict[str, Tensor]], bound: float) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(t) for name, t in each[0].items()}
    for one in each:
        weight = min(1.0, bound / norm(one)) if norm(one) else 1.0
        for name, t in one.items():
            total[name] += weight * t
    return total


def close(a: dict[str, Tensor], b: dict[str, Tensor], tol: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    size = max(norm(b), 1e-12)
    assert norm({name: a[name] - b[name] for name in a}) <= tol * size
