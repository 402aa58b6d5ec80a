"""Bounds, precision, bad examples, geometries, and what is left behind: nothing."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sordino.geometry import AdaDPS, Euclidean, euclidean, norms
from sordino.gradients.clipping import Clipping
from sordino.gradients.engine import Engine

D = torch.float64
N = 4


def score(out: torch.Tensor) -> torch.Tensor:
    out = out.flatten(1)
    return (out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)).sum(1).tanh() + out.square().mean(1)


def engine_of(model):
    return Engine(model, {k: p for k, p in model.named_parameters() if p.requires_grad})


class Mixture(nn.Module):
    """A bit of everything: convolution, normalisation, embedding, linear over positions, bare and tied."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.linear, self.layer_norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.embed, self.p = nn.Embedding(9, 6), nn.Parameter(torch.randn(1, 1, 6))
        self.drop = nn.Dropout(0.0)
        self.wide = nn.Linear(6, 30)

    def forward(self, x, ids):
        h = F.relu(self.norm(self.conv(x)), inplace=True).flatten(2).mT
        h = self.layer_norm(self.linear(h)) * self.p + self.embed(ids).mean(1, keepdim=True)
        h = self.drop(h).mean(1)
        return (F.linear(h, self.embed.weight)).tanh().sum(1) + self.wide(h).square().mean(1)


def mixture(dtype=D, n=N):
    model = Mixture().to(dtype)
    return model, (torch.randn(n, 2, 4, 4, dtype=dtype), torch.randint(9, (n, 3)))


def total_norm(sums) -> float:
    return sum(float(s.double().square().sum()) for s in sums.values()) ** 0.5


# -- geometries and clippings -------------------------------------------------------------


def adadps(model) -> AdaDPS:
    geometry = AdaDPS()
    geometry.scale = {k: torch.rand(p.shape, dtype=p.dtype) + 0.2 for k, p in model.named_parameters()}
    return geometry


@pytest.mark.parametrize("style", ["flat", "layer-wise", "automatic"])
@pytest.mark.parametrize("scaled", [False, True])
def test_geometries_and_clippings(compare, style, scaled):
    model, data = mixture()
    compare(model, lambda x, i: model(x, i), data, N, geometry=adadps(model) if scaled else None, style=style)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("gram", [False, True])
def test_gram_and_materialised_norms_agree(compare, monkeypatch, gram, scaled):
    for module in (norms, euclidean):
        monkeypatch.setattr(module, "gram_is_cheaper", lambda *a: gram)
    model, data = mixture()
    compare(model, lambda x, i: model(x, i), data, N, geometry=adadps(model) if scaled else None)


def test_norms_in_small_chunks(compare, monkeypatch):
    for module in (norms, euclidean):
        monkeypatch.setattr(module, "chunk", lambda *a: 2)
    model, data = mixture(n=5)
    compare(model, lambda x, i: model(x, i), data, 5)


@pytest.mark.parametrize("multiplicity", [2, 3, N])
def test_augmentations_are_averaged_before_clipping(compare, multiplicity):
    model, data = mixture(n=N * multiplicity)
    compare(model, lambda x, i: model(x, i), data, N, multiplicity=multiplicity)
    rows = torch.randn(N * multiplicity, N, 5, dtype=D)
    layer = nn.Linear(5, 5).double()
    time_first = lambda x: score(layer(x.transpose(0, 1)).tanh().transpose(0, 1))  # noqa: E731
    compare(layer, time_first, (rows,), N, multiplicity=multiplicity)


def test_a_batch_of_one_with_augmentations(compare):
    model, data = mixture(n=3)
    compare(model, lambda x, i: model(x, i), data, 1, multiplicity=3, batches=("first",))


def test_the_losses_returned_are_the_means_by_example():
    model, (x, ids) = mixture(n=6)
    got = engine_of(model).clipped_sums(lambda x, i: model(x, i), (x, ids), 3, 6, Euclidean(), Clipping(1.0))
    torch.testing.assert_close(got.losses, model(x, ids).detach().float().reshape(3, 2).mean(1))


