"""Every way in which a parameter can meet the batch: bare, shared, tied, derived, in place."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

D = torch.float64
N = 4


def score(out: torch.Tensor) -> torch.Tensor:
    out = out.flatten(1)
    return (out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)).sum(1).tanh() + out.square().mean(1)


class Bare(nn.Module):
    """A function of parameters and a batch that depends on an earlier parameter, and of one that does not."""

    def __init__(self, function, shapes, first):
        super().__init__()
        self.first = nn.Linear(5, 5) if first else None
        self.function = function
        self.p = nn.ParameterList(nn.Parameter(torch.rand(s) + 0.5) for s in shapes)

    def forward(self, x):
        if self.first is not None:
            x = self.first(x).tanh()
        return score(self.function(x, *self.p))


def written(x, f):
    y = x.clone()
    f(y)
    return y


BARE = {
    "x + p": (lambda x, p: x + p, [(5,)]),
    "p + x": (lambda x, p: p + x, [(3, 5)]),
    "x + p with a batch dimension of one": (lambda x, p: x + p, [(1, 3, 5)]),
    "x + p over positions": (lambda x, p: x + p, [(3, 1)]),
    "x + scalar": (lambda x, p: x + p, [()]),
    "x + p with alpha": (lambda x, p: torch.add(x, p, alpha=2.5), [(5,)]),
    "x * p": (lambda x, p: x * p, [(5,)]),
    "p * x": (lambda x, p: p * x, [(3, 1)]),
    "x * scalar": (lambda x, p: x * p, [()]),
    "x - p": (lambda x, p: x - p, [(5,)]),
    "p - x": (lambda x, p: p - x, [(3, 5)]),
    "torch.sub with alpha": (lambda x, p: torch.sub(x, p, alpha=2), [(5,)]),
    "x / p": (lambda x, p: x / p, [(5,)]),
    "p / x": (lambda x, p: p / (x.square() + 1), [(5,)]),
    "x ** p": (lambda x, p: (x.square() + 1) ** p, [(5,)]),
    "p ** x": (lambda x, p: p**x, [(5,)]),
    "x times a widened x": (lambda x, p: x[:, :, None] * p, [(4, 5)]),
    "p larger than x": (lambda x, p: x[:, None] + p, [(2, 3, 5)]),
    "minimum": (lambda x, p: torch.minimum(x, p), [(5,)]),
    "where": (lambda x, p: torch.where(x > 0, x, p), [(5,)]),
    "where, scalar": (lambda x, p: torch.where(x > 0, x, p), [()]),
    "lerp": (lambda x, p: torch.lerp(x, x.square(), p), [(5,)]),
    "addcmul": (lambda x, p, q: torch.addcmul(p, x, q), [(5,), (3, 5)]),
    "addcmul of three": (lambda x, p, q: torch.addcmul(x, p, q, value=0.5), [(5,), (3, 5)]),
    "baddbmm": (lambda x, p: torch.baddbmm(x @ x.mT, x, p.expand(len(x), -1, -1)), [(1, 5, 3)]),
    "cat with an expanded token": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), [(1, 2, 5)]),
    "cat with a repeated token": (lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1), [(1, 2, 5)]),
    "cat with a stacked token": (lambda x, p: torch.cat([torch.stack([p] * len(x)), x], 1), [(2, 5)]),
    "cat with a tiled token": (lambda x, p: torch.cat([torch.tile(p, (len(x), 1, 1)), x], 1), [(1, 2, 5)]),
    "cat with expand and unsqueeze": (lambda x, p: torch.cat([p[None].expand(len(x), -1, -1), x], 1), [(2, 5)]),
    "cat, p[None].repeat": (lambda x, p: torch.cat([p[None].repeat(len(x), 1, 1), x], 1), [(2, 5)]),
    "cat, expand and change": (lambda x, p: torch.cat([p.expand(len(x), -1, -1).exp() * 2, x], 1), [(1, 2, 5)]),
    "cat, repeat_interleave": (lambda x, p: torch.cat([p.repeat_interleave(len(x), 0), x], 1), [(1, 2, 5)]),
    "stack": (lambda x, p: torch.stack([x, p.expand_as(x)], 1), [(3, 5)]),
    "expanded, then added": (lambda x, p: x + p.expand(len(x), -1, -1), [(1, 3, 5)]),
    "repeated, then added": (lambda x, p: x + p.repeat(len(x), 1, 1), [(3, 5)]),
    "repeated over folded rows": (lambda x, p: x.flatten(0, 1) .add(p.repeat(len(x), 1)).reshape_as(x), [(3, 5)]),
    "repeated over folded rows, multiplied": (
        lambda x, p: (
            (x.transpose(0, 1).flatten(0, 1) * p.repeat_interleave(len(x), 0)).reshape(3, len(x), 5).transpose(0, 1)
        ),
        [(3, 5)],
    ),
    "time first and added": (lambda x, p: (x.transpose(0, 1) + p).transpose(0, 1), [(3, 1, 5)]),
    "time first, expanded": (
        lambda x, p: (x.transpose(0, 1) + p.expand(-1, len(x), -1)).transpose(0, 1),
        [(3, 1, 5)],
    ),
    "time first, cat of expanded": (
        lambda x, p: torch.cat([x.transpose(0, 1), p.expand(-1, len(x), -1)], -1).transpose(0, 1),
        [(3, 1, 5)],
    ),
    "x @ p": (lambda x, p: x @ p, [(5, 2)]),
    "x @ p.T": (lambda x, p: x @ p.T, [(2, 5)]),
    "x @ p.mT": (lambda x, p: x @ p.mT, [(2, 5)]),
    "x @ p.t()": (lambda x, p: x @ p.t(), [(2, 5)]),
    "x @ p.transpose": (lambda x, p: x @ p.transpose(0, 1), [(2, 5)]),
    "x @ vector": (lambda x, p: x @ p, [(5,)]),
    "p @ x": (lambda x, p: p @ x, [(2, 3)]),
    "torch.matmul with out features first": (lambda x, p: torch.matmul(p, x.mT), [(2, 5)]),
    "x @ batch of p": (lambda x, p: x[:, None] @ p, [(2, 5, 2)]),
    "bmm with expanded weights": (lambda x, p: torch.bmm(x, p.expand(len(x), -1, -1)), [(1, 5, 2)]),
    "bmm with repeated weights": (lambda x, p: torch.bmm(x, p.repeat(len(x), 1, 1)), [(5, 2)]),
    "addmm": (lambda x, p, q: torch.addmm(p, x.flatten(1), q), [(2,), (15, 2)]),
    "addmm with a matrix": (lambda x, p, q: torch.addmm(p, x.flatten(1), q), [(1, 2), (15, 2)]),
    "einsum": (lambda x, p: torch.einsum("ntd,de->nte", x, p), [(5, 2)]),
    "einsum over heads": (lambda x, p: torch.einsum("ntd,hde->nhte", x, p), [(2, 5, 3)]),
    "einsum with three": (lambda x, p, q: torch.einsum("ntd,de,ef->ntf", x, p, q), [(5, 2), (2, 3)]),
    "tensordot": (lambda x, p: torch.tensordot(x, p, dims=([2], [0])), [(5, 2)]),
    "inner": (lambda x, p: torch.inner(x, p), [(2, 5)]),
    "bilinear": (lambda x, p, q: F.bilinear(x, x.tanh(), p, q), [(2, 5, 5), (2,)]),
    "prelu": (lambda x, p: F.prelu(x, p), [(3,)]),
    "linear with a vector": (lambda x, p: F.linear(x, p), [(5,)]),
    "linear with computed weight": (lambda x, p, q: F.linear(x, p.exp(), q * 2), [(2, 5), (2,)]),
    "linear, batched bias": (lambda x, p: F.linear(x, p) + x[..., :2], [(2, 5)]),
    "conv with computed weight": (lambda x, p: F.conv1d(x, p / p.norm()), [(2, 3, 3)]),
    "x += p": (lambda x, p: written(x, lambda y: y.add_(p)), [(5,)]),
    "augmented": (lambda x, p: x.clone().__iadd__(p), [(5,)]),
    "x *= p": (lambda x, p: written(x, lambda y: y.mul_(p)), [(5,)]),
    "x[:, 0] = p": (lambda x, p: written(x, lambda y: y.__setitem__((slice(None), 0), p)), [(5,)]),
    "x[:, 0] += p": (lambda x, p: written(x, lambda y: y[:, 0].add_(p)), [(5,)]),
    "masked set": (lambda x, p: torch.where((x > 0.3)[..., :1], p, x), [(5,)]),
    "masked_fill by parameter": (lambda x, p: x.masked_fill(x > 0.1, 0.0) + p, [(5,)]),
    "buffer filled with both": (
        lambda x, p: written(
            torch.zeros(len(x), 4, 5, dtype=x.dtype),
            lambda y: (y.__setitem__((slice(None), 0), p), y.__setitem__((slice(None), slice(1, 4)), x)),
        ),
        [(5,)],
    ),
    "table by the data": (lambda x, p: p[(x[:, :, 0] > 0).long()] * x[..., :2], [(2, 2)]),
    "table by the data, last axis": (lambda x, p: p[:, (x[:, :, 0] > 0).long()].movedim(0, -1), [(2, 2)]),
    "table by two indices": (lambda x, p: p[(x[:, 0] > 0).long(), (x[:, 1] > 0).long()], [(2, 2)]),
    "index_select": (lambda x, p: p.index_select(0, (x[:, 0, 0] > 0).long()), [(2, 2)]),
    "gather": (lambda x, p: p.expand(len(x), -1).gather(1, (x[:, :, 0] > 0).long()), [(1, 2)]),
    "take": (lambda x, p: torch.take(p, (x[:, :, 0] > 0).long()), [(6,)]),
    "table of one row": (lambda x, p: x + p[None, :3], [(7, 5)]),
    "slice by shape": (lambda x, p: x + p[: x.shape[1]], [(7, 5)]),
    "batch norm, affine": (
        lambda x, p, q: F.batch_norm(x, torch.zeros(3).to(x), torch.ones(3).to(x), p, q), [(3,), (3,)]
    ),
    "layer norm, computed": (lambda x, p: F.layer_norm(x, (5,), 1 + p), [(5,)]),
    "cosine similarity": (lambda x, p: F.cosine_similarity(x, p, dim=-1), [(5,)]),
    "cdist": (lambda x, p: torch.cdist(x.tanh(), p), [(3, 5)]),
    "distance to prototypes": (lambda x, p: (x[:, :, None] - p).square().sum(-1), [(4, 5)]),
    "softmax of p": (lambda x, p: x * p.softmax(0), [(5,)]),
    "clamp by p": (lambda x, p: torch.clamp(x, max=p), [(5,)]),
    "attention with learned keys": (
        lambda x, p: F.scaled_dot_product_attention(x, p.expand(len(x), -1, -1), p.expand(len(x), -1, -1)),
        [(1, 4, 5)],
    ),
    "learned queries": (
        lambda x, p: F.scaled_dot_product_attention(p.expand(len(x), -1, -1), x, x),
        [(1, 4, 5)],
    ),
    "normal log density": (
        lambda x, p, q: -torch.distributions.Normal(p, q.exp(), validate_args=False).log_prob(x), [(5,), (5,)]
    ),
    "penalty on the weights": (lambda x, p: x * p + p.square().sum(), [(5,)]),
    "fourier": (lambda x, p: torch.fft.irfft(torch.fft.rfft(x, dim=1) * p, n=3, dim=1), [(2, 1)]),
    "grid of the parameter": (
        lambda x, p: F.grid_sample(p.expand(len(x), -1, -1, -1), x[:, None, :, :2].tanh(), align_corners=False),
        [(1, 2, 4, 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["of a parameter", "of the data"])
@pytest.mark.parametrize("case", BARE)
def test_bare_parameters(compare, case, first):
    function, shapes = BARE[case]
    model = Bare(function, shapes, first).to(D)
    x = torch.randn(N, 3, 5, dtype=D)
    compare(model, lambda x: model(x), (x,), N)


@pytest.mark.parametrize("case", ["x + p", "x * p", "x @ p", "einsum", "cat with an expanded token", "x[:, 0] = p"])
def test_bare_parameters_when_all_sizes_are_equal(compare, case):
    """n = T = D: no size tells which dimension is which."""
    function, shapes = BARE[case]
    model = Bare(function, shapes, True).to(D)
    x = torch.randn(5, 5, 5, dtype=D) if case != "x[:, 0] = p" else torch.randn(5, 5, 5, dtype=D)
    compare(model, lambda x: model(x), (x,), 5)


# -- several uses of one weight -----------------------------------------------------------


class Shared(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(7, 5, padding_idx=0)
        self.layer = nn.Linear(5, 5)
        self.conv = nn.Conv1d(5, 5, 1)
        if kind == "two names":
            self.other = self.layer
        if kind == "one weight":
            self.other = nn.Linear(5, 5)
            self.other.weight = self.layer.weight
        if kind == "tied head":
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        if self.kind == "called twice":
            h = self.layer(self.layer(h).tanh())
        elif self.kind == "called twice with different lengths":
            h = self.layer(h).tanh().sum(1) + self.layer(h.sum(1)).tanh()
        elif self.kind == "loop":
            for _ in range(4):
                h = h + self.layer(h).tanh()
        elif self.kind in ("two names", "one weight"):
            h = self.other(self.layer(h).tanh())
        elif self.kind == "tied head":
            h = self.head(h.tanh())
        elif self.kind == "tied, functional":
            h = F.linear(h.tanh(), self.embed.weight)
        elif self.kind == "tied, matmul":
            h = h.tanh() @ self.embed.weight.T
        elif self.kind == "tied, matmul and twice embedded":
            h = (h + self.embed(ids.flip(1))).tanh() @ self.embed.weight.T
        elif self.kind == "tied, scaled":
            h = h.tanh() @ (self.embed.weight * 0.5).T
        elif self.kind == "conv and linear":
            h = self.layer(h).tanh() + F.conv1d(h.mT, self.layer.weight[:, :, None]).mT
        elif self.kind == "weight transposed":
            h = F.linear(self.layer(h).tanh(), self.layer.weight.T)
        elif self.kind == "regularised":
            h = self.layer(h) + self.layer.weight.square().sum()
        return score(h)


SHARED = [
    "called twice", "called twice with different lengths", "loop", "two names", "one weight", "tied head",
    "tied, functional", "tied, matmul", "tied, matmul and twice embedded", "tied, scaled", "conv and linear",
    "weight transposed", "regularised",
]  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("shape", [(N, 3), (N, N)])
def test_shared_weights(compare, kind, shape):
    """S3, S4: tied and functionally re-used weights contributed 129 and 73 clip norms elsewhere."""
    model = Shared(kind).double()
    for p in model.parameters():
        p.requires_grad_(False)
    used = {"tied": model.embed, "conv": model.layer}.get(kind.partition(",")[0].split()[0], model.layer)
    used.requires_grad_(True)
    model.embed.requires_grad_(True)
    ids = torch.randint(7, shape)
    ids[0] = 0
    compare(model, lambda ids: model(ids), (ids,), N)


def test_s3_s4_a_tied_weight_never_exceeds_the_bound():
    """One example, all clipped to 1e-3, with its neighbours removed: the sum moves by no more than that."""
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    for kind in ("tied head", "tied, functional", "tied, matmul"):
        model = Shared(kind)
        model.conv.requires_grad_(False)
        model.layer.requires_grad_(False)
        engine = Engine(model, {k: p for k, p in model.named_parameters() if p.requires_grad})
        ids = torch.randint(1, 7, (8, 5))
        losses = lambda ids, m=model: 1000 * m(ids)  # noqa: E731
        found = [engine.clipped_sums(losses, (ids[:m],), m, m, Euclidean(), Clipping(1e-3)).sums for m in (8, 7)]
        moved = sum(float((found[0][k] - found[1][k]).double().square().sum()) for k in found[0]) ** 0.5
        assert moved <= 1e-3 * (1 + 1e-4)


class Own(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight.abs()) + x @ self.weight.T * 0.1 + self.bias.exp()


def test_subclass_with_its_own_forward(compare):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Own(4, 3)).double()
    compare(model, lambda x: score(model(x)), (torch.randn(N, 2, 5, dtype=D),), N)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


@pytest.mark.parametrize("kind", ["weight_norm", "old weight_norm", "symmetric", "orthogonal", "conv", "gain"])
def test_parametrizations(compare, kind):
    layer: nn.Module = nn.Linear(5, 5)
    if kind == "weight_norm":
        layer = parametrizations.weight_norm(layer)
    elif kind == "old weight_norm":
        with pytest.warns(FutureWarning):
            layer = nn.utils.weight_norm(layer)
    elif kind == "symmetric":
        parametrize.register_parametrization(layer, "weight", Symmetric())
    elif kind == "orthogonal":
        layer = parametrizations.orthogonal(layer, orthogonal_map="cayley")
    elif kind == "conv":
        layer = nn.Sequential(parametrizations.weight_norm(nn.Conv1d(3, 4, 2)))
    elif kind == "gain":

        class Gain(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = nn.Parameter(torch.rand(5, 1))

            def forward(self, w):
                return w * self.gain

        parametrize.register_parametrization(layer, "weight", Gain())
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), layer).double()
    compare(model, lambda x: score(model(x)), (torch.randn(N, 3, 5, dtype=D),), N, tol=1e-8)


def test_functional_call(compare):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def losses(x):
        scaled = {k: p * 1.5 if k.endswith("weight") else p for k, p in model.named_parameters()}
        return score(torch.func.functional_call(model, scaled, (x,)))

    compare(model, losses, (torch.randn(N, 2, 5, dtype=D),), N)


def test_frozen_parameters_cost_nothing(compare):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    for p in model[:3].parameters():
        p.requires_grad_(False)
    engine = compare(model, lambda x: score(model(x)), (torch.randn(N, 5, dtype=D),), N)
    assert {name for key in engine.recorder.layouts.known for name in key[0][1].split(",")} == {"3.weight", "3.bias"}


def test_module_lists_and_many_layers(compare):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
            self.norms = nn.ModuleDict({str(i): nn.LayerNorm(5) for i in range(6)})

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = x + F.relu(layer(self.norms[str(i)](x)), inplace=True)
            return score(x)

    model = Deep().double()
    compare(model, lambda x: model(x), (torch.randn(N, 3, 5, dtype=D),), N)


def test_unused_and_unreached_parameters_get_zero(compare):
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(5, 3), "dead": nn.Linear(5, 3)}).double()

    def losses(x):
        return score(model["used"](x) + 0 * model["dead"](x)) + 0 * model["dead"](x.detach()).detach().sum(1)

    engine = compare(model, losses, (torch.randn(N, 5, dtype=D),), N)
    assert engine.reached["used.weight"] is True
    assert engine.reached["dead.weight"] is False
    assert engine.reached["unused.weight"] is None


# -- what the recorder cannot see ---------------------------------------------------------


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s + x * s * (1 - s))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum_to_size(p.shape)


class Scaled(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.p = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return Scale.apply(x, self.p)


def test_a_custom_function_without_parameters(compare):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return score(self.b(Swish.apply(self.a(x))))

    model = Net().double()
    engine = compare(model, lambda x: model(x), (torch.randn(N, 5, dtype=D),), N)
    assert engine.opaque == []


@pytest.mark.parametrize("shape", [(N, 5), (N, N, 5)])
def test_a_custom_function_with_a_parameter(compare, shape):
    model = nn.Sequential(nn.Linear(5, 5), Scaled(), nn.Linear(5, 3)).double()
    engine = compare(model, lambda x: score(model(x)), (torch.randn(*shape, dtype=D),), N)
    assert engine.opaque == ["1"]


def test_a_custom_function_on_the_weight(compare):
    """A straight-through quantiser, say: the smallest module around the weight is one operation."""

    class Quantised(nn.Linear):
        def forward(self, x):
            return F.linear(x, Scale.apply(self.weight, torch.full((1,), 1.3, dtype=x.dtype)), self.bias)

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Quantised(5, 3)).double()
    engine = compare(model, lambda x: score(model(x)), (torch.randn(N, 2, 5, dtype=D),), N)
    assert engine.opaque == ["2"]


def test_a_custom_function_used_by_the_parent(compare):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x):
            return Scale.apply(x, self.inner.bias)

    model = nn.Sequential(nn.Linear(5, 5), Parent()).double()
    model[1].inner.weight.requires_grad_(False)
    engine = compare(model, lambda x: score(model(x)), (torch.randn(N, 5, dtype=D),), N)
    assert engine.opaque == ["1"]


def test_a_custom_function_at_the_top_of_the_model(compare):
    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.p = nn.Linear(5, 5), nn.Parameter(torch.rand(5))

        def forward(self, x):
            return Scale.apply(self.layer(x), self.p)

    model = Top().double()
    engine = compare(model, lambda x: score(model(x)), (torch.randn(N, 5, dtype=D),), N)
    assert engine.opaque == [""]


def test_a_custom_function_outside_the_model_is_an_error_that_names_the_parameter():
    from sordino.errors import Unsupported
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    model = nn.Linear(5, 5)
    engine = Engine(model, dict(model.named_parameters()))
    x = torch.randn(N, 5)

    def losses(x):
        return score(Scale.apply(model(x), model.bias))

    with pytest.raises(Unsupported, match="'bias'.*physical_batch_size=1"):
        engine.clipped_sums(losses, (x,), N, N, Euclidean(), Clipping(1.0))
    assert model.bias.grad is None and "forward" not in model.__dict__
    # a batch of one always works
    engine.clipped_sums(losses, (x[:1],), 1, 1, Euclidean(), Clipping(1.0))


def test_opaque_modules_leave_nothing_behind(compare):
    model = nn.Sequential(nn.Linear(5, 5), Scaled()).double()
    calls = []
    original = model[1].forward
    model[1].forward = lambda x: (calls.append(1), original(x))[1]  # as accelerate's hooks do
    kept = model[1].__dict__["forward"]
    x = torch.randn(N, 5, dtype=D)
    engine = compare(model, lambda x: score(model(x)), (x,), N)
    assert engine.opaque == ["1"] and calls
    assert model[1].__dict__["forward"] is kept
    fail = True

    def losses(x):
        out = model(x)
        if fail:
            raise KeyError("an error of the user's own")
        return score(out)

    with pytest.raises(KeyError):
        compare(model, losses, (x,), N, engine=engine)
    assert model[1].__dict__["forward"] is kept
    fail = False
    compare(model, losses, (x,), N, engine=engine)


def test_a_model_is_the_same_after_a_step(compare):
    model = nn.Sequential(nn.Linear(5, 5), Scaled(), nn.Linear(5, 3)).double()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    vars_before = {name: set(vars(m)) for name, m in model.named_modules()}
    compare(model, lambda x: score(model(x)), (torch.randn(N, 5, dtype=D),), N)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == vars_before
    assert all(not p.__dict__ and p.grad is None for p in model.parameters())
    twin = copy.deepcopy(model)
    for k, v in twin.state_dict().items():
        assert torch.equal(v, state[k])


def test_vmap_inside_losses_is_an_error_that_names_the_parameter():
    from sordino.errors import Unsupported
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    model = nn.Linear(5, 1)
    engine = Engine(model, dict(model.named_parameters()))

    def losses(x):
        return torch.func.vmap(lambda row: model(row).sum())(x)

    with pytest.raises(Unsupported, match="weight.*vmap"):
        engine.clipped_sums(losses, (torch.randn(N, 5),), N, N, Euclidean(), Clipping(1.0))


def test_complex_parameters_are_refused_and_their_parts_work(compare):
    from sordino.errors import Unsupported
    from sordino.gradients.engine import Engine

    p = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    with pytest.raises(Unsupported, match="complex.*view_as_complex"):
        Engine(nn.Module(), {"p": p})

    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.p = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            spectrum = torch.fft.rfft(self.first(x)) * torch.view_as_complex(self.p)
            return score(torch.fft.irfft(spectrum, n=6))

    model = Filter().double()
    compare(model, lambda x: model(x), (torch.randn(N, 6, dtype=D),), N)


def test_rows_taken_out_of_the_batch_one_by_one_are_refused():
    """A use that only one example makes has no batch dimension."""
    from sordino.errors import PrivacyError
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    model = nn.Linear(5, 1)
    engine = Engine(model, dict(model.named_parameters()))
    with pytest.raises(PrivacyError, match="weight.*own rows.*physical_batch_size=1"):
        losses = lambda x: torch.stack([model(row).sum() for row in x])  # noqa: E731
        engine.clipped_sums(losses, (torch.randn(N, 5),), N, N, Euclidean(), Clipping(1.0))
