"""A run small enough to be saved, killed and resumed hundreds of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino.private import Private

T = 12  # steps of `tiny`


@dataclass
class Run:
    """The user's side: a model, an optimizer, a schedule, and the run that makes them private."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    private: Private

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="none")

    def go(self, steps: int | None = None, losses: Callable[..., Tensor] | None = None) -> None:
        """Train until so many steps are released."""
        steps = self.private.steps if steps is None else steps
        if self.private.step >= steps:
            return
        for batch in self.private.batches():
            self.private.backward(losses or self.losses, batch)
            self.optimizer.step()
            self.schedule.step()
            if self.private.step == steps:
                return

    def save(self, folder: Path) -> Path:
        return self.private.save(folder, schedule=self.schedule)

    def load(self, folder: Path) -> None:
        self.private.load(folder, schedule=self.schedule)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def make(**options: Any) -> Run:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 4, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
    kind = options.pop("optimizer", torch.optim.Adam)
    optimizer = kind(model.parameters(), lr=options.pop("lr", 0.05))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], gamma=0.5)
    settings: dict[str, Any] = {
        "noise_multiplier": 10.0, "delta": 1e-5, "batch_size": 16, "epochs": 3, "seed": 3, "noise": "lambda-cgd:0.9",
        "sampling": "fixed-order",
    }  # fmt: skip
    return Run(model, optimizer, schedule, sordino.make_private(model, optimizer, data, **{**settings, **options}))
