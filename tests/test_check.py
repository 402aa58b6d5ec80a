"""The sensitivity check: what mixes examples is found, what does not passes, and nothing is left behind."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, make, mlp, points, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import PrivacyError, SordinoError


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def mixup_by_sorting(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.rand(len(x)).argsort()]


MIXING = {
    "centred": lambda x: x - x.mean(0),
    "centred, detached": lambda x: x - x.mean(0).detach(),
    "weakly centred": lambda x: x - 0.05 * x.mean(0).detach(),
    "scaled by the batch": lambda x: x / x.norm().detach().clamp(min=1e-3),
    "divided by the largest": lambda x: x / x.detach().abs().max(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rolled": lambda x: x + 0.1 * x.roll(1, 0),
    "rolled by two": lambda x: x + 0.1 * x.roll(2, 0).detach(),
    "causal": lambda x: x + 0.1 * (x.cumsum(0) - x).detach(),
    "anticausal": lambda x: x + 0.1 * (x.flip(0).cumsum(0).flip(0) - x).detach(),
    "mixup": mixup,
    "mixup by sorting random numbers": mixup_by_sorting,
    "attention over the batch": lambda x: x + 0.1 * F.softmax(x @ x.T, -1) @ x,
    "batch size": lambda x: x * (8 / len(x)),
    "sorted": lambda x: x.sort(0).values,
    "a sign from the others": lambda x: x * (x.sum() - x.sum(1, keepdim=True)).sign().detach(),
}  # fmt: skip


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("name", MIXING)
def test_modules_that_mix_examples_are_refused(name: str, where: str) -> None:
    if where == "after" and name == "a sign from the others":
        pytest.skip("the sign of logits")
    mix, net = Apply(MIXING[name]), mlp(extra=Apply(MIXING[name]) if where == "between" else None)
    model = nn.Sequential(mix, net) if where == "before" else nn.Sequential(net, mix) if where == "after" else net
    private = make(model)
    with pytest.raises(PrivacyError) as error:
        step(private, ce(model))
    assert "\n" not in str(error.value)
    assert private.step == 0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["centred, detached", "rolled by two", "mixup", "mixup by sorting random numbers"])
def test_mixing_is_found_in_models_that_draw_random_numbers_of_their_own(name: str) -> None:
    net = mlp()
    model = nn.Sequential(Apply(MIXING[name]), Apply(lambda x: x * (torch.rand(len(x), 1) < 0.9)), net)
    with pytest.raises(PrivacyError):
        step(make(model), ce(model))


def test_mixing_within_a_class_is_found_in_the_whole_batch() -> None:
    """Partners so rare that eight examples hold none."""
    n = 200
    data = TensorDataset(torch.randn(n, 5), torch.arange(n) % 100)
    model = mlp(classes=100)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        same = (y[:, None] == y[None]).float()
        return F.cross_entropy(model((same @ x) / same.sum(1, keepdim=True)), y, reduction="none")

    with pytest.raises(PrivacyError, match="sensitivity check failed"):
        step(make(model, data), losses)


LOSSES = {
    "a factor 1/len(x)": lambda model: lambda x, y: F.cross_entropy(model(x), y, reduction="none") / len(x),
    "a factor 1/len(x), clipped away": lambda model: lambda x, y: 1e4 * ce(model)(x, y) / len(x),
    "a share of the mean": lambda model: lambda x, y: (v := ce(model)(x, y)) + 0.1 * v.mean(),
    "a share of the mean, detached": lambda model: lambda x, y: (v := ce(model)(x, y)) * (1 + 0.1 * v.mean().detach()),
    "the mean, expanded": lambda model: lambda x, y: F.cross_entropy(model(x), y).expand(len(x)),
    "a temperature from the batch": lambda model: (
        lambda x, y: F.cross_entropy(model(x) / model(x).detach().std(), y, reduction="none")
    ),
    "in-batch negatives": lambda model: (
        lambda x, y: F.cross_entropy(model(x) @ x[:, :3].T, torch.arange(len(x)), reduction="none")
    ),
    "classes weighted by their frequency": lambda model: (
        lambda x, y: ce(model)(x, y) / torch.bincount(y, minlength=3)[y]
    ),
    "shuffled labels": lambda model: (
        lambda x, y: F.cross_entropy(model(x), y[torch.randperm(len(y))], reduction="none")
    ),
    "only hard examples": lambda model: lambda x, y: (v := ce(model)(x, y)) * (v >= v.detach().median()),
}


@pytest.mark.parametrize("bound", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_depend_on_other_examples_are_refused(name: str, bound: float) -> None:
    """Whether or not clipping hides it on this batch."""
    model = mlp()
    with pytest.raises(PrivacyError):
        step(make(model, clip_norm=bound), LOSSES[name](model))


def test_a_loss_that_fails_for_one_example_says_so() -> None:
    model = mlp(classes=1)
    with pytest.raises(PrivacyError, match="squeeze"):
        step(make(model), lambda x, y: model(x).squeeze().square())


def test_division_by_the_batch_is_found_with_random_depth() -> None:
    model = mlp(extra=Apply(lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8))
    with pytest.raises(PrivacyError, match="sensitivity check"):
        step(make(model), lambda x, y: ce(model)(x, y) / len(x))


def test_s5_a_term_added_to_the_loss_is_refused() -> None:
    model = mlp()

    def total(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def added(x: Tensor, y: Tensor) -> Tensor:
        """A vector: then it is part of each example's own loss, and is clipped with it."""
        return ce(model)(x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(PrivacyError, match="scalar"):
        step(make(model), total)
    private = make(model, clip_norm=0.5)
    step(private, added)
    total_norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    assert total_norm <= 0.5 * (1 + 1e-5)


class Tokens(torch.utils.data.Dataset):
    """Sequences of different lengths."""

    def __init__(self, n: int = 20) -> None:
        generator = torch.Generator().manual_seed(0)
        self.items = [torch.randint(1, 12, (int(3 + i * 7 % 9),), generator=generator) for i in range(n)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Tensor:
        return self.items[i]


def pad(items: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"tokens": tokens, "mask": tokens != 0}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 6), nn.Linear(6, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(tokens)))


