"""The way a step goes on a GPU (kernels for many layers, small parameters side by side), against the way on a CPU.

On a GPU as it is; as a script (TRITON_INTERPRET=1) on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.geometry import Euclidean
from sordino.gradients import precision
from sordino.gradients.clipping import Clipping
from sordino.gradients.engine import Clipped, Engine
from sordino.gradients.kernels import gram, layer_norm

Case = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Tensor]


class Layer(nn.Module):
    """Linear layers of two shapes, a pair of low rank, and norms, over several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 32), nn.Linear(32, 48)
        self.a, self.b = nn.Linear(48, 2, bias=False), nn.Linear(2, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h))) + self.b(self.a(h))


class Text(nn.Module):
    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.tokens, self.time_first = nn.Embedding(30, 48), time_first
        self.layers = nn.Sequential(Layer(), Layer())
        self.scale = nn.Parameter(torch.ones(48))
        self.layers.append(self.layers[0])  # used twice
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        h = self.layers(h.transpose(0, 1)).transpose(0, 1) if self.time_first else self.layers(h)
        return self.head((h * self.scale).mean(1))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(4, 8),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 5),
    )  # fmt: skip


def of_logits(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 5, reduction="none")


def bad(model: nn.Module, x: Tensor) -> Tensor:
    """One example's loss is not a number."""
    return of_logits(model, x) * torch.tensor([1.0, torch.nan] + [1.0] * (len(x) - 2), device=x.device)


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    tokens, flat = torch.randint(30, (6, 7)), torch.randn(6, 20)
    dense = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 5))
    folded = nn.Sequential(
        nn.Flatten(0, 1), nn.GroupNorm(2, 4), nn.Unflatten(0, (6, 3)), nn.Flatten(), nn.Linear(72, 5)
    )
    return {
        "text": (Text(), of_logits, tokens),
        "text, time first": (Text(True), of_logits, tokens),
        "text, one not finite": (Text(), bad, tokens),
        "images": (images(), of_logits, torch.randn(6, 3, 8, 8)),
        "images, rows folded": (folded, of_logits, torch.randn(6, 3, 4, 6)),
        "dense": (dense, of_logits, flat),
        "dense, one not finite": (dense, bad, flat),
    }


def once(engine: Engine, losses: Callable[[nn.Module, Tensor], Tensor], x: Tensor, style: str) -> Clipped:
    engine.watch_reached = False
    clipping = Clipping(0.3, style)
    return engine.clipped_sums(lambda x: losses(engine.model, x), x, len(x), len(x), Euclidean(), clipping)


def agree(name: str, device: str, style: str, tolerance: float = 2e-4) -> None:
    """One step this way and the other, then one more (what was learnt is used, tables of addresses are reused)."""
    model, losses, x = cases()[name]
    want = once(Engine(model, dict(model.named_parameters())), losses, x, style)
    if device == "cpu":
        precision.INTERPRETED = True
    model, x = model.to(device), x.to(device)
    engine = Engine(model, dict(model.named_parameters()))
    for _ in "12":
        got = once(engine, losses, x, style)
        assert got.bad == want.bad == ("not finite" in name), name
        fine = torch.isfinite(want.norms)
        apart = (got.norms.cpu() - want.norms)[fine] / want.norms[fine]
        assert float(apart.abs().max()) < tolerance, (name, apart)
        assert got.sums.keys() == want.sums.keys()
        for parameter, total in want.sums.items():
            error = (got.sums[parameter].cpu() - total).norm()
            assert error <= tolerance * max(total.norm(), 1e-2), (name, parameter, float(error), float(total.norm()))
    precision.INTERPRETED = False


def launches() -> None:
    """Four layers: a launch for each of the two shapes of linear layers, one for all norms."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)), nn.Flatten(), nn.Linear(7 * 48, 5))
    engine = Engine(model, dict(model.named_parameters()))
    precision.INTERPRETED, counted, before = True, [], (gram._launch, layer_norm._layer_norm_kernel)

    def launch(factors: list, *more: Any) -> Tensor:
        counted.append(len(factors))
        return before[0](factors, *more)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            counted.append("norms")
            return before[1][grid]

    gram._launch, layer_norm._layer_norm_kernel = launch, Kernel()  # type: ignore[assignment]
    try:
        once(engine, of_logits, torch.randn(6, 7, 48), "flat")  # with probes for the layout before it
        counted.clear()
        once(engine, of_logits, torch.randn(6, 7, 48), "flat")
        assert counted == ["norms", 4, 4], counted
    finally:
        gram._launch, layer_norm._layer_norm_kernel = before
        precision.INTERPRETED = False


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in cases():
        agree(name, "cpu", "flat")
    for name in ("text", "images"):
        agree(name, "cpu", "layer-wise")
    launches()