# -- the bound ----------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["flat", "layer-wise", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_s8_no_example_exceeds_the_bound_in_any_precision(style, dtype, autocast):
    """One example's part of the sum, from one copy of it among zeros of the loss: at most bound · (1 + 1e-5)."""
    if autocast is not None and dtype != torch.float32:
        pytest.skip("autocast is for float32 models")
    model, (x, ids) = mixture(dtype)
    engine = engine_of(model)

    def losses(x, ids, weight):
        if autocast is None:
            return model(x, ids) * weight * 30
        with torch.autocast("cpu", autocast):
            return model(x, ids).float() * weight * 30

    for i in range(N):
        weight = torch.zeros(N, dtype=dtype)
        weight[i] = 1
        got = engine.clipped_sums(losses, (x, ids, weight), N, N, Euclidean(), Clipping(0.01, style))
        assert all(s.dtype == torch.float32 for s in got.sums.values())
        assert got.norms.dtype == torch.float32 and got.bad == 0
        assert 0.009 < total_norm(got.sums) <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mixture", "attention", "recurrent", "opaque", "derived"])
def test_autocast_inside_losses(autocast, kind):
    """Loosely against each example alone under the same autocast, by ordinary autograd."""
    if kind == "mixture":
        model, data = mixture(torch.float32)
        body = model
    elif kind == "attention":
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        data, body = (torch.randn(N, 5, 8),), lambda x: score(model(x).float())
    elif kind == "recurrent":
        model = nn.GRU(5, 4, batch_first=True)
        data, body = (torch.randn(N, 5, 5),), lambda x: score(model(x)[0].float())
    elif kind == "opaque":
        model = nn.Bilinear(5, 5, 3)
        data, body = (torch.randn(N, 5),), lambda x: score(model(x, x.tanh()).float())
    else:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
        data, body = (torch.randn(N, 3, 5),), lambda x: score(model(x).float())

    def losses(*data):
        with torch.autocast("cpu", autocast):
            return body(*data).float()

    engine = engine_of(model)
    for _ in range(2):
        got = engine.clipped_sums(losses, data, N, N, Euclidean(), Clipping(0.5))
        alone = [engine.clipped_sums(losses, tuple(t[i : i + 1] for t in data), 1, 1, Euclidean(), Clipping(0.5))
                 for i in range(N)]  # fmt: skip
        torch.testing.assert_close(got.norms, torch.cat([a.norms for a in alone]), rtol=0.05, atol=0.02)
        for name in engine.parameters:
            want = sum(a.sums[name] for a in alone)
            assert float((got.sums[name] - want).norm()) <= 0.08 * max(float(want.norm()), 0.05), name
            assert got.sums[name].dtype == torch.float32