def test_s6_a_token_mean_over_the_batch_is_refused() -> None:
    model = Reader()

    def losses(tokens: Tensor, mask: Tensor) -> Tensor:
        each = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none") * mask
        return each.sum(1) / mask.sum() * len(tokens)  # as with ignore_index and reduction="mean"

    with pytest.raises(PrivacyError, match="divisor"):
        step(make(model, Tokens(), collate=pad), losses)


def test_padding_to_the_longest_passes_where_it_is_masked_and_fails_where_not() -> None:
    model = Reader()

    def masked(tokens: Tensor, mask: Tensor) -> Tensor:
        each = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none") * mask
        return each.sum(1) / mask.sum(1)

    def unmasked(tokens: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none").mean(1)

    step(make(model, Tokens(), collate=pad), masked)
    with pytest.raises(PrivacyError, match="padding"):
        step(make(model, Tokens(), collate=pad), unmasked)


# -- buffers and state --------------------------------------------------------------------------------


class Observer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "in place":
                self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
            elif self.how == "another tensor":
                self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
            elif self.how == "a new buffer":
                self.register_buffer("fresh", x.mean(0))
            elif self.how == "another shape":
                self.seen.resize_(len(x))
            elif self.how == "later" and self.late:
                self.seen.add_(1)
        return x

    late = False


@pytest.mark.parametrize("how", ["in place", "another tensor", "a new buffer", "another shape"])
@pytest.mark.parametrize("check", [True, False])
def test_buffers_that_the_forward_changes_are_refused_by_name_and_put_back(how: str, check: bool) -> None:
    model = nn.Sequential(Observer(how), mlp())
    before = {name: b.clone() for name, b in model.named_buffers()}
    private = make(model, check=check)
    with pytest.raises(PrivacyError, match="buffer '0"):
        step(private, ce(model))
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert private.step == 0 and all(p.grad is None for p in model.parameters())


class Writer(nn.Module):
    """Leaves the mean of the data in the model."""

    def __init__(self, where: str, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.on = how, nn.Linear(5, 3), True
        if where == "buffer":
            self.register_buffer("mean", torch.zeros(5))
        elif where == "frozen":
            self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        target = self.layer.weight if self.where == "trainable" else self.mean
        if self.on and self.how == ".data":
            target.data.add_(x.detach().mean(0), alpha=1e-6)
        elif self.on and self.how == "another .data":
            target.data = target.data + 1e-6 * x.detach().mean(0)
        elif self.on:
            with torch.no_grad():
                target.detach().add_(x.detach().mean(0), alpha=1e-6)
        return self.layer(x)


@pytest.mark.parametrize("how", [".data", "another .data", "no_grad"])
@pytest.mark.parametrize("where", ["buffer", "frozen", "trainable"])
def test_nothing_of_the_data_is_left_in_the_model(where: str, how: str) -> None:
    model = Writer(where, how)
    private = make(model)
    with pytest.raises(PrivacyError, match="mean|layer.weight"):
        step(private, ce(model))
    assert private.step == 0
    if where == "buffer":
        assert not model.mean.any()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("where", "how"),
    [("buffer", ".data"), ("buffer", "another .data"), ("frozen", "another .data"), ("frozen", "no_grad"),
     ("trainable", "no_grad"), ("trainable", ".data"), ("frozen", ".data")],
)  # fmt: skip
def test_nor_at_a_later_step(where: str, how: str, check: bool) -> None:
    model = Writer(where, how)
    model.on = False
    private = make(model, check=check)
    step(private, ce(model), 2)
    model.on = True
    with pytest.raises(PrivacyError, match="mean|layer.weight"):
        step(private, ce(model))
    assert private.step == 2


def test_what_the_user_writes_through_data_between_steps_stays() -> None:
    model = nn.Sequential(Observer("never"), mlp())
    private = make(model)
    step(private, ce(model))
    model[0].seen.data.fill_(3.0)
    step(private, ce(model))
    assert torch.equal(model[0].seen, torch.full((5,), 3.0))
    model[0].late, model[0].how = True, "later"
    with pytest.raises(PrivacyError, match="buffer '0.seen'"):
        step(private, ce(model))
    assert torch.equal(model[0].seen, torch.full((5,), 3.0))


def test_a_fingerprint_shows_a_single_bit_and_an_exchange() -> None:
    from sordino.guards import fingerprint

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool):
        x = torch.randint(0, 2, ((1 << 20) + 7,)).to(dtype)
        before = fingerprint(x)
        assert before == fingerprint(x.clone())
        for at in (0, 1 << 20, (1 << 20) + 6):
            y = x.clone()
            y[at] = 1 - y[at].int()
            assert fingerprint(y) != before
    x = torch.arange(10.0)
    assert fingerprint(x) != fingerprint(x.flip(0))


