"""From a `Config` to the things a run is made of: data, model, optimizer, public data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..data import BUILT_IN, Arrays, load
from ..errors import SordinoError
from ..models import build
from ..public import Public
from .config import Config, Optimizer


@dataclass(frozen=True)
class RunData:
    """The private data in its two parts, and public test data."""

    train: Arrays
    validation: Arrays | None
    test: Arrays | None


def held_out(data: Arrays, share: float) -> np.ndarray:
    """Which examples are for validation: decided for each by a hash of its own content.

    A permutation would not do: adding one example would move others in or out of training, and the guarantee compares
    two data sets that differ in one example's contribution alone. The part has about, not exactly, the size asked for.
    """
    limit = int(share * 2**64)
    inputs, targets = data.inputs.numpy(), data.targets.numpy()

    def chosen(i: int) -> bool:
        digest = hashlib.blake2b(inputs[i].tobytes() + int(targets[i]).to_bytes(8, "little"), digest_size=8)
        return int.from_bytes(digest.digest(), "big") < limit

    return np.array([chosen(i) for i in range(len(data))], dtype=bool)


def load_data(config: Config) -> RunData:
    wanted = config.data
    data = load(wanted.path, label=wanted.label, size=wanted.size)
    assert data is not None  # every source has a training part
    validation = None
    if wanted.validation:
        out = held_out(data, wanted.validation)
        if out.all() or not out.any():
            raise SordinoError(
                f"data.validation={wanted.validation} leaves one part of {len(data)} examples empty; choose another"
            )
        data, validation = data.subset(~out), data.subset(out)
    test_path = wanted.test or (wanted.path if wanted.path in BUILT_IN else None)
    test = None
    if test_path is not None:
        options: dict[str, Any] = {"label": wanted.label, "size": wanted.size, "classes": data.classes}
        # A file's own test part, or else a file that is for testing altogether.
        test = load(test_path, "test", **options)
        if test is None and test_path == wanted.path:
            raise SordinoError(f"data.test={test_path!r} has no test part, and its training part is the private data")
        test = test or load(test_path, **options)
        assert test is not None
        _same_shape("data.test", test, data)
    return RunData(data, validation, test)


def _same_shape(key: str, found: Arrays, data: Arrays) -> None:
    if found.input_shape != data.input_shape:
        raise SordinoError(
            f"{key}: one example has shape {found.input_shape}, and of the private data {data.input_shape}; "
            "they must be alike (size= resizes the images of a folder)"
        )


def tensors(data: Arrays) -> TensorDataset:
    """All examples as float32 tensors, which a batch is taken from in one go."""
    return TensorDataset(*data[:])


def make_model(config: Config, data: Arrays) -> nn.Module:
    if config.seed is not None:
        torch.manual_seed(config.seed)
    else:
        torch.seed()
    options = config.model.model_extra or {}
    model = build(config.model.name, data.input_shape, len(data.classes), **options)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def make_optimizer(wanted: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    rate, decay = wanted.learning_rate, wanted.weight_decay
    if wanted.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=wanted.momentum, weight_decay=decay)
    kind = torch.optim.Adam if wanted.name == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=rate, weight_decay=decay)


def make_losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets, reduction="none")

    return losses


def make_public(config: Config, model: nn.Module, data: Arrays) -> Public | None:
    wanted = config.public
    if wanted is None:
        return None
    classes = data.classes if wanted.labels == "given" else None
    public = load(wanted.path, label=wanted.label, size=wanted.size, classes=classes)
    assert public is not None
    _same_shape("public.path", public, data)
    return Public(tensors(public), losses=make_losses(model), labels=wanted.labels)


@torch.no_grad()
def evaluate(model: nn.Module, data: Arrays, rows: int = 1024) -> dict[str, float]:
    """Mean loss and accuracy."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    loss = right = 0.0
    try:
        for lo in range(0, len(data), rows):
            inputs, targets = (t.to(device) for t in data[lo : lo + rows])
            outputs = model(inputs).float()
            loss += float(F.cross_entropy(outputs, targets, reduction="sum"))
            right += float((outputs.argmax(1) == targets).sum())
    finally:
        model.train(training)
    return {"loss": loss / len(data), "accuracy": right / len(data)}
