"""One run: a private training of the CNN, its accuracy on validation and test images."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plans
import torch
import torch.nn.functional as F
from experiments.harness import Run, name_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino.data import load

Split = tuple[Tensor, Tensor]


def cnn(shape: tuple[int, ...], classes: int, widths: list[int]) -> nn.Module:
    """Two 3×3 convolutions of each width, ReLU, 2×2 max pooling; one linear layer. No normalisation.

    The CNN of the authors' public code for BSR and BISR; 307,498 parameters for CIFAR-10 at 32, 64, 128, which is the
    0.3M of DP-λCGD's Table 1.
    """
    layers: list[nn.Module] = []
    channels, height, width = shape
    for out in widths:
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = out, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))


@functools.cache
def splits(data: str, validation: int, device: str) -> tuple[dict[str, Split], int]:
    """Train, validation and test, whole, as floats in [−1, 1] on the device, and the number of classes.

    Who is held out for validation is the same for all runs.
    """
    train, test = load(data), load(data, "test")
    assert train is not None and test is not None
    order = np.random.default_rng(0).permutation(len(train))
    parts = {"train": train[np.sort(order[validation:])], "validation": train[np.sort(order[:validation])]}
    parts["test"] = test[:]
    return {name: (x.to(device), y.to(device)) for name, (x, y) in parts.items()}, len(train.classes)


def train(run: Run, folder: str, steps: int | None = None) -> dict[str, Any]:
    """What came out of `run` under the plans in `folder`; `steps` cuts it short, to measure speed."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts, classes = splits(run["data"], run["validation"], device)
    plan = plans.read(Path(folder) / "plans.json").plans[run["noise"], run["sampling"], run["epsilon"]]
    x, y = parts["train"]
    torch.manual_seed(run["seed"])
    model = cnn(tuple(x.shape[1:]), classes, run["widths"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=run["learning_rate"])
    private = sordino.make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        noise_multiplier=run["noise_multiplier"],  # the planned one, for the planned matrix: ε is the plan's
        delta=run["delta"],
        batch_size=run["batch_size"],
        epochs=run["epochs"],
        clip_norm=run["clip_norm"],
        noise=plans.strategy(plan),  # type: ignore[arg-type]
        sampling=run["sampling"],
        seed=int(name_of(run), 16),  # CIFAR-10 is public; anybody can do this run again
    )
    plans.same(plan, private.plan)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets, reduction="none")

    curve: list[float] = []
    warm, start = min(50, (steps or private.steps) // 2), time.perf_counter()
    for batch in private.batches():
        if batch.step == warm:
            _wait(device)
            start = time.perf_counter()
        private.backward(losses, batch)
        optimizer.step()
        if private.step % private.plan.schedule.steps_per_epoch == 0:
            curve.append(accuracy(model, parts["validation"]))
        if private.step == steps:
            break
    _wait(device)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"validation": accuracy(model, parts["validation"]), "test": accuracy(model, parts["test"])}
    found |= {"validation_by_epoch": curve, "milliseconds_per_step": round(1e3 * seconds / (private.step - warm), 3)}
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return found | {"machine": machine, "torch": torch.__version__, "sordino": sordino.__version__}


def speed(run: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The first steps of a run; `run` holds how many, and which turn it is."""
    return train({k: v for k, v in run.items() if k not in ("steps", "turn")}, folder, run["steps"])


def accuracy(model: nn.Module, data: Split) -> float:
    """Over a whole split, in pieces that fit."""
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).sum() for x, y in zip(*(t.split(2500) for t in data), strict=True)]
    return float(torch.stack(hits).sum()) / len(data[1])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