def test_a_buffer_that_changes_at_a_later_step_is_refused_too() -> None:
    observer = Observer("later")
    model = nn.Sequential(observer, mlp())
    private = make(model)
    step(private, ce(model), 2)
    observer.late = True
    with pytest.raises(PrivacyError, match="buffer '0.seen'"):
        step(private, ce(model))
    assert torch.equal(observer.seen, torch.zeros(5)) and private.step == 2


def test_a_buffer_the_user_changes_between_steps_is_the_users_business() -> None:
    model = nn.Sequential(Observer("never"), mlp())
    private = make(model)
    step(private, ce(model))
    model[0].seen.fill_(3.0)
    step(private, ce(model))
    assert torch.equal(model[0].seen, torch.full((5,), 3.0))


def test_buffers_in_a_batch_of_one_are_looked_at() -> None:
    model = nn.Sequential(Observer("in place"), mlp())
    with pytest.raises(PrivacyError, match="buffer"):
        step(make(model, points(1)), ce(model))


def test_batch_norm_in_training_mode_is_refused_and_frozen_allowed() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(PrivacyError, match="BatchNorm1d '1'"):
        make(model)
    model[1].eval()
    private = make(model)
    step(private, ce(model))
    model.train()
    with pytest.raises(PrivacyError, match="BatchNorm1d '1'"):
        step(private, ce(model))


def test_state_kept_in_plain_attributes_is_refused() -> None:
    class Queue(nn.Module):
        memory = None

        def forward(self, x: Tensor) -> Tensor:
            out = x if self.memory is None else x + 0.1 * self.memory
            self.memory = x.detach().mean(0)
            return out

    model = nn.Sequential(Queue(), mlp())
    with pytest.raises(PrivacyError, match="from one call to the next"):
        step(make(model), ce(model))


def test_state_is_found_with_single_examples_too() -> None:
    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (1 + 0.1 * self.calls)

    model = nn.Sequential(Counter(), mlp())
    with pytest.raises(PrivacyError, match="from one call to the next"):
        step(make(model, physical_batch_size=1), ce(model))


# -- parameters that are not reached --------------------------------------------------------------------


