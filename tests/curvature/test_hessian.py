"""Products with the Hessian against the exact one, and everything that must stay as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.curvature.common import MODELS, Attention, build, exact, losses
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import SordinoError, Unsupported
from sordino.curvature.hessian import HessianOperator
from sordino.curvature.weights import Weights


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_every_model_in_both_precisions(name: str) -> None:
    model, public = build(name)
    true = exact(model, public.dataset.tensors)
    double = HessianOperator(model, public, dtype=torch.float64)
    assert double.size == len(true) and double.products == 0
    close(double.dense(), true, 1e-12)
    assert double.products == double.size
    single = HessianOperator(model, public)
    assert single.dtype == torch.float32
    close(single.dense(), true, 1e-5)


def test_a_recurrent_network() -> None:
    """Its exact Hessian by differences of its exact gradient."""
    model, public = build("lstm", dtype=torch.float64)
    operator = HessianOperator(model, public)
    v = torch.randn(operator.size, dtype=torch.float64)
    ends = []
    for sign in (1, -1):
        moved = build("lstm", dtype=torch.float64)[0]
        flat = torch.nn.utils.parameters_to_vector(model.parameters()) + sign * 1e-4 * v
        torch.nn.utils.vector_to_parameters(flat, moved.parameters())
        ends.append(HessianOperator(model, public, at=moved).gradient())
    close(operator.matvec(v), (ends[0] - ends[1]) / 2e-4, 1e-6)


@pytest.mark.parametrize("keep", [0, 10**4, None])
def test_graphs_kept_or_not_and_however_split(keep: int | None) -> None:
    model, public = build("cnn", n=13)
    true = exact(model, public.dataset.tensors)
    for size in (1, 5, 13):
        public.batch_size = size
        operator = HessianOperator(model, public, dtype=torch.float64, keep=keep)
        V = torch.randn(operator.size, 3, dtype=torch.float64)
        for _ in range(2):
            close(operator.matmat(V), true @ V, 1e-12)
            close(operator.matvec(V[:, 0]), true @ V[:, 0], 1e-12)
        assert operator.kept == (0 if keep == 0 else 1 if keep is None else operator.kept)


def test_the_gradient_and_the_loss() -> None:
    model, public = build("mlp")
    operator = HessianOperator(model, public)
    value = F.cross_entropy(model(public.dataset.tensors[0]), public.dataset.tensors[1])
    grads = torch.autograd.grad(value, list(model.parameters()))
    torch.testing.assert_close(operator.gradient(), torch.cat([g.flatten() for g in grads]))
    assert operator.loss() == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.parametrize("keep", [0, None])
def test_the_model_is_left_as_it_was(keep: int | None) -> None:
    """Values, identities, modes, gradients, and the user's generators."""
    model, public = build("cnn")
    model.train()
    model[1].eval()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    torch.manual_seed(5)
    random = torch.get_rng_state()
    operator = HessianOperator(model, public, dtype=torch.float64, keep=keep)
    operator.matvec(torch.ones(operator.size, dtype=torch.float64))
    operator.gradient()
    assert torch.equal(random, torch.get_rng_state())
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert [m.training for m in model.modules()] == modes


