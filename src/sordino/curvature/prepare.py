"""Preparation without labels: bring the model where its curvature is that of the training to come.

``"random-labels"`` (NoiseCurve, second version) trains on labels drawn uniformly, once: the very labels that
`estimate_spectrum` draws for ``labels="random"`` and the same seed. ``"simclr"`` (first version) pulls two views of an
image together. ``"given-labels"`` trains on the labels as they are, which is what a language model's next tokens need.
``"none"`` does nothing. The model itself is left as it is; a prepared copy comes back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..asked import shown, whole
from ..errors import SordinoError
from ..gradients.engine import call
from ..gradients.recorder import check_losses
from ..noise.keys import Keys
from ..randomness import derived_seed, seeded
from .examples import Examples, tensors
from .progress import Bar
from .weights import Weights

if TYPE_CHECKING:
    from ..public import Public

Method = Literal["random-labels", "simclr", "given-labels", "none"]
METHODS = ("random-labels", "simclr", "given-labels", "none")
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
MeanLoss = Callable[[Any], Tensor]


def prepare(
    model: nn.Module,
    public: Public,
    method: Method = "random-labels",
    *,
    epochs: int = 10,
    batch_size: int = 128,
    learning_rate: float | None = None,
    optimizer: MakeOptimizer | None = None,
    features: Callable[[nn.Module, Tensor], Tensor] | None = None,
    seed: int = 0,
    examples: int | None = None,
    show: bool = True,
    told: Callable[[int, float], None] | None = None,
) -> nn.Module:
    """A copy of the model, trained on the public data (its first `examples`) without their labels.

    By default SGD with momentum 0.9 and `learning_rate` 0.05 (Adam and 1e-3 for SimCLR); `optimizer` makes another from
    a list of parameters. `features(model, images)` is what SimCLR compares: by default, the input of the last linear
    layer. `told(epoch, mean loss)` is called after every epoch.
    """
    if method not in METHODS:
        raise SordinoError(f"method={shown(method)} is not known; choose one of: {', '.join(METHODS)}")
    whole("epochs", epochs, 1)
    weights = Weights(model)
    if method != "none":
        token = Keys.from_seed(seed).subkey("public-batches")
        wanted = copy.copy(public)
        wanted.labels = "random" if method == "random-labels" else "given"
        with weights:
            data = Examples(model, wanted, seed, examples)
        trained = list(weights.trainable.values())
        if method == "simclr":
            from .simclr import Contrast

            with seeded(derived_seed(token, "head"), weights.device), weights:
                loss: MeanLoss = Contrast(model, data.batch(0), features)
            trained += list(loss.parameters())  # type: ignore[attr-defined]
        else:
            loss = _mean(data)
        adam = method == "simclr"
        make = optimizer or _default(learning_rate or (1e-3 if adam else 0.05), adam)
        with weights:
            _train(loss, data, make(trained), trained, epochs, batch_size, token, weights.device, show, told)
    prepared = copy.deepcopy(model)
    weights.store(prepared)
    return prepared


def _default(rate: float, adam: bool) -> MakeOptimizer:
    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, rate) if adam else torch.optim.SGD(parameters, rate, momentum=0.9)

    return make


def _mean(data: Examples) -> MeanLoss:
    def loss(batch: Any) -> Tensor:
        value = call(data.losses, batch)
        return check_losses(value, len(value) if isinstance(value, Tensor) and value.dim() == 1 else 1).mean()

    return loss


def _train(
    loss: MeanLoss,
    data: Examples,
    optimizer: torch.optim.Optimizer,
    trained: Iterable[Tensor],
    epochs: int,
    batch_size: int,
    token: bytes,
    device: torch.device,
    show: bool,
    told: Callable[[int, float], None] | None,
) -> None:
    trained = list(trained)
    joined = data.joined()
    with Bar("preparing", show) as bar:
        for epoch in range(epochs):
            total, count = 0.0, 0
            with seeded(derived_seed(token, "epoch", epoch), device), torch.enable_grad():
                for batch in _batches(data, joined, batch_size):
                    value = loss(batch)
                    if not bool(value.isfinite()):
                        raise SordinoError(
                            f"the loss became {float(value.detach())} in epoch {epoch + 1} of the preparation; use a "
                            "smaller learning_rate, or look for NaN in the public data"
                        )
                    for p, g in zip(trained, torch.autograd.grad(value, trained, allow_unused=True), strict=True):
                        p.grad = g
                    optimizer.step()
                    total, count = total + float(value.detach()), count + 1
            bar(epoch + 1, epochs, f"loss {total / max(count, 1):.4g}")
            if told is not None:
                told(epoch + 1, total / max(count, 1))


def _batches(data: Examples, joined: Any | None, size: int) -> Iterator[Any]:
    """The examples in a new order; where rows cannot be told apart (text of different lengths), whole batches are."""
    if joined is None:
        for index in torch.randperm(len(data.sizes)).tolist():
            yield data.batch(index)
        return
    order = torch.randperm(data.count)
    for lo in range(0, data.count, size):
        rows = order[lo : lo + size]
        yield tree_map(lambda t, rows=rows: t[rows].to(data.device), joined)


def images_of(batch: Any) -> Tensor:
    """The images of a batch, or an error that says what came instead."""
    inputs = batch[0] if isinstance(batch, tuple) else batch
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.is_floating_point():
        found = [tuple(t.shape) for t in tensors(batch)]
        raise SordinoError(
            f"method='simclr' needs images, tensors of fractions of shape (examples, channels, height, width), and the "
            f"public examples are of shape {found}; use method='random-labels', or 'given-labels' for text"
        )
    return inputs