def test_a_parameter_no_loss_reaches_is_an_error_that_names_it() -> None:
    model = mlp()
    model.add_module("spare", nn.Linear(2, 2))
    net = nn.Sequential(*list(model)[:3])
    with pytest.raises(SordinoError, match="'spare.weight'"):
        step(make(model), lambda x, y: F.cross_entropy(net(x), y, reduction="none"))


class Lora(nn.Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.base, self.alpha = nn.Linear(5, 3).requires_grad_(False), alpha
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.zeros(3, 2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.alpha * F.linear(F.linear(x, self.a), self.b)) * self.scale


def test_lora_begins_with_a_zero_gradient_and_then_moves() -> None:
    model = Lora()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = make(model, optimizer=optimizer)
    for batch in private.batches():
        private.backward(ce(model), batch)
        if private.step == 1:
            assert not model.a.grad.any()
        optimizer.step()
        if private.step == 3:
            break
    assert model.a.grad.any() and not private.zero_first


def test_a_gradient_that_stays_zero_is_an_error_again_and_again() -> None:
    model = Lora(alpha=0.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = make(model, optimizer=optimizer, noise_multiplier=1.0, delta=1e-6)
    batches = iter(private.batches())
    private.backward(ce(model), next(batches))
    optimizer.step()
    batch = next(batches)
    for _ in range(2):
        with pytest.raises(SordinoError, match="'a', 'b' is exactly zero"):
            private.backward(ce(model), batch)
    assert private.step == 1 and private.journal.steps == 1


def test_a_zero_gradient_waits_until_something_moved() -> None:
    """A warm-up that begins with a learning rate of zero."""
    model = Lora()
    private = make(model)
    step(private, ce(model), 3)
    assert "a" in private.zero_first


# -- no false alarms -----------------------------------------------------------------------------------


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(8, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
        self.out = nn.Linear(12, 3)
        self.drop = nn.ModuleList(
            [f(0.3) for f in (nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout)]
            + [nn.Dropout(0.3, inplace=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x[:, :, None].expand(-1, -1, 4))
        h = self.drop[4](self.drop[3](self.drop[1](h))).transpose(1, 2)
        h = h + self.attention(h, h, h)[0]
        h = self.layer(h)
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)
        g, _ = self.gru(h)
        return self.out(F.dropout(torch.cat([h.mean(1), self.drop[2](self.drop[0](g.mean(1)))], 1), 0.2))


def test_dropout_of_every_kind_passes_completely() -> None:
    torch.manual_seed(0)
    model = Dropouts()
    private = make(model)
    step(private, ce(model))
    assert private.check_report.passed and private.check_report.complete


DEPTH = {
    "rand": lambda x: x * (torch.rand(len(x), 1) < 0.8),
    "bernoulli_": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.8)),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "uniform_": lambda x: x * torch.empty(len(x), 1).uniform_(0.5, 1.5),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "one coin for all": lambda x: x if torch.rand(()) < 0.8 else 0 * x,
    "python": lambda x: x * (1 + 0.1 * __import__("random").random()),
    "numpy": lambda x: x * (1 + 0.1 * float(np.random.rand())),
}


@pytest.mark.parametrize("name", DEPTH)
def test_models_with_random_numbers_of_their_own_pass(name: str) -> None:
    model = mlp(extra=Apply(DEPTH[name]))
    private = make(model)
    step(private, ce(model))
    # what Python and numpy draw may be one number a batch or one an example: nobody can tell
    assert private.check_report.complete == (name not in ("python", "numpy"))


def test_random_integers_leave_the_check_incomplete_and_the_guarantee_says_so() -> None:
    model = mlp(extra=Apply(lambda x: x * (1 + 0.1 * torch.randint(0, 5, (len(x), 1)))))
    private = make(model, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model))
    assert private.check_report.passed and not private.check_report.complete
    assert "in part: the model draws random numbers" in str(private.guarantee())


def test_float64_is_compared_exactly() -> None:
    model = mlp().double()
    weak = nn.Sequential(Apply(lambda x: x - 1e-6 * x.mean(0).detach()), model)
    data = TensorDataset(points().tensors[0].double(), points().tensors[1])
    step(make(model, data), ce(model))
    with pytest.raises(PrivacyError):
        step(make(weak, data), ce(weak))


def test_bf16_autocast_is_switched_off_for_the_check_so_that_weak_mixing_shows() -> None:
    def under_autocast(model: nn.Module):
        def losses(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(model(x), y, reduction="none").float()

        return losses

    model = mlp()
    step(make(model), under_autocast(model))
    weak = nn.Sequential(Apply(lambda x: x - 0.05 * x.mean(0).detach()), mlp())
    with pytest.raises(PrivacyError):
        step(make(weak), under_autocast(weak))
    with torch.autocast("cpu", torch.bfloat16):
        step(make(model), ce(model))
        with pytest.raises(PrivacyError):
            step(make(weak), ce(weak))


def test_a_model_that_needs_autocast_is_compared_loosely() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(5, 8).bfloat16().requires_grad_(False)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.frozen(x)))

    model = Mixed()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y, reduction="none")

    step(make(model), losses)


