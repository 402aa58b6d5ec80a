"""Whole models from the transformers and peft libraries, and activation checkpoints, against micro-batches of one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

D = torch.float64
N, T = 3, 5
SMALL = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 17,
    "max_position_embeddings": 16,
}  # fmt: skip


def quiet(config):
    for name in list(vars(config)):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    return config


def bert(**options):
    config = transformers.BertConfig(**SMALL, **options)
    return transformers.BertForSequenceClassification(quiet(config))


def roberta(**options):
    config = transformers.RobertaConfig(**{**SMALL, "max_position_embeddings": 20}, **options)
    return transformers.RobertaForSequenceClassification(quiet(config))


def distilbert(**options):
    config = transformers.DistilBertConfig(
        dim=8, n_layers=2, n_heads=2, hidden_dim=12, vocab_size=17, max_position_embeddings=16, **options
    )
    return transformers.DistilBertForSequenceClassification(quiet(config))


def gpt2(**options):
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, n_inner=12, vocab_size=17, n_positions=16, use_cache=False, **options
    )
    return transformers.GPT2LMHeadModel(quiet(config))


def llama(**options):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False, **options)
    return transformers.LlamaForCausalLM(quiet(config))


def vit(**options):
    config = transformers.ViTConfig(
        **{k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")},
        image_size=8, patch_size=4, num_channels=3, num_labels=3, **options,
    )  # fmt: skip
    return transformers.ViTForImageClassification(quiet(config))


TEXT = {"bert": bert, "roberta": roberta, "distilbert": distilbert}
CAUSAL = {"gpt2": gpt2, "llama": llama}


def text_losses(model):
    def losses(input_ids, labels, attention_mask=None):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        return F.cross_entropy(logits, labels, reduction="none")

    return losses


def causal_losses(model):
    def losses(input_ids, attention_mask=None):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        each = F.cross_entropy(logits.mT, input_ids[:, 1:], reduction="none")
        if attention_mask is None:
            return each.mean(1)
        mask = attention_mask[:, 1:].to(each.dtype)
        return (each * mask).sum(1) / mask.sum(1).clamp(min=1)

    return losses


def batch(mask, labels, steps=T):
    data = {"input_ids": torch.randint(2, 17, (N, steps))}
    if labels:
        data["labels"] = torch.randint(2, (N,))
    if mask:
        data["attention_mask"] = torch.ones(N, steps, dtype=torch.long)
        data["attention_mask"][1, 3:] = 0
    return data


def trained(model):
    """Parameters that the losses reach (a pooler that is not used gets none)."""
    return model.double().train()


@pytest.mark.parametrize("steps", [T, N])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TEXT)
def test_text_classifiers(compare, name, mask, attention, steps):
    model = trained(TEXT[name](attn_implementation=attention))
    engine = compare(model, text_losses(model), batch(mask, True, max(steps, 4) if mask else steps), N)
    assert engine.opaque == []


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_language_models(compare, name, mask, attention):
    model = trained(CAUSAL[name](attn_implementation=attention))
    engine = compare(model, causal_losses(model), batch(mask, False), N)
    assert engine.opaque == []


def test_vision_transformer(compare):
    model = trained(vit())
    x, y = torch.randn(N, 3, 8, 8, dtype=D), torch.randint(3, (N,))
    engine = compare(model, lambda x, y: F.cross_entropy(model(x).logits, y, reduction="none"), (x, y), N)
    assert engine.opaque == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing(compare, name, reentrant):
    model = trained({**TEXT, **CAUSAL}[name]())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    labels = name in TEXT
    losses = text_losses(model) if labels else causal_losses(model)
    engine = compare(model, losses, batch(True, labels), N)
    assert engine.opaque == []


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_lora(compare, name, dora):
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"]}[name]
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, lora_dropout=0.0, use_dora=dora, fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model({**TEXT, **CAUSAL}[name](), config).double()
    losses = text_losses(model) if name in TEXT else causal_losses(model)
    engine = compare(model, losses, batch(True, name in TEXT), N, tol=1e-7)
    assert engine.opaque == []
    assert all("lora" in n for key in engine.recorder.layouts.known for n in key[0][1].replace("+", ",").split(","))


def test_lora_with_a_gradient_that_is_zero_at_first(compare):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(bert(), config).double()
    data = batch(True, True)
    engine = compare(model, text_losses(model), data, N)
    zero = [name for name, moved in engine.reached.items() if moved is False]
    assert zero and all("lora_A" in name for name in zero)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p) * p.requires_grad)
    compare(model, text_losses(model), data, N, engine=engine)
    assert all(engine.reached.values())


# -- activation checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoints(compare, reentrant, first):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.scale, self.norm = nn.Parameter(torch.rand(5)), nn.LayerNorm(5)

        def block(self, x):
            x = x + F.relu(self.a(self.norm(x)), inplace=True) * self.scale
            return x + F.linear(x, self.a.weight.T)  # a derived tensor, and a weight used twice

        def forward(self, x):
            if first:
                x = self.embed(x)
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return self.b(x).square().flatten(1).sum(1)

    model = Net().double()
    if not first:
        model.embed.requires_grad_(False)
    x = torch.randn(N, 4, 5, dtype=D)
    # torch's own reentrant checkpoint trains nothing when its input needs no gradient
    losses = (lambda x: model(x)) if first or not reentrant else (lambda x: model(x.clone().requires_grad_()))
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    if reentrant:  # `autograd.grad` refuses reentrant checkpoints, so the yardstick runs without
        plain = Net().double()
        plain.load_state_dict(model.state_dict())
        from sordino.geometry import Euclidean
        from sordino.gradients.clipping import Clipping
        from sordino.gradients.engine import Engine

        def losses_without(x):
            x = plain.embed(x) if first else x
            for _ in range(2):
                x = plain.block(x)
            return plain.b(x).square().flatten(1).sum(1)

        engine = Engine(model, parameters)
        other = Engine(plain, {k: dict(plain.named_parameters())[k] for k in parameters})
        for n in (N, N, N - 1):
            got = engine.clipped_sums(losses, (x[:n],), n, n, Euclidean(), Clipping(1.0))
            want = other.clipped_sums(losses_without, (x[:n],), n, n, Euclidean(), Clipping(1.0))
            torch.testing.assert_close(got.norms, want.norms)
            torch.testing.assert_close(got.sums, want.sums)
        return
    compare(model, losses, (x,), N, parameters=parameters)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum_to_size(p.shape)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_cannot_be_seen_inside_a_checkpoint_is_found(reentrant):
    """Reentrant checkpoints accumulate into p.grad themselves: nothing raw may stay there, nothing may be lost."""
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(5) + 0.5)

        def forward(self, x):
            return Scale.apply(x, self.p)

    def build(through):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 5), Scaled(), nn.Linear(5, 3)).double()

        def losses(x):
            h = model[0](x)
            h = checkpoint(model[1], h, use_reentrant=reentrant) if through else h * model[1].p
            return model[2](h).square().sum(1)

        return Engine(model, dict(model.named_parameters())), losses

    x = torch.randn(N, 5, dtype=D)
    (engine, losses), (plain, plain_losses) = build(True), build(False)
    engine.parameters["1.p"].grad = torch.ones(5, dtype=D)
    got = engine.clipped_sums(losses, (x,), N, N, Euclidean(), Clipping(1.0))
    want = plain.clipped_sums(plain_losses, (x,), N, N, Euclidean(), Clipping(1.0))
    torch.testing.assert_close(got.sums, want.sums)
    assert engine.opaque == ["1"]
    assert torch.equal(engine.parameters["1.p"].grad, torch.ones(5, dtype=D))
    assert all(p.grad is None for k, p in engine.parameters.items() if k != "1.p")