def test_the_model_may_move_on() -> None:
    """A product is of the loss at the weights there were when the operator was made."""
    model, public = build("mlp")
    true = exact(model, public.dataset.tensors)
    operator = HessianOperator(model, public, dtype=torch.float64, keep=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    close(operator.dense(), true, 1e-12)


def test_at_the_weights_of_a_copy() -> None:
    model, public = build("mlp")
    other, its = build("mlp")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    true = exact(other, public.dataset.tensors)
    close(HessianOperator(model, public, at=other, dtype=torch.float64).dense(), true, 1e-12)
    with pytest.raises(SordinoError, match="does not use this model.*at="):
        HessianOperator(other, public).gradient()
    with pytest.raises(SordinoError, match="at= has no '0.weight' of shape"):
        HessianOperator(model, public, at=nn.Linear(5, 3))


@pytest.mark.parametrize("labels", ["model", "random"])
def test_labels_are_drawn_once(labels: str) -> None:
    model, public = build("mlp", labels=labels)
    operator = HessianOperator(model, public, dtype=torch.float64, keep=0, seed=4)
    v = torch.randn(operator.size, dtype=torch.float64)
    assert torch.equal(operator.matvec(v), operator.matvec(v))
    same = HessianOperator(model, public, dtype=torch.float64, keep=0, seed=4)
    assert torch.equal(operator.matvec(v), same.matvec(v))
    assert not torch.equal(operator.matvec(v), HessianOperator(model, public, seed=5).matvec(v.float()).double())
    x = public.dataset.tensors[0]
    drawn = torch.cat([operator.examples.batch(i)[1] for i in range(3)])
    close(operator.dense(), exact(model, (x, drawn)), 1e-12)


def test_labels_of_the_model_are_those_of_the_copy() -> None:
    model, public = build("mlp", n=200, labels="model")
    sure = build("mlp")[0]
    with torch.no_grad():
        sure[2].bias.copy_(torch.tensor([0.0, 50.0, 0.0]))
    operator = HessianOperator(model, public, at=sure)
    assert all(bool((operator.examples.batch(i)[1] == 1).all()) for i in range(len(operator.examples.sizes)))


def test_half_precision_and_dropout() -> None:
    model, public = build("cnn", dtype=torch.float32)
    half = build("cnn", dtype=torch.bfloat16)
    operator = HessianOperator(*half)
    assert operator.dtype == torch.float32
    operator.matvec(torch.ones(operator.size))
    with pytest.raises(SordinoError, match="dtype=torch.float16 cannot hold curvature"):
        HessianOperator(model, public, dtype=torch.float16)


def test_attention_of_torchs_own_kernel() -> None:
    """scaled_dot_product_attention has no second derivative of its own, but for the math kernel."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.inner.embedding(tokens)
            return self.inner.head(F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0].mean(1))

    torch.manual_seed(0)
    model = Fused()
    for name, p in model.named_parameters():
        p.requires_grad_("embedding" in name or "head" in name)
    data = TensorDataset(torch.randint(7, (6, 4)), torch.randint(3, (6,)))
    operator = HessianOperator(model, sordino.Public(data, losses(model), "given"), dtype=torch.float64)
    close(operator.dense(), exact(model, data.tensors), 1e-12)


def test_what_has_no_second_derivative_is_named() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g * 2

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(self.net(x)).square()

    model = Doubled()
    _, public = build("mlp")
    operator = HessianOperator(model, sordino.Public(public.dataset, losses(model), "given"))
    with pytest.raises(Unsupported, match="no second derivative"):
        operator.matvec(torch.ones(operator.size))


def test_bad_losses_and_bad_numbers() -> None:
    model, public = build("mlp")
    with pytest.raises(SordinoError, match="returned a scalar"):
        HessianOperator(model, sordino.Public(public.dataset, lambda x, y: F.cross_entropy(model(x), y))).gradient()
    weight = model[0].weight
    with pytest.raises(SordinoError, match="holds a parameter of the model in a variable of its own"):
        own = sordino.Public(public.dataset, lambda x, y: losses(model)(x, y) + weight.sum())
        HessianOperator(model, own).gradient()
    public.dataset.tensors[0][7, 2] = torch.nan
    with pytest.raises(SordinoError, match="gradient of public examples 5 to 9 is not finite"):
        HessianOperator(model, public).gradient()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(SordinoError, match="no trainable parameter"):
        HessianOperator(model, public)


def test_a_loss_linear_in_the_weights_has_no_curvature() -> None:
    model = nn.Linear(5, 1)
    data = build("mlp")[1].dataset
    operator = HessianOperator(model, sordino.Public(data, lambda x, y: model(x)[:, 0], "given"))
    assert not operator.dense().any()


def test_progress_is_told_batch_by_batch() -> None:
    seen: list[tuple[int, int]] = []
    operator = HessianOperator(*build("mlp"), watch=lambda done, total: seen.append((done, total)))
    operator.matvec(torch.ones(operator.size))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_weights_are_given_back_after_an_error() -> None:
    model, _ = build("lstm")
    before = [id(p) for p in model.parameters()]
    flat = [id(p) for p in model.lstm._flat_weights]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError), Weights(model, dtype=torch.float64):
        assert model.lstm._flat_weights[0].dtype == torch.float64  # type: ignore[union-attr,index]
        raise RuntimeError
    assert before == [id(p) for p in model.parameters()]
    assert flat == [id(p) for p in model.lstm._flat_weights]  # type: ignore[union-attr]


def test_the_number_of_convolutions_a_product_takes() -> None:
    """Six a layer, where a gradient takes three; of the first layer two, as the gradient."""
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))
    data = TensorDataset(torch.randn(3, 2, 8, 8), torch.randint(2, (3,)))
    operator = HessianOperator(model, sordino.Public(data, losses(model), "given"))
    v = torch.ones(operator.size)
    operator.matvec(v)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        operator.matvec(v)
    counts = {event.key: event.count for event in seen.key_averages()}
    # first layer: x * cW; g ⋆ and a ⋆ for W. Second: two forwards, and three backwards of which one gives two results
    assert counts["aten::convolution"] == 3
    assert counts["aten::convolution_backward"] == 4


@pytest.mark.slow
def test_lora_on_a_small_transformer() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    lora = peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(30, (6, 8))

    def next_token(input_ids: Tensor) -> Tensor:
        logits = model(input_ids=input_ids).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").mean(1)

    public = sordino.Public(TensorDataset(tokens), next_token, "given", batch_size=4)
    operator = HessianOperator(model, public, dtype=torch.float64)
    assert operator.size == 2 * (8 + 24)
    matrix, step = operator.dense(), 1e-5
    trained = [p for p in model.parameters() if p.requires_grad]
    model.double()
    start = torch.nn.utils.parameters_to_vector(trained).detach().clone()
    for i in (0, 9, 40, 63):
        ends = []
        for sign in (1, -1):
            moved = start.clone()
            moved[i] += sign * step
            torch.nn.utils.vector_to_parameters(moved, trained)
            ends.append(HessianOperator(model, public).gradient())
        close(matrix[i], (ends[0] - ends[1]) / (2 * step), 1e-5)
