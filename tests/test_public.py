"""The door for public data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, make, mlp, points, step
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import sordino
from sordino import SordinoError
from sordino.noise import Keys

KEYS = Keys.from_seed(3)


def drawn(public: sordino.Public, model: nn.Module, keys: Keys = KEYS) -> Tensor:
    return torch.cat([data[1] for data, _ in public.batches(model, keys)])


def test_labels_as_given() -> None:
    data = points(30)
    assert torch.equal(drawn(sordino.Public(data, ce(mlp()), labels="given", batch_size=7), mlp()), data.tensors[1])


@pytest.mark.parametrize("labels", ["model", "random"])
def test_labels_drawn_have_the_stated_law(labels: str) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([0.6, 0.3, 0.1]).log())
    got = drawn(sordino.Public(points(6000), ce(model), labels=labels, batch_size=1000), model)
    want = torch.tensor([0.6, 0.3, 0.1]) if labels == "model" else torch.full((3,), 1 / 3)
    assert float((torch.bincount(got, minlength=3) / 6000 - want).abs().max()) < 0.03


def test_labels_are_a_function_of_the_key_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    public = sordino.Public(points(50), ce(model))
    torch.manual_seed(1)
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    first = drawn(public, model)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(public, model))
    assert not torch.equal(first, drawn(public, model, Keys.from_seed(4)))
    torch.manual_seed(1)
    public.second_moments(model, dict(model.named_parameters()), KEYS)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_predict_defaults_to_logits_and_can_be_given() -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.net(x))

    model = Output()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).logits, y, reduction="none")

    data = points(40)
    a = drawn(sordino.Public(data, losses), model)
    b = drawn(sordino.Public(data, losses, predict=lambda x: model.net(x)), model)
    assert torch.equal(a, b)
    one = torch.tensor([[0.0, 100.0]])
    always = drawn(sordino.Public(data, losses, predict=lambda x: one.expand(len(x), 2)), model)
    assert (always == 1).all()
    with pytest.raises(SordinoError, match="logits of shape"):
        drawn(sordino.Public(data, losses, predict=lambda x: x[:, 0]), model)


def test_examples_without_labels_and_mappings() -> None:
    class Sentences(Dataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": points(10).tensors[0][i], "labels": torch.tensor(7)}

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Keyword()
    got = [d for d, _ in sordino.Public(Sentences(), ce(model), batch_size=4).batches(model, KEYS)]
    assert all(set(d) == {"x", "labels"} and (d["labels"] < 3).all() for d in got) and len(got) == 3
    bare = sordino.Public(TensorDataset(points(10).tensors[0]), ce(mlp()))
    data, n = next(bare.batches(mlp(), KEYS))
    assert n == 10 and data[0].shape == (10, 5) and data[1].shape == (10,)


def test_a_data_set_of_tensors_alone() -> None:
    class Rows(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> Tensor:
            return points(6).tensors[0][i]

    model = mlp()
    data, n = next(sordino.Public(Rows(), ce(model)).batches(model, KEYS))
    assert n == 6 and data[1].dtype == torch.int64


def test_the_guarantee_names_what_was_learnt_and_does_not_cover_it() -> None:
    model = mlp()
    public = sordino.Public(points(12), ce(model), labels="random")
    private = make(model, geometry="adadps", public=public, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model))
    text = str(private.guarantee())
    assert "12 public examples with labels drawn uniformly, which the guarantee does not cover" in text


def test_public_data_lies_on_the_models_device_and_is_seen_by_nobody_else() -> None:
    model = mlp()
    seen = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        return ce(model)(x, y)

    public = sordino.Public(points(12, seed=8), losses)
    make(model, geometry="adadps", public=public)
    known = points(12, seed=8).tensors[0]
    assert all(any(torch.equal(row, k) for k in known) for x in seen for row in x)