def test_float16_gradients_do_not_vanish():
    """Gradients of 1e-7 are below what float16 holds; the engine scales the losses up and the sums down."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(N, 5)

    def losses(x, half):
        with torch.autocast("cpu", torch.float16, enabled=half):
            return model(x).squeeze(1) * 1e-7

    engine = engine_of(model)
    exact = engine.clipped_sums(lambda x: losses(x, False), (x,), N, N, Euclidean(), Clipping(1e-9))
    got = engine.clipped_sums(lambda x: losses(x, True), (x,), N, N, Euclidean(), Clipping(1e-9))
    torch.testing.assert_close(got.norms, exact.norms, rtol=0.02, atol=0)
    for name in engine.parameters:
        assert float((got.sums[name] - exact.sums[name]).norm()) <= 0.02 * float(exact.sums[name].norm())


def test_float16_overflow_lowers_the_scale():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(N, 5)
    calls = []

    def losses(x, half=True, by=300.0):
        calls.append(1)
        with torch.autocast("cpu", torch.float16, enabled=half):
            return model(x).squeeze(1).float() * by

    engine = engine_of(model)
    exact = engine.clipped_sums(lambda x: losses(x, False), (x,), N, N, Euclidean(), Clipping(1.0))
    calls.clear()
    got = engine.clipped_sums(losses, (x,), N, N, Euclidean(), Clipping(1.0))
    assert got.bad == 0 and len(calls) > 1
    torch.testing.assert_close(got.norms, exact.norms, rtol=0.02, atol=0)
    # an example whose loss itself is not finite does not make the others wait
    calls.clear()
    x = x.clone()
    x[2] = float("nan")
    got = engine.clipped_sums(lambda x: losses(x, True, 1.0), (x,), N, N, Euclidean(), Clipping(1.0))
    assert got.bad == 1 and len(calls) == 1
    assert all(bool(s.isfinite().all()) for s in got.sums.values())


# -- bad examples -------------------------------------------------------------------------


def bad_input(x, ids):
    x = x.clone()
    x[1, 0, 0, 0] = float("nan")
    return x, ids, torch.ones(N, dtype=x.dtype)


def infinite_input(x, ids):
    x = x.clone()
    x[1, 1] = float("inf")
    return x, ids, torch.ones(N, dtype=x.dtype)


def bad_loss(x, ids):
    w = torch.ones(N, dtype=x.dtype)
    w[1] = float("nan")
    return x, ids, w


def infinite_loss(x, ids):
    w = torch.ones(N, dtype=x.dtype)
    w[1] = float("inf")
    return x, ids, w


def overflow(x, ids):
    w = torch.ones(N, dtype=x.dtype)
    w[1] = 1e300 if x.dtype == D else 3e38
    return x, ids, w


@pytest.mark.parametrize("spoil", [bad_input, infinite_input, bad_loss, infinite_loss, overflow])
@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("style", ["flat", "layer-wise", "automatic"])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_bad_example_contributes_zero(spoil, dtype, style, when):
    model, (x, ids) = mixture(dtype)
    losses = lambda x, i, w: model(x, i) * w  # noqa: E731
    engine, clipping = engine_of(model), Clipping(0.5, style)
    good = torch.tensor([0, 2, 3])
    want = engine_of(model).clipped_sums(
        losses, (x[good], ids[good], torch.ones(3, dtype=dtype)), 3, 3, Euclidean(), clipping
    )
    if when == "later":
        engine.clipped_sums(losses, (x, ids, torch.ones(N, dtype=dtype)), N, N, Euclidean(), clipping)
    for _ in range(2):
        got = engine.clipped_sums(losses, spoil(x, ids), N, N, Euclidean(), clipping)
        assert got.bad == 1 and not bool(got.clipped[1])
        for name in want.sums:
            torch.testing.assert_close(got.sums[name], want.sums[name], rtol=1e-5, atol=1e-6)


def test_all_examples_bad_and_a_bad_example_alone():
    model, (x, ids) = mixture(torch.float32)
    engine = engine_of(model)
    losses = lambda x, i: model(x, i)  # noqa: E731
    for n in (N, 1):
        got = engine.clipped_sums(losses, (x[:n] * float("nan"), ids[:n]), n, n, Euclidean(), Clipping(1.0))
        assert got.bad == n and not got.sums


@pytest.mark.parametrize("kind", ["recurrent", "attention", "derived", "generic", "own rows", "conv transpose"])
def test_a_bad_example_in_every_kind_of_use(kind):
    model, body = {
        "recurrent": lambda: ((m := nn.LSTM(5, 4, batch_first=True)), lambda x: score(m(x)[0])),
        "attention": lambda: ((m := nn.MultiheadAttention(5, 1, batch_first=True)), lambda x: score(m(x, x, x)[0])),
        "derived": lambda: ((m := nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))), lambda x: score(m(x))),
        "generic": lambda: ((m := nn.Bilinear(5, 5, 3)), lambda x: score(m(x, x.tanh()))),
        "own rows": lambda: ((m := nn.Linear(4, 5)), lambda x: score(x * m.bias.exp().repeat(len(x), 4, 1))),
        "conv transpose": lambda: ((m := nn.ConvTranspose1d(4, 3, 2, stride=2)), lambda x: score(m(x))),
    }[kind]()
    model = model.double()
    if kind == "own rows":
        model.weight.requires_grad_(False)
    x = torch.randn(N, 4, 5, dtype=D)
    spoilt = x.clone()
    spoilt[1, 2, 3] = float("nan")
    good = torch.tensor([0, 2, 3])
    engine = engine_of(model)
    want = engine.clipped_sums(body, (x[good],), 3, 3, Euclidean(), Clipping(0.5))
    for _ in range(2):
        got = engine.clipped_sums(body, (spoilt,), N, N, Euclidean(), Clipping(0.5))
        assert got.bad == 1
        torch.testing.assert_close(got.sums, want.sums)


# -- what is left behind ------------------------------------------------------------------


def test_nothing_holds_activations_after_a_step():
    model, data = mixture(torch.float32)
    kept: list[weakref.ref] = []

    class Spy(nn.Module):
        def forward(self, x):
            kept.append(weakref.ref(x))
            y = x * 1.0
            kept.append(weakref.ref(y))
            return y

    model.drop = Spy()
    engine = engine_of(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            engine.clipped_sums(lambda x, i: model(x, i), data, N, N, Euclidean(), Clipping(1.0))
        assert kept and all(ref() is None for ref in kept)  # without the garbage collector's help
    finally:
        gc.enable()


def test_an_error_inside_losses_leaves_no_trace(compare):
    model, data = mixture()
    engine = engine_of(model)
    kept: list[weakref.ref] = []

    def fails(x, i):
        out = model(x, i)
        kept.append(weakref.ref(out))
        raise KeyError("the user's own")

    for _ in range(2):
        with pytest.raises(KeyError):
            engine.clipped_sums(fails, data, N, N, Euclidean(), Clipping(1.0))
    gc.collect()
    assert all(ref() is None for ref in kept)
    assert not torch.overrides._get_current_function_mode_stack()
    assert all(p.grad is None for p in model.parameters())
    compare(model, lambda x, i: model(x, i), data, N, engine=engine)


def test_a_model_can_be_pickled_after_a_step():
    model, data = mixture(torch.float32)
    engine_of(model).clipped_sums(lambda x, i: model(x, i), data, N, N, Euclidean(), Clipping(1.0))
    twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(*data), model(*data))


def test_gradients_of_the_user_stay_what_they_were():
    model, data = mixture(torch.float32)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for n in (N, 1):
        engine_of(model).clipped_sums(
            lambda x, i: model(x, i), tuple(t[:n] for t in data), n, n, Euclidean(), Clipping(1.0)
        )
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_probing_draws_no_random_numbers_of_its_own():
    """The first batch, which is probed, and a resumed run, which is not, see the same dropout."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    x = torch.randn(N, 5)
    losses = lambda x: score(model(x))  # noqa: E731
    first = engine_of(model)
    torch.manual_seed(3)
    one = first.clipped_sums(losses, (x,), N, N, Euclidean(), Clipping(1.0))
    after = torch.get_rng_state()
    resumed = engine_of(model)
    resumed.load_state_dict(first.state_dict())
    torch.manual_seed(3)
    two = resumed.clipped_sums(losses, (x,), N, N, Euclidean(), Clipping(1.0))
    assert all(torch.equal(one.sums[k], two.sums[k]) for k in one.sums)
    assert torch.equal(after, torch.get_rng_state())


def test_what_was_learnt_survives_json():
    import json

    model, data = mixture()
    first = engine_of(model)
    losses = lambda x, i: model(x, i)  # noqa: E731
    first.clipped_sums(losses, data, N, N, Euclidean(), Clipping(1.0))
    second = engine_of(model)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.recorder.layouts.known == first.recorder.layouts.known
    calls = []

    def counted(x, i):
        calls.append(1)
        return losses(x, i)

    second.clipped_sums(counted, data, N, N, Euclidean(), Clipping(1.0))
    assert len(calls) == 1


def test_a_verified_step_is_one_forward_and_asks_nothing_of_the_device(monkeypatch):
    """`bool(tensor)` waits for a GPU; a verified step may do so once, to count the bad examples."""
    model, data = mixture()
    engine = engine_of(model)
    losses = lambda x, i: model(x, i)  # noqa: E731
    engine.clipped_sums(losses, data, N, N, Euclidean(), Clipping(1.0))
    engine.watch_reached = False
    waits: list[str] = []
    for name in ("__bool__", "item", "__int__", "__float__", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, _o=original, _n=name: (waits.append(_n), _o(self))[1])
    engine.clipped_sums(losses, data, N, N, Euclidean(), Clipping(1.0))
    assert len(waits) <= 1
