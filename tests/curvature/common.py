"""Small models with their public data, and exact Hessians by torch's own means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import sordino

torch.set_num_threads(1)


class Attention(nn.Module):
    """Tokens → attention → mean → classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embedding(tokens))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h.mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Dropout(0.5),
        nn.Conv2d(4, 2, 2, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,), 3),
    "cnn": (cnn, (1, 6, 6), 3),
    "attention": (Attention, (4,), 3),
    "frozen part": (frozen, (5,), 3),
    "tied": (Tied, (5,), 5),
    "lstm": (Recurrent, (4, 2), 2),
}


def build(name: str, n: int = 12, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    """The model and its Public."""
    make, shape, classes = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().to(dtype)
        x = torch.randint(7, (n, *shape)) if name == "attention" else torch.randn(n, *shape, dtype=dtype)
        y = torch.randint(classes, (n,))
    options = {"labels": "given", "batch_size": 5, **options}
    return model, sordino.Public(TensorDataset(x, y), losses(model), **options)


def losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def each(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return each


def exact(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    """The Hessian of the mean loss in float64, dropout off, by torch's own forward and backward."""
    others = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if not t.requires_grad}
    state = {name: t.double() if t.is_floating_point() else t for name, t in others.items()}
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in names.values()]
    flat = torch.cat([p.detach().double().flatten() for p in names.values()])
    x, y = (t.double() if t.is_floating_point() else t for t in data)
    training = model.training
    model.eval()

    def mean(w: Tensor) -> Tensor:
        pieces = w.split(sizes)
        ours = {name: v.view(p.shape) for (name, p), v in zip(names.items(), pieces, strict=True)}
        return F.cross_entropy(functional_call(model, {**state, **ours}, (x,), tie_weights=True), y)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.autograd.functional.hessian(mean, flat)
    model.train(training)
    return out
