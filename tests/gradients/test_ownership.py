"""Whose row is it? Sound or an error, never a silent wrong owner; and what mixes examples is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sordino.errors import PrivacyError, SordinoError, Unsupported
from sordino.geometry import Euclidean
from sordino.gradients.clipping import Clipping
from sordino.gradients.engine import Engine

D = torch.float64


def score(out: torch.Tensor) -> torch.Tensor:
    out = out.flatten(1)
    return (out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)).sum(1).tanh() + out.square().mean(1)


def engine_of(model):
    return Engine(model, {k: p for k, p in model.named_parameters() if p.requires_grad})


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(5, 5), nn.Linear(5, 3), nn.Parameter(torch.randn(5))

    def forward(self, x):  # (n, T, 5)
        return score((self.b(self.a(x.transpose(0, 1)).tanh() + self.p)).transpose(0, 1))


@pytest.mark.parametrize(
    "sizes", [((4, 6), (4, 4), (3, 3)), ((4, 4), (4, 6), (3, 3), (3, 4)), ((5, 1), (5, 5))], ids=str
)
def test_time_first_whatever_the_sizes(compare, sizes):
    """The length equals the number of examples first, later or never."""
    model = TimeFirst().double()
    engine = None
    for n, steps in sizes:
        x = torch.randn(n, steps, 5, dtype=D)
        engine = compare(model, lambda x: model(x), (x,), n, engine=engine, batches=("first", "again"))


class Windows(nn.Module):
    """(n·W, S, D), and (W·n, S, D)."""

    def __init__(self, slow):
        super().__init__()
        self.a, self.slow = nn.Linear(5, 5), slow

    def forward(self, x):  # (n, W, S, 5)
        n, w, s, d = x.shape
        if self.slow:
            return score(self.a(x.reshape(n * w, s, d)).reshape(n, w, s, d).tanh())
        h = self.a(x.transpose(0, 1).reshape(w * n, s, d)).tanh()
        return score(h.reshape(w, n, s, d).transpose(0, 1))


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("sizes", [((4, 1, 3), (4, 4, 4), (4, 2, 8)), ((3, 3, 3), (3, 1, 3), (2, 4, 2))], ids=str)
def test_windows_whatever_the_sizes(compare, slow, sizes):
    """With one window an example the fast and the slow order look alike; with several they do not."""
    model = Windows(slow).double()
    engine = None
    for n, w, s in sizes:
        x = torch.randn(n, w, s, 5, dtype=D)
        engine = compare(model, lambda x: model(x), (x,), n, engine=engine, batches=("first", "again"))


def test_windows_in_the_middle_are_refused():
    """(W, n, V) folded into one dimension: neither fast nor slow."""
    model = nn.Linear(5, 5).double()

    def losses(x):  # (n, 2, 3, 5)
        n = len(x)
        out = model(x.transpose(0, 1).reshape(2 * n * 3, 5)).reshape(2, n, 3, 5).transpose(0, 1)
        return score(out)

    with pytest.raises(PrivacyError, match="'weight,bias'.*own rows.*physical_batch_size=1"):
        engine_of(model).clipped_sums(losses, (torch.randn(4, 2, 3, 5, dtype=D),), 4, 4, Euclidean(), Clipping(1.0))


def ragged(model, how):
    """Padding is taken out before the layer, so that rows belong to examples by the data only."""

    def losses(x, lengths):
        n, steps = x.shape[:2]
        keep = torch.arange(steps)[None] < lengths[:, None]
        out = torch.zeros_like(x)
        if how == "mask":
            out[keep] = model(x[keep]).tanh()
        elif how == "nonzero":
            where = keep.flatten().nonzero().squeeze(1)
            flat = torch.zeros_like(x).flatten(0, 1)
            out = flat.index_copy(0, where, model(x.flatten(0, 1).index_select(0, where)).tanh()).reshape(x.shape)
        elif how == "lengths":
            sizes = lengths.tolist()
            packed = model(torch.cat([r[:k] for r, k in zip(x, sizes, strict=True)])).tanh().split(sizes)
            out = torch.stack([F.pad(r, (0, 0, 0, steps - len(r))) for r in packed])
        elif how == "one by one":
            packed = model(torch.cat([x[i, : lengths[i]] for i in range(n)])).tanh()
            rows, at = [], 0
            for i in range(n):
                k = int(lengths[i])
                rows.append(F.pad(packed[at : at + k], (0, 0, 0, steps - k)))
                at += k
            out = torch.stack(rows)
        return score(out)

    return losses


@pytest.mark.parametrize("how", ["mask", "nonzero", "lengths", "one by one"])
def test_ragged_rows_are_never_given_to_the_wrong_example(compare, how):
    """First all lengths are equal, later only their sum is a multiple of n: refused in that step."""
    model = nn.Linear(5, 5).double()
    losses = ragged(model, how)
    n, x = 4, torch.randn(4, 6, 5, dtype=D)
    engine = compare(model, losses, (x, torch.full((n,), 3)), n, batches=("first", "again"))
    for lengths in ([1, 5, 4, 2], [2, 2, 3, 1], [3, 3, 3, 2]):
        with pytest.raises(PrivacyError, match="own rows"):
            engine.clipped_sums(losses, (x, torch.tensor(lengths)), n, n, Euclidean(), Clipping(1.0))
    compare(model, losses, (x, torch.full((n,), 2)), n, engine=engine, batches=("first", "again"))


def test_data_that_arrives_packed_is_verified_in_every_batch(compare):
    """(total tokens, 5) and the example of each token: right or refused."""
    model = nn.Linear(5, 5).double()

    def losses(x, owner, n):
        return score(torch.zeros(int(n), 5, dtype=D).index_add(0, owner, model(x).tanh()))

    n, x = 4, torch.randn(8, 5, dtype=D)
    engine = engine_of(model)
    count = torch.tensor(n)

    def found(owner):
        return engine.clipped_sums(losses, (x, torch.tensor(owner), count), n, n, Euclidean(), Clipping(0.1))

    owner = [0, 0, 1, 1, 2, 2, 3, 3]
    for _ in range(2):
        got = found(owner)
    sums, norms = torch.zeros(5, 5, dtype=D), []
    for i in range(n):
        mine = torch.tensor(owner) == i
        g = torch.autograd.grad(losses(x[mine], torch.zeros(2, dtype=torch.long), 1).sum(), [*model.parameters()])
        norms.append(torch.cat([t.flatten() for t in g]).norm())
        sums += g[0] * min(1, 0.1 / float(norms[-1]))
    torch.testing.assert_close(got.norms, torch.stack(norms))
    torch.testing.assert_close(got.sums["weight"], sums)
    with pytest.raises(PrivacyError, match="own rows"):
        found([0, 0, 0, 1, 2, 2, 3, 3])


def test_what_was_read_once_does_not_slow_down_later_batches(compare):
    """With two examples, reading two lengths might be one each; with eight it is not."""
    model = nn.Linear(5, 3).double()
    calls = []

    def losses(x, lengths):
        calls.append(1)
        longest, shortest = int(lengths.max()), int(lengths.min())
        return score(model(x[:, :longest]).tanh()) + shortest

    engine = None
    for n in (8, 2, 8):
        x, lengths = torch.randn(n, 4, 5, dtype=D), torch.full((n,), 3)
        engine = engine or engine_of(model)
        engine.clipped_sums(losses, (x, lengths), n, n, Euclidean(), Clipping(1.0))
    calls.clear()
    engine.clipped_sums(losses, (x, lengths), n, n, Euclidean(), Clipping(1.0))
    assert len(calls) == 1


def test_nested_tensors_are_refused_by_name():
    model = nn.Linear(5, 3)

    def losses(x):
        nested = torch.nested.as_nested_tensor([row[: i + 1] for i, row in enumerate(x)])
        return model(nested).to_padded_tensor(0.0).flatten(1).sum(1)

    with pytest.raises(Unsupported, match="weight.*nested"):
        engine_of(model).clipped_sums(losses, (torch.randn(4, 4, 5),), 4, 4, Euclidean(), Clipping(1.0))


def test_examples_sorted_by_the_data_are_refused_when_they_move(compare):
    model = nn.Linear(5, 5).double()

    def losses(x, lengths):
        order = lengths.argsort(stable=True)
        out = model(x[order]).tanh()
        return score(out)[order.argsort()]

    n, x = 4, torch.randn(4, 5, dtype=D)
    engine = compare(model, losses, (x, torch.tensor([1, 2, 3, 4])), n, batches=("first", "again"))
    with pytest.raises(PrivacyError, match="own rows"):
        engine.clipped_sums(losses, (x, torch.tensor([2, 1, 4, 3])), n, n, Euclidean(), Clipping(1.0))


def test_last_token_by_length_is_an_ordinary_selection(compare):
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def losses(x, lengths):
        h = model[1](model[0](x))
        return score(model[2](h[torch.arange(len(x)), lengths]))

    n = 4
    compare(model, losses, (torch.randn(n, n, 5, dtype=D), torch.tensor([0, 1, 2, 3])), n)


def test_a_gradient_that_is_zero_almost_everywhere_is_not_read_one_way_for_good(compare):
    """n = T, time first, and example i looks at step i only: two readings fit until the lengths change."""
    model = nn.Linear(5, 3).double()

    def losses(x, at):  # (n, T, 5)
        out = model(x.transpose(0, 1)).tanh()
        return score(out[at, torch.arange(x.shape[0])])

    n = 4
    x = torch.randn(n, n, 5, dtype=D)
    engine = compare(model, losses, (x, torch.arange(n)), n, batches=("first", "again"))
    assert not engine.recorder.layouts.known
    compare(model, losses, (x, torch.tensor([3, 3, 0, 1])), n, engine=engine)


def test_an_example_that_is_alone_in_reaching_a_layer(compare):
    """The three examples probed first do not use the layer; the others do."""
    model = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 3)}).double()

    def losses(x, on):
        return score(model["a"](x)) + on[:, None].to(x.dtype).mul(
            model["b"](x.transpose(0, 1)).transpose(0, 1).sum(1)
        ).sum(1)

    n = 6
    x, on = torch.randn(n, n, 5, dtype=D), torch.tensor([0, 0, 1, 1, 0, 0])
    compare(model, losses, (x, on), n)


# -- mixing -------------------------------------------------------------------------------


def mixing():
    batch_norm = nn.BatchNorm1d(5)

    class Center(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    class Softmax(nn.Module):
        def forward(self, x):
            return x.softmax(0)

    class Roll(nn.Module):
        def forward(self, x):
            return x + 0.1 * x.roll(1, 0)

    class Contrast(nn.Module):
        def forward(self, x):
            return x @ x.T @ x

    class Functional(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, None, None, training=True)

    class Attention(nn.Module):
        """batch_first forgotten: the examples attend to each other."""

        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(5, 1)

        def forward(self, x):
            x = x[:, None]
            return self.inner(x, x, x)[0][:, 0]

    return {
        "x - x.mean(0)": Center(), "softmax over the batch": Softmax(), "roll": Roll(), "contrast": Contrast(),
        "functional batch norm": Functional(), "batch norm": batch_norm, "attention": Attention(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", mixing())
def test_mixing_behind_a_parameter_is_refused(kind):
    model = nn.Sequential(nn.Linear(5, 5), mixing()[kind], nn.Linear(5, 3))
    engine = engine_of(model)
    with pytest.raises(PrivacyError, match="batch_norm" if kind == "batch norm" else "own rows.*batch statistics"):
        engine.clipped_sums(lambda x: score(model(x)), (torch.randn(6, 5),), 6, 6, Euclidean(), Clipping(1.0))


def test_functional_batch_norm_in_training_mode_is_refused_with_trained_weights():
    model = nn.Sequential(nn.BatchNorm1d(5))
    with pytest.raises(PrivacyError, match="training mode mixes.*GroupNorm"):
        engine_of(model).clipped_sums(lambda x: score(model(x)), (torch.randn(6, 5),), 6, 6, Euclidean(), Clipping(1.0))


def test_a_shared_divisor_is_refused():
    """S6: a divisor that counts the other examples' tokens, here through a parameter's own output."""
    model = nn.Linear(5, 5)

    def losses(x):
        out = model(x)
        return out.square().sum(1) / out.square().sum()

    with pytest.raises(PrivacyError, match="own rows"):
        engine_of(model).clipped_sums(losses, (torch.randn(6, 5),), 6, 6, Euclidean(), Clipping(1.0))


def test_an_opaque_operation_that_mixes_raw_data_is_refused():
    """Invisible to gradients sent back, since no parameter lies before it; seen by running each example alone."""

    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.save_for_backward(x, p)
            return (x - x.mean(0)) * p

        @staticmethod
        def backward(ctx, g):
            x, p = ctx.saved_tensors
            return None, (g * (x - x.mean(0))).sum(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(5))

        def forward(self, x):
            return Mix.apply(x, self.p)

    model = nn.Sequential(Layer(), nn.Linear(5, 2))
    with pytest.raises(PrivacyError, match="module '0'.*other numbers alone"):
        engine_of(model).clipped_sums(lambda x: score(model(x)), (torch.randn(6, 5),), 6, 6, Euclidean(), Clipping(1.0))


def test_embedding_options_that_mix_are_refused():
    for options, words in (({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")):
        model = nn.Embedding(7, 3, **options)
        with pytest.raises(PrivacyError, match=words):
            ids = torch.randint(7, (4, 2))
            losses = lambda i, m=model: score(m(i))  # noqa: E731
            engine_of(model).clipped_sums(losses, (ids,), 4, 4, Euclidean(), Clipping(1.0))


# -- losses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda v: v.mean(), "scalar"),
        (lambda v: v[:, None], r"shape \(4, 1\)"),
        (lambda v: v[:3], r"shape \(3,\)"),
        (lambda v: v.detach(), "does not depend"),
        (lambda v: v.long(), "floating point|does not depend"),
        (lambda v: [float(x) for x in v], "list"),
        (lambda v: None, "NoneType"),
    ],
)
def test_s5_s6_losses_of_the_wrong_kind_are_refused(change, words):
    model = nn.Linear(5, 3)
    with pytest.raises(SordinoError, match=words) as error:
        engine_of(model).clipped_sums(
            lambda x: change(score(model(x))), (torch.randn(4, 5),), 4, 4, Euclidean(), Clipping(1.0)
        )
    assert "\n" not in str(error.value)


def test_s5_a_penalty_added_to_the_losses_is_part_of_every_example(compare):
    model = nn.Linear(5, 3).double()
    losses = lambda x: score(model(x)) + 0.1 * sum(p.square().sum() for p in model.parameters())  # noqa: E731
    compare(model, losses, (torch.randn(4, 5, dtype=D),), 4)


def test_losses_that_do_not_depend_on_the_batch_are_an_error():
    model = nn.Linear(5, 3)
    losses = lambda x: model.weight.square().sum().expand(4)  # noqa: E731
    with pytest.raises(SordinoError):
        engine_of(model).clipped_sums(losses, (torch.randn(4, 5),), 4, 4, Euclidean(), Clipping(1.0))


def test_losses_that_write_into_their_data_are_refused():
    model = nn.Linear(5, 3)

    def losses(x):
        x.mul_(2)
        return score(model(x))

    with pytest.raises(SordinoError, match="own data.*clone"):
        engine_of(model).clipped_sums(losses, (torch.randn(4, 5),), 4, 4, Euclidean(), Clipping(1.0))


def test_a_parameter_written_during_the_forward_is_refused():
    model = nn.Linear(5, 3)

    def losses(x):
        with torch.no_grad():
            pass
        model.bias.add_(x.sum(1)[0])
        return score(model(x))

    with pytest.raises((Unsupported, RuntimeError), match="writes into parameter 'bias'|leaf Variable"):
        engine_of(model).clipped_sums(losses, (torch.randn(4, 5),), 4, 4, Euclidean(), Clipping(1.0))


def test_derivatives_inside_losses(compare):
    """With respect to the data they are welcome (adversarial examples) and leave nothing behind."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def adversarial(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(score(model(x)).sum(), x)
        return score(model(x.detach() + 0.1 * g.sign()))

    compare(model, adversarial, (torch.randn(4, 5, dtype=D),), 4)


