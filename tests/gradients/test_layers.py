"""Layer rules over case tables, against micro-batches of one."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sordino.gradients.rules import norms

D = torch.float64
CHECK_DTYPES = [(torch.float64, 1e-9), (torch.float32, 2e-4)]


class Net(nn.Module):
    """A layer between two trained maps, so that gradients flow through it both ways."""

    def __init__(self, layer: nn.Module, width: int, before: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(width, width) if before else nn.Identity()
        self.layer = layer

    def forward(self, x):
        out = self.layer(self.before(x))
        return out.flatten(1).tanh().square().sum(1) + out.flatten(1).sum(1) * 0.3


def score(out: torch.Tensor) -> torch.Tensor:
    out = out.flatten(1)
    return (out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)).sum(1).tanh() + out.square().mean(1)


def check(compare, layer, shape, n=4, dtype=D, tol=1e-9, before=True):
    model = Net(layer, shape[-1], before).to(dtype)
    x = torch.randn(n, *shape, dtype=dtype)
    return compare(model, lambda x: model(x), (x,), n, tol=tol)


# -- Linear -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype,tol", CHECK_DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 5), (2, 3, 5), (2, 1, 3, 5), (1, 5), (7, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(compare, shape, bias, dtype, tol):
    check(compare, nn.Linear(shape[-1], 6, bias=bias), shape, dtype=dtype, tol=tol)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_linear_with_a_frozen_half(compare, frozen):
    layer = nn.Linear(5, 3)
    getattr(layer, frozen).requires_grad_(False)
    check(compare, layer, (3, 5))


def test_linear_wide_and_long(compare):
    check(compare, nn.Linear(30, 40), (2, 30))  # Gram
    check(compare, nn.Linear(3, 4), (50, 3))  # materialised


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_small_batches(compare, n):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)).double()
    x = torch.randn(n, 4, dtype=D)
    compare(model, lambda x: score(model(x)), (x,), n)


# -- Convolutions -------------------------------------------------------------------------

SPACE = {1: (9,), 2: (7, 6), 3: (5, 4, 5)}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_T = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class ConvNet(nn.Module):
    def __init__(self, layer, channels):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(1, channels, *[1] * (len(layer.weight.shape) - 2)) + 0.5)
        self.layer = layer

    def forward(self, x):
        return score(self.layer((x * self.mix).tanh()))


CASES = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": 2, "stride": 2},
    {"dilation": 2, "padding": 2},
    {"groups": 2},
    {"groups": 4},
    {"groups": 2, "stride": 2, "padding": 1, "dilation": 2},
    {"bias": False},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 2, "padding": 1, "stride": 3},
    {"padding": "same"},
    {"padding": "valid"},
    {"padding": "same", "kernel_size": 2},
    {"padding": "same", "kernel_size": 4, "dilation": 1},
    {"padding": "same", "kernel_size": 2, "dilation": 3},
    *({"padding": 1, "padding_mode": mode, "stride": 2} for mode in ("circular", "reflect", "replicate")),
    *({"padding": "same", "padding_mode": mode, "kernel_size": 2} for mode in ("circular", "reflect", "replicate")),
]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv(compare, dims, case):
    options = {"kernel_size": 3, **case}
    model = ConvNet(CONV[dims](4, 8, **options), 4).to(D)
    x = torch.randn(3, 4, *SPACE[dims], dtype=D)
    compare(model, lambda x: model(x), (x,), 3)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-3)])
def test_conv_in_single_precision(compare, dims, dtype, tol):
    model = ConvNet(CONV[dims](4, 8, 3, padding=1), 4).to(dtype)
    compare(model, lambda x: model(x), (torch.randn(3, 4, *SPACE[dims], dtype=dtype),), 3, tol=tol)


def test_conv_with_unequal_sides(compare):
    layer = nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=2)
    model = ConvNet(layer, 4).double()
    compare(model, lambda x: model(x), (torch.randn(3, 4, 7, 6, dtype=D),), 3)


def test_conv_deep_and_small_is_measured_by_gram(compare):
    model = ConvNet(nn.Conv2d(32, 32, 3, padding=1), 32).double()
    compare(model, lambda x: model(x), (torch.randn(3, 32, 2, 2, dtype=D),), 3)
    model = ConvNet(nn.Conv2d(32, 64, 3, padding=1, groups=2), 32).double()
    compare(model, lambda x: model(x), (torch.randn(3, 32, 2, 2, dtype=D),), 3)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_conv_with_a_frozen_half(compare, frozen):
    layer = nn.Conv2d(4, 4, 3)
    getattr(layer, frozen).requires_grad_(False)
    model = ConvNet(layer, 4).double()
    compare(model, lambda x: model(x), (torch.randn(3, 4, 5, 5, dtype=D),), 3)


CASES_T = [
    {},
    {"stride": 2},
    {"stride": 2, "output_padding": 1},
    {"stride": 3, "padding": 1, "output_padding": 2},
    {"padding": 1},
    {"dilation": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2},
    {"bias": False},
    {"kernel_size": 1},
    {"kernel_size": 2, "stride": 2},
    {"dilation": 2, "output_padding": 1, "padding": 2, "groups": 2},
]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", CASES_T, ids=str)
def test_conv_transpose(compare, dims, case):
    options = {"kernel_size": 3, **case}
    model = ConvNet(CONV_T[dims](4, 8, **options), 4).to(D)
    x = torch.randn(3, 4, *(max(s // 2, 2) for s in SPACE[dims]), dtype=D)
    compare(model, lambda x: model(x), (x,), 3)


def test_conv_transpose_with_output_size(compare):
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 5, 3, stride=2, padding=1)

        def forward(self, x):
            return score(self.up(x, output_size=(8, 7)))

    model = Up().double()
    compare(model, lambda x: model(x), (torch.randn(3, 3, 4, 4, dtype=D),), 3)


def test_conv_over_frames_folded_into_the_batch(compare):
    """(n·T, C, H, W): an example owns T consecutive images; and the other way round."""

    class Frames(nn.Module):
        def __init__(self, fast):
            super().__init__()
            self.conv, self.fast = nn.Conv2d(3, 4, 3), fast

        def forward(self, x):
            n, t = x.shape[:2]
            if self.fast:
                x = x.transpose(0, 1)
            out = self.conv(x.reshape(n * t, *x.shape[2:]))
            out = out.reshape(t, n, -1).transpose(0, 1) if self.fast else out.reshape(n, t, -1)
            return score(out)

    for fast in (False, True):
        model = Frames(fast).double()
        compare(model, lambda x, m=model: m(x), (torch.randn(4, 4, 3, 5, 5, dtype=D),), 4)


# -- Embeddings ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (3,)])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -1}, {"sparse": True}], ids=str)
def test_embedding(compare, shape, options):
    model = nn.Embedding(7, 3, **options).double()
    ids = torch.randint(7, (4, *shape))
    ids[0] = 0
    ids[1] = 6
    compare(model, lambda ids: score(model(ids).reshape(len(ids), -1)), (ids,), 4)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embedding_bag(compare, mode, padding_idx):
    model = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding_idx).double()
    ids = torch.randint(7, (4, 5))
    compare(model, lambda ids: score(model(ids)), (ids,), 4)


def test_embedding_bag_with_weights(compare):
    model = nn.EmbeddingBag(7, 3, mode="sum").double()
    ids, w = torch.randint(7, (4, 5)), torch.rand(4, 5, dtype=D)
    compare(model, lambda ids, w: score(model(ids, per_sample_weights=w)), (ids, w), 4)


# -- Normalisation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer,shape",
    [
        (lambda: nn.LayerNorm(6), (6,)),
        (lambda: nn.LayerNorm(6), (3, 6)),
        (lambda: nn.LayerNorm(6), (2, 4, 6)),
        (lambda: nn.LayerNorm((3, 6)), (3, 6)),
        (lambda: nn.LayerNorm((3, 6)), (4, 3, 6)),
        (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
        (lambda: nn.LayerNorm(6, elementwise_affine=False), (3, 6)),
        (lambda: nn.RMSNorm(6), (3, 6)),
        (lambda: nn.RMSNorm((3, 6)), (3, 6)),
        (lambda: nn.RMSNorm(6, elementwise_affine=False), (3, 6)),
        (lambda: nn.GroupNorm(2, 4), (4, 6)),
        (lambda: nn.GroupNorm(4, 4), (4, 5, 6)),
        (lambda: nn.GroupNorm(1, 4), (4, 2, 3, 6)),
        (lambda: nn.GroupNorm(2, 6), (6,)),
        (lambda: nn.GroupNorm(2, 4, affine=False), (4, 6)),
        (lambda: nn.InstanceNorm1d(4, affine=True), (4, 6)),
        (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 6)),
        (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 5, 6)),
        (lambda: nn.InstanceNorm2d(4), (4, 5, 6)),
        (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), (4, 6)),
        (lambda: nn.BatchNorm1d(6).eval(), (6,)),
        (lambda: nn.BatchNorm1d(4).eval(), (4, 6)),
        (lambda: nn.BatchNorm2d(4).eval(), (4, 5, 6)),
        (lambda: nn.BatchNorm3d(4).eval(), (4, 2, 5, 6)),
        (lambda: nn.PReLU(), (4, 6)),
        (lambda: nn.PReLU(4), (4, 6)),
        (lambda: nn.LocalResponseNorm(2), (4, 6)),
    ],
)
@pytest.mark.parametrize("dtype,tol", CHECK_DTYPES)
def test_normalisation(compare, layer, shape, dtype, tol):
    layer = layer()
    for t in layer.state_dict().values():
        if t.is_floating_point():
            t.uniform_(0.5, 1.5)
    check(compare, layer, shape, dtype=dtype, tol=tol if dtype == D else 2e-3)


def test_group_norm_of_more_groups_than_a_grid_takes(compare, monkeypatch):
    monkeypatch.setattr(norms, "largest_grid", lambda g: 5)
    check(compare, nn.GroupNorm(2, 4), (4, 6))
    check(compare, nn.GroupNorm(2, 4), (4, 6), before=False)


def test_rms_norm_written_out(compare):
    class Rms(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * x.to(x.dtype)

    check(compare, Rms(), (3, 6))


# -- Attention ----------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self, options, call):
        super().__init__()
        self.attention, self.call = nn.MultiheadAttention(8, 2, **options), call

    def forward(self, q, k, v, padding):
        first = self.attention.batch_first
        if not first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        length, source = (q.shape[1], k.shape[1]) if first else (q.shape[0], k.shape[0])
        call = dict(self.call)
        mask = call.pop("mask", None)
        if mask == "bool":
            call["attn_mask"] = torch.ones(length, source, dtype=torch.bool).triu(1)
        elif mask == "float":
            call["attn_mask"] = torch.linspace(-1, 1, length * source, dtype=q.dtype).reshape(length, source)
        elif mask == "heads":
            n = q.shape[0] if first else q.shape[1]
            call["attn_mask"] = torch.ones(length, source, dtype=torch.bool).triu(1).repeat(2 * n, 1, 1)
        if call.pop("padding", False):
            call["key_padding_mask"] = padding
        out, weights = self.attention(q, k, v, **call)
        out = score(out if first else out.transpose(0, 1))
        return out if weights is None else out + weights.square().flatten(1).sum(1)


MHA = [
    ({}, {}),
    ({}, {"need_weights": False}),
    ({}, {"average_attn_weights": False}),
    ({"bias": False}, {}),
    ({"kdim": 5, "vdim": 3}, {}),
    ({"kdim": 5, "vdim": 3}, {"need_weights": False}),
    ({"add_bias_kv": True}, {}),
    ({"add_bias_kv": True, "add_zero_attn": True}, {"padding": True, "mask": "bool"}),
    ({"add_zero_attn": True}, {"mask": "float"}),
    ({}, {"padding": True}),
    ({}, {"padding": True, "need_weights": False}),
    ({}, {"mask": "bool"}),
    ({}, {"mask": "float", "padding": True}),
    ({}, {"mask": "bool", "need_weights": False}),
    ({}, {"mask": "heads"}),
]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("options,call", MHA, ids=str)
def test_multihead_attention(compare, options, call, kind, batch_first):
    if kind == "self" and "kdim" in options:
        pytest.skip("self attention has one width")
    model = Attend({**options, "batch_first": batch_first}, call).double()
    n = 4
    q = torch.randn(n, 4, 8, dtype=D)  # as many positions as examples
    k = torch.randn(n, 5, options.get("kdim", 8), dtype=D)
    v = torch.randn(n, 5, options.get("vdim", 8), dtype=D)
    padding = torch.zeros(n, 5, dtype=torch.bool)
    padding[1, 3:] = True
    if kind == "self":
        compare(model, lambda x, p: model(x, x, x, p[:, :4]), (q, padding), n)
    else:
        compare(model, lambda q, k, v, p: model(q, k, v, p), (q, k, v, padding), n)


def test_attention_is_torchs_own(compare):
    """The written-out form gives the same forward, whatever the options."""
    from sordino.gradients.rules.attention import multi_head_attention_forward

    original = F.multi_head_attention_forward
    for (options, call), first in itertools.product(MHA, (True, False)):
        if "kdim" in options:
            continue
        model = Attend({**options, "batch_first": first}, call).double()
        x, p = torch.randn(3, 5, 8, dtype=D), torch.zeros(3, 5, dtype=torch.bool)
        p[1, 3:] = True
        want = model(x, x, x, p)
        try:
            F.multi_head_attention_forward = multi_head_attention_forward
            got = model(x, x, x, p)
        finally:
            F.multi_head_attention_forward = original
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_and_decoder(compare, norm_first, batch_first):
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}

    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 12, **options)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
            layer = nn.TransformerDecoderLayer(8, 2, 12, activation="gelu", **options)
            self.decoder = nn.TransformerDecoder(layer, 1)

        def forward(self, x, y):
            if not batch_first:
                x, y = x.transpose(0, 1), y.transpose(0, 1)
            t = y.shape[1 if batch_first else 0]
            mask = nn.Transformer.generate_square_subsequent_mask(t).to(x.dtype)
            out = self.decoder(y, self.encoder(x), tgt_mask=mask, tgt_is_causal=True)
            return score(out if batch_first else out.transpose(0, 1))

    model = Translate().double()
    compare(model, lambda x, y: model(x, y), (torch.randn(4, 4, 8, dtype=D), torch.randn(4, 3, 8, dtype=D)), 4)


def test_transformer_encoder_in_eval_mode_with_padding(compare):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[2, 3:] = True
    x = torch.randn(4, 5, 8, dtype=D)

    def losses(x, padding):
        return score(model(x, src_key_padding_mask=padding)[:, :3])

    compare(model, losses, (x, padding), 4)


# -- Recurrent ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize(
    "cls,options",
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 2, "bidirectional": True, "bias": False}),
        (nn.LSTM, {"bias": False}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
        (nn.RNN, {"bidirectional": True, "bias": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("initial", [False, True])
def test_recurrent(compare, cls, options, batch_first, steps, initial):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cls(3, 4, batch_first=batch_first, **options)
            layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
            self.start = nn.Parameter(torch.randn(layers, 1, options.get("proj_size") or 4)) if initial else None
            self.cell = nn.Parameter(torch.randn(layers, 1, 4)) if initial and cls is nn.LSTM else None

        def forward(self, x):
            if not batch_first:
                x = x.transpose(0, 1)
            state = None
            if self.start is not None:
                n = x.shape[0 if batch_first else 1]
                state = self.start.expand(-1, n, -1).contiguous()
                if self.cell is not None:
                    state = (state, self.cell.expand(-1, n, -1).contiguous())
            out, last = self.rnn(x, state)
            if not batch_first:
                out = out.transpose(0, 1)
            last = last if isinstance(last, tuple) else (last,)
            return score(out) + sum(score(s.transpose(0, 1)) for s in last)

    model = Sequence().double()
    compare(model, lambda x: model(x), (torch.randn(4, steps, 3, dtype=D),), 4)


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cells(compare, cls, bias):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cls(3, 4, bias=bias)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return score(state[0] if isinstance(state, tuple) else state)

    model = Loop().double()
    compare(model, lambda x: model(x), (torch.randn(4, 3, 3, dtype=D),), 4)


def test_a_packed_sequence_is_refused_by_name():
    from sordino.errors import Unsupported
    from sordino.geometry import Euclidean
    from sordino.gradients.clipping import Clipping
    from sordino.gradients.engine import Engine

    model = nn.GRU(3, 4, batch_first=True)

    def losses(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 3, 2], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        return out.flatten(1).sum(1)

    engine = Engine(model, dict(model.named_parameters()))
    with pytest.raises(Unsupported, match="packed"):
        engine.clipped_sums(losses, (torch.randn(3, 3, 3),), 3, 3, Euclidean(), Clipping(1.0))
