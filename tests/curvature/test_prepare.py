"""Preparation: what it trains on, that it is a function of the seed, and that it leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.curvature.common import build, losses
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import sordino
from sordino import SordinoError
from sordino.curvature.hessian import HessianOperator
from sordino.curvature.prepare import METHODS, prepare
from sordino.curvature.simclr import contrast
from sordino.curvature.views import colours, crops, view


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def pictures(n: int = 48, channels: int = 1, size: int = 8) -> Tensor:
    """Smooth images: blobs in random places."""
    torch.manual_seed(0)
    return F.interpolate(torch.randn(n, channels, 3, 3), size=(size, size), mode="bilinear")


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_comes_back_and_nothing_else_moves(method: Any) -> None:
    model, public = build("cnn")
    model.train()
    before, ids = flat(model).clone(), [id(p) for p in model.parameters()]
    torch.manual_seed(9)
    random = torch.get_rng_state()
    one = prepare(model, public, method, epochs=2, batch_size=4, seed=1, show=False)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(flat(model), before) and [id(p) for p in model.parameters()] == ids and model.training
    assert all(p.grad is None for p in [*model.parameters(), *one.parameters()])
    assert torch.equal(flat(one), before) == (method == "none")
    torch.manual_seed(10)
    two = prepare(model, public, method, epochs=2, batch_size=4, seed=1, show=False)
    assert torch.equal(flat(one), flat(two))
    if method != "none":
        assert not torch.equal(flat(one), flat(prepare(model, public, method, epochs=2, seed=2, show=False)))
    assert public.labels == "given" and one is not model


def test_random_labels_are_learnt_and_are_those_of_the_hessian() -> None:
    model, public = build("mlp", n=15, labels="random")
    told: list[tuple[int, float]] = []
    ready = prepare(
        model, public, epochs=300, batch_size=15, learning_rate=0.1, seed=3, show=False,
        told=lambda epoch, loss: told.append((epoch, loss)),
    )  # fmt: skip
    assert [epoch for epoch, _ in told] == list(range(1, 301)) and told[-1][1] < 0.6 * math.log(3) < told[0][1]
    at = HessianOperator(model, public, at=ready, seed=3)
    assert at.loss() == pytest.approx(told[-1][1], rel=0.1)
    assert HessianOperator(model, public, at=ready, seed=4).loss() > 1.5 * at.loss()


def test_many_random_labels_teach_uncertainty() -> None:
    """NoiseCurve, section 5.2: a linear model trained on random labels predicts them all alike."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.mul_(4)
    public = sordino.Public(TensorDataset(torch.randn(4000, 4)), losses(model), "random", batch_size=500)
    ready = prepare(model, public, epochs=30, learning_rate=0.1, batch_size=2000, show=False)
    x = torch.randn(500, 4)
    assert float((model(x).softmax(1) - 0.5).abs().mean().detach()) > 0.2
    assert float((ready(x).softmax(1) - 0.5).abs().mean().detach()) < 0.04


def test_many_labels_an_example() -> None:
    """A head of yes-or-no answers: labels are drawn one by one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6)

    def several(x: Tensor, y: Tensor) -> Tensor:
        assert y.shape == (len(x), 6) and bool(((y == 0) | (y == 1)).all())
        return F.binary_cross_entropy_with_logits(model(x), y, reduction="none").mean(1)

    public = sordino.Public(TensorDataset(torch.randn(2000, 4)), several, "random", multilabel=True, batch_size=500)
    drawn = torch.cat([data[1] for data, _ in public.batches(model, sordino.noise.Keys.from_seed(0))])  # type: ignore[attr-defined]
    assert bool(((drawn.mean(0) - 0.5).abs() < 0.05).all()) and len({tuple(row.tolist()) for row in drawn}) == 64
    ready = prepare(model, public, epochs=20, learning_rate=1.0, show=False)
    assert float((ready(torch.randn(500, 4)).sigmoid() - 0.5).abs().mean()) < 0.05
    HessianOperator(model, public, at=ready).matvec(torch.ones(30))
    with torch.no_grad():
        model.bias.copy_(torch.tensor([50.0, -50.0, 0.0, 0.0, 0.0, 0.0]))
    public.labels = "model"
    drawn = torch.cat([data[1] for data, _ in public.batches(model, sordino.noise.Keys.from_seed(0))])  # type: ignore[attr-defined]
    assert bool(drawn[:, 0].all()) and not drawn[:, 1].any() and 0.2 < float(drawn[:, 2].mean()) < 0.8


class Texts(Dataset):
    """Sentences of different lengths, padded batch by batch."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> list[int]:
        return [(i + j) % 5 for j in range(3 + i % 4)]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, rows))
    return {"tokens": torch.tensor([row + [0] * (length - len(row)) for row in rows])}