def test_bfloat16_parameters_pass_and_mixing_in_them_does_not() -> None:
    model = mlp().bfloat16()
    data = TensorDataset(points().tensors[0].bfloat16(), points().tensors[1])
    step(make(model, data), ce(model))
    mixed = nn.Sequential(Apply(MIXING["centred, detached"]), model)
    with pytest.raises(PrivacyError):
        step(make(mixed, data), ce(mixed))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 9])
def test_small_batches_pass_and_mixing_in_them_does_not(n: int) -> None:
    model = mlp()
    step(make(model, points(n)), ce(model))
    mixed = nn.Sequential(Apply(MIXING["centred, detached"]), mlp())
    with pytest.raises(PrivacyError):
        step(make(mixed, points(n)), ce(mixed))


@pytest.mark.parametrize("style", ["flat", "layer-wise", "automatic"])
@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e3])
def test_every_clipping_passes(style: str, bound: float) -> None:
    model = mlp()
    private = make(model, clipping=style, clip_norm=bound)
    step(private, ce(model))
    assert private.check_report.complete


@pytest.mark.parametrize("rows", [False, True])
def test_augmentations_pass(rows: bool) -> None:
    model = mlp()

    def one(example):
        return example[0] + 0.1 * torch.randn(5), example[1]

    augment = sordino.OnRows(lambda d: (d[0] + 0.1 * torch.randn_like(d[0]), d[1])) if rows else one
    private = make(model, augment=augment, augmentations=3)
    step(private, ce(model))
    assert private.check_report.complete


def test_an_augmentation_of_rows_that_mixes_them_is_refused() -> None:
    model = mlp()
    augment = sordino.OnRows(lambda d: (d[0] - d[0].mean(0), d[1]))
    with pytest.raises(PrivacyError):
        step(make(model, augment=augment, augmentations=2), ce(model))


def test_adadps_passes() -> None:
    model = mlp()
    public = sordino.Public(points(10, seed=5), ce(model), labels="given")
    private = make(model, geometry="adadps", public=public)
    step(private, ce(model))
    assert private.check_report.complete


def test_single_examples_at_a_time_allow_any_model() -> None:
    """physical_batch_size=1 is what other errors recommend: the check must not stand in the way."""
    model = nn.Sequential(Apply(lambda x: x - x.mean(0)), mlp())  # mixes nothing when alone
    private = make(model, physical_batch_size=1)
    step(private, ce(model))
    assert private.check_report.passed


def test_well_fitted_examples_pass() -> None:
    """Losses close to zero, whose gradients are differences of nearly equal numbers."""
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(100)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), model(x).argmax(1), reduction="none")

    step(make(model), losses)


def test_one_example_without_a_finite_gradient_is_no_alarm() -> None:
    x, y = points().tensors
    x[3, 0] = float("nan")
    model = mlp()
    private = make(model, TensorDataset(x, y))
    step(private, ce(model))
    assert private.last.non_finite == 1 and private.check_report.passed


def test_without_any_finite_gradient_nothing_is_claimed() -> None:
    model = mlp()
    private = make(model, noise_multiplier=1.0, delta=1e-6)
    step(private, lambda x, y: ce(model)(x, y) * float("nan"))
    assert private.check_report is None and "has not run" in str(private.guarantee())
    step(private, ce(model))
    assert private.check_report.passed


# -- when it runs, and what it leaves ------------------------------------------------------------------


def test_a_batch_of_one_is_no_check() -> None:
    model = mlp()
    private = make(model, points(3), batch_size=1, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model), 4)
    assert private.check_report is None
    assert "passed" not in str(private.guarantee()) and "has not run" in str(private.guarantee())