def test_second_derivatives_inside_losses_are_refused_but_for_single_examples():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def penalty(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(score(model(x)).sum(), x, create_graph=True)
        return score(model(x)) + g.square().sum(1)

    def own_gradient(x):
        value = score(model(x))
        g = torch.autograd.grad(value.sum(), list(model.parameters()), retain_graph=True)
        return value + g[0].square().sum()

    for losses, words in ((penalty, "create_graph"), (own_gradient, "'0.weight'")):
        engine = engine_of(model)
        x = torch.randn(4, 5, dtype=D)
        with pytest.raises(Unsupported, match=f"{words}.*physical_batch_size=1"):
            engine.clipped_sums(losses, (x,), 4, 4, Euclidean(), Clipping(1.0))
        engine.clipped_sums(losses, (x[:1],), 1, 1, Euclidean(), Clipping(1.0))


class Holder:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def to_pair(self):
        return self.x, self.y


class Mapping:
    """A mapping by convention, as the transformers library's BatchEncoding."""

    def __init__(self, **items):
        self.items_ = items

    def keys(self):
        return self.items_.keys()

    def __getitem__(self, key):
        return self.items_[key]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "mapping", "nested", "tensor", "object"])
def test_every_kind_of_batch(kind):
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(4, 5, dtype=D), torch.randint(3, (4,))

    def both(x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    data, losses = {
        "tuple": ((x, y), both),
        "list": ([x, y], both),
        "dict": ({"x": x, "y": y}, both),
        "mapping": (Mapping(x=x, y=y), both),
        "nested": (({"x": x}, [y]), lambda a, b: both(a["x"], b[0])),
        "tensor": (x, lambda x: both(x, y)),
        "object": (Holder(x, y), lambda h: both(*h.to_pair())),
    }[kind]
    got = engine_of(model).clipped_sums(losses, data, 4, 4, Euclidean(), Clipping(0.5))
    want = engine_of(model).clipped_sums(both, (x, y), 4, 4, Euclidean(), Clipping(0.5))
    torch.testing.assert_close(got.sums, want.sums)