def test_a_language_model_needs_no_labels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))

    def next_token(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    public = sordino.Public(Texts(), next_token, "given", collate=padded, batch_size=3)
    ready = prepare(model, public, "given-labels", epochs=40, learning_rate=0.3, show=False)
    assert HessianOperator(model, public, at=ready).loss() < 0.5 * HessianOperator(model, public).loss()


def test_simclr_pulls_views_together() -> None:
    model, _ = build("cnn")
    model[3].p = 0.0
    images = pictures(size=6)
    public = sordino.Public(TensorDataset(images), losses(model))
    told: list[float] = []
    ready = prepare(
        model, public, "simclr", epochs=40, learning_rate=5e-3, batch_size=24, show=False,
        told=lambda _, loss: told.append(loss),
    )  # fmt: skip
    assert told[-1] < math.log(47) - 0.6 < told[0]  # chance, with 48 views, is log 47
    assert torch.equal(ready[7].weight, model[7].weight)  # the head was not part of it
    assert not torch.equal(ready[0].weight, model[0].weight)
    chosen = prepare(model, public, "simclr", epochs=1, features=lambda m, x: m[:3](x), show=False)
    assert torch.equal(chosen[4].weight, model[4].weight) and not torch.equal(chosen[0].weight, model[0].weight)


def test_the_contrastive_loss() -> None:
    torch.manual_seed(0)
    z = torch.randn(6, 5)
    unit = z / z.norm(dim=1, keepdim=True)
    total = 0.0
    for i in range(6):
        similar = [math.exp(float(unit[i] @ unit[k]) / 0.5) for k in range(6)]
        total -= math.log(similar[(i + 3) % 6] / (sum(similar) - similar[i]))
    assert float(contrast(z)) == pytest.approx(total / 6, rel=1e-5)


def test_views() -> None:
    images = pictures(200, 3)
    torch.manual_seed(1)
    seen = view(images)
    assert seen.shape == images.shape and bool(seen.isfinite().all())
    torch.manual_seed(1)
    assert torch.equal(seen, view(images)) and not torch.equal(seen, view(images))
    torch.testing.assert_close(crops(images, 1.0, 0.0)[:, :, 3:5, 3:5], images[:, :, 3:5, 3:5], atol=0.6, rtol=0.5)
    ramp = torch.arange(64.0).expand(300, 1, 8, 64)
    cut = crops(ramp, 0.2, 0.5)
    rising = cut[:, 0, 4, 48] > cut[:, 0, 4, 16]
    assert 0.35 < float(rising.float().mean()) < 0.65  # flips
    span = (cut.amax((1, 2, 3)) - cut.amin((1, 2, 3))) / 63
    assert float(span.min()) > 0.3 and float(span.max()) <= 1.0 and float(span.std()) > 0.1  # areas from .2 to 1
    grey = colours(images, 0.4, 1.0)
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    assert not torch.allclose(colours(images, 0.4, 0.0)[:, 0], colours(images, 0.4, 0.0)[:, 2])
    torch.testing.assert_close(colours(images[:, :1], 0.0, 0.2), images[:, :1])


def test_bad_requests() -> None:
    model, public = build("mlp")
    with pytest.raises(SordinoError, match="method='byol' is not known; choose one of: random-labels, simclr"):
        prepare(model, public, "byol")  # type: ignore[arg-type]
    with pytest.raises(SordinoError, match="epochs=0"):
        prepare(model, public, epochs=0)
    with pytest.raises(SordinoError, match=r"needs images.*of shape \[\(5, 5\), \(5,\)\]"):
        prepare(model, public, "simclr")
    with pytest.raises(SordinoError, match="the loss became .* in epoch .*; use a smaller learning_rate"):
        prepare(model, public, learning_rate=3e38, show=False)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten())
    images = sordino.Public(TensorDataset(pictures()), losses(net))
    with pytest.raises(SordinoError, match="the model has none; pass features="):
        prepare(net, images, "simclr")
    with pytest.raises(SordinoError, match=r"one row an image, not \(\)"):
        prepare(net, images, "simclr", features=lambda m, x: m(x).sum())
    with pytest.raises(SordinoError, match="multilabel=3 must be True or False"):
        sordino.Public(public.dataset, losses(model), multilabel=3)  # type: ignore[arg-type]