def test_switched_off_it_says_so() -> None:
    model = mlp()
    private = make(model, check=False, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model))
    assert "switched off" in str(private.guarantee())


def test_other_losses_are_checked_when_they_come() -> None:
    model = mlp()
    private = make(model)
    for _ in range(3):
        step(private, lambda x, y: ce(model)(x, y))  # a new lambda of the same code
    calls = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return ce(model)(x, y)

    step(private, counted)
    assert len(calls) > 5
    calls.clear()
    step(private, counted)
    assert calls == [24]
    with pytest.raises(PrivacyError):
        step(private, LOSSES["a share of the mean, detached"](model))
    step(private, counted)


def mixing(model: nn.Module) -> Any:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        return ce(model)(x - x.mean(0), y)

    return losses


def test_another_function_in_the_closure_is_another_losses() -> None:
    model = mlp()

    def around(inner: Any) -> Any:
        return lambda x, y: inner(x, y)

    private = make(model)
    step(private, around(ce(model)))
    with pytest.raises(PrivacyError):
        step(private, around(mixing(model)))


def test_after_a_load_other_losses_are_checked_and_known_ones_are_not(tmp_path: Path) -> None:
    model = mlp()
    with make(model) as private:
        step(private, ce(model), 2)
        private.save(tmp_path)
    for losses in (mixing, ce):
        model = mlp()
        with make(model) as private:
            private.load(tmp_path)
            calls: list[int] = []
            inner = losses(model)
            model.register_forward_pre_hook(lambda m, args, calls=calls: calls.append(len(args[0])))
            if losses is mixing:
                with pytest.raises(PrivacyError):
                    step(private, inner)
                assert private.step == 2
            else:
                step(private, inner)
                assert private.step == 3 and calls == [24]
                assert not private.unchecked


def test_losses_that_met_no_two_examples_are_told() -> None:
    model = mlp()
    private = make(model, points(4), batch_size=4, epochs=9, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model))
    assert not private.unchecked
    private.backward(lambda x, y: ce(model)(x, y) * 2.0, private._batch(1, [2]))
    assert private.unchecked and "not for all losses" in str(private.guarantee())


def test_a_parameter_with_a_gradient_hook_is_refused() -> None:
    model = mlp()
    for add in (
        lambda: model[0].weight.register_hook(lambda g: None),
        lambda: model[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    ):
        private = make(model)
        handle = add()
        with pytest.raises(PrivacyError, match="'0.weight' carries a gradient hook"):
            step(private, ce(model))
        handle.remove()
        step(private, ce(model))

    def late(x: Tensor, y: Tensor) -> Tensor:
        model[0].weight.register_hook(lambda g: None)
        return ce(model)(x, y)

    with pytest.raises(PrivacyError, match="gradient hook"):
        step(make(model, check=False), late)


def test_the_check_leaves_everything_as_it_was() -> None:
    import random

    model = nn.Sequential(Observer("never"), nn.Dropout(0.5), mlp())
    model[1].train()
    model[2].eval()
    private = make(model)
    batch = next(iter(private.batches()))
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    private.backward(ce(model), batch)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]


def test_with_and_without_the_check_the_gradients_are_the_same() -> None:
    found = []
    for check in (True, False):
        model = mlp(extra=nn.Dropout(0.5))
        found.append(step(make(model, check=check, noise_multiplier=1.0, delta=1e-6), ce(model)))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_its_numbers_are_private_and_its_errors_hold_none() -> None:
    model = mlp()
    private = make(model, noise_multiplier=1.0, delta=1e-6, seed=None)
    step(private, ce(model))
    numbers = private.check_report.numbers
    assert {"alone_norms", "company_norms", "moved_0", "moved_7"} <= numbers.keys()
    assert all(v < 1e-4 for k, v in numbers.items() if not k.startswith("moved"))
    assert not any(key in str(private.guarantee().as_dict()) for key in numbers)


def test_its_cost_is_what_the_docs_say() -> None:
    """Two passes over the first batch and about fifteen over eight examples, beside probes of the layouts."""
    model = mlp()
    sizes = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return ce(model)(x, y)

    private = make(model, points(64))
    step(private, losses)
    assert sizes.count(64) <= 1 + 2 + 3 and len(sizes) <= 1 + 2 + 3 + 18
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(private, losses)
