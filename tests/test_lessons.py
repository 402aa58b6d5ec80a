"""What other libraries got wrong, one test a row: how far one example can reach, and what leaks beside the gradient.

Each case builds the situation in which the advertised sensitivity was exceeded, and measures, by taking each example
out of the batch, how far the sum moves; or shows that the situation is refused by name.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, grads, make, mlp, norm, points, sgd, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import PrivacyError, SordinoError
from sordino.passes import clipped_sums

BOUND = 0.5
NOISY = {"noise_multiplier": 1.0, "delta": 1e-6}


def reach(model: nn.Module, losses: Callable[[nn.Module], Callable], data: TensorDataset, **options) -> float:
    """The largest distance, in clip bounds, that taking out one example moves the clipped sum."""
    n = len(data)

    def run(keep: list[int]) -> dict[str, Tensor]:
        twin = copy.deepcopy(model)
        part = TensorDataset(*(t[keep] for t in data.tensors))
        chosen = {"clip_norm": BOUND, "batch_size": n, "examples": n, **options}
        return {k: n * g.float() for k, g in step(make(twin, part, **chosen), losses(twin)).items()}

    whole = run(list(range(n)))
    parts = (run([j for j in range(n) if j != i]) for i in range(n))
    return max(norm({k: whole[k] - part[k] for k in whole}) for part in parts) / BOUND


# -- how far one example reaches ---------------------------------------------------------------------------


def test_s1_s2_a_scheduler_cannot_change_the_clip_bound() -> None:
    """Neither the one that clips nor the one that scales the noise: there is one, and it is read-only."""
    model = mlp()
    private = make(model, clip_norm=BOUND, **NOISY)
    for change in (
        lambda: setattr(private, "clipping", sordino.Clipping(10 * BOUND)),
        lambda: setattr(private.clipping, "bound", 10 * BOUND),
        lambda: setattr(private.plan, "noise_multiplier", 0.1),
        lambda: setattr(private.plan.schedule, "batch_size", 1),
    ):
        with pytest.raises(AttributeError):
            change()
    assert private.guarantee().clip_norm == BOUND


class Tied(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.how = how
        if how == "tied":
            self.out.weight = self.table.weight
        if how == "functional":
            del self.out

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens).tanh()
        if self.how == "twice":
            h = self.out.weight.T @ self.out(h).transpose(1, 2)
            return self.out(h.transpose(1, 2))
        return F.linear(h, self.table.weight) if self.how == "functional" else self.out(h)


@pytest.mark.parametrize("how", ["tied", "functional", "twice"])
@pytest.mark.parametrize("physical", [None, 3])
def test_s3_s4_weights_used_several_times_stay_within_the_bound(how: str, physical: int | None) -> None:
    torch.manual_seed(0)
    model = Tied(how)
    tokens = torch.randint(0, 11, (7, 5))

    def losses(m: nn.Module) -> Callable:
        return lambda x: 30 * F.cross_entropy(m(x).transpose(1, 2), x, reduction="none").mean(1)

    assert 0.9 < reach(model, losses, TensorDataset(tokens), physical_batch_size=physical) <= 1 + 1e-4


def test_s5_a_regulariser_is_clipped_with_the_example_or_refused() -> None:
    def added(m: nn.Module) -> Callable:
        return lambda x, y: ce(m)(x, y) + 10 * sum(p.square().sum() for p in m.parameters())

    assert reach(mlp(), added, points(6)) <= 1 + 1e-4
    model = mlp()
    with pytest.raises(PrivacyError, match="a scalar"):
        step(make(model), lambda x, y: ce(model)(x, y).mean() + sum(p.square().sum() for p in model.parameters()))


def test_s6_a_divisor_counted_over_the_batch_is_refused() -> None:
    model = mlp()

    def token_mean(x: Tensor, y: Tensor) -> Tensor:
        ignored = y == 0
        each = ce(model)(x, y).masked_fill(ignored, 0.0)
        return each / (~ignored).sum() * len(x)

    with pytest.raises(PrivacyError, match="sensitivity check failed"):
        step(make(model, clip_norm=BOUND), token_mean)


@pytest.mark.parametrize("how", ["break", "exception"])
def test_s7_a_step_left_half_way_adds_nothing_to_the_next(how: str) -> None:
    found = []
    for disturbed in (False, True):
        model = mlp()
        private = make(model, batch_size=6, physical_batch_size=2, clip_norm=BOUND)
        if disturbed and how == "break":
            for _ in private.batches():
                break
        elif disturbed:
            seen = []

            def losses(x: Tensor, y: Tensor, model=model, seen=seen, private=private) -> Tensor:
                seen.append(x)
                if private.check_report and len(seen) % 3 == 0:
                    raise KeyboardInterrupt
                return ce(model)(x, y)

            with pytest.raises(KeyboardInterrupt):
                step(private, losses)
        found.append(step(private, ce(model)))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert norm(found[1]) * 6 <= 6 * BOUND * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["parameters", "autocast", "float16 autocast"])
def test_s8_a_bound_is_a_bound_in_low_precision(kind: str) -> None:
    torch.manual_seed(0)
    model = mlp(features=40, hidden=50)
    x, y = points(6, features=40).tensors
    if kind == "parameters":
        model, x = model.bfloat16(), x.bfloat16()
    dtype = torch.float16 if "float16" in kind else torch.bfloat16

    def losses(m: nn.Module) -> Callable:
        def run(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=kind != "parameters"):
                return 30 * F.cross_entropy(m(x), y, reduction="none").float()

        return run

    # each alone: nothing but rounding could bring it over the bound; p.grad of bf16 parameters is rounded afterwards
    for i in range(6):
        twin = copy.deepcopy(model)
        private = make(twin, TensorDataset(x[i : i + 1], y[i : i + 1]), clip_norm=BOUND, examples=6, batch_size=1)
        sums, _ = clipped_sums(private, losses(twin), next(iter(private.batches())))
        assert all(t.dtype == torch.float32 for t in sums.values())
        assert 0.99 * BOUND < norm(sums) <= BOUND * (1 + 1e-6)
    twin = copy.deepcopy(model)
    private = make(twin, TensorDataset(x, y), clip_norm=BOUND)
    sums, _ = clipped_sums(private, losses(twin), next(iter(private.batches())))
    assert norm(sums) <= 6 * BOUND * (1 + 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_one_bad_example_contributes_zero_and_changes_nobody_else(bad: float) -> None:
    x, y = points(6).tensors
    x[2, 3] = bad
    rest = [0, 1, 3, 4, 5]
    model, twin = mlp(), mlp()

    def losses(m: nn.Module) -> Callable:
        return lambda x, y: F.cross_entropy(m(x) * x.abs().sum(1, keepdim=True), y, reduction="none")

    options = {"clip_norm": BOUND, "examples": 6, "batch_size": 6}
    got = step(make(model, TensorDataset(x, y), **options), losses(model))
    want = step(make(twin, TensorDataset(x[rest], y[rest]), **options), losses(twin))
    difference = norm({k: got[k] - want[k] for k in got}) * 6
    assert all(torch.isfinite(g).all() for g in got.values())
    assert difference <= (1e-5 if not math.isfinite(bad) else BOUND * (1 + 1e-4))


def test_modules_that_mix_examples_are_refused() -> None:
    """Many more in test_check.py."""

    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = mlp(extra=Centre())
    with pytest.raises(PrivacyError):
        step(make(model), ce(model))


# -- what leaks beside the gradient ----------------------------------------------------------------------------


def test_p_grad_is_private_between_backward_and_step() -> None:
    model, data = mlp(), points()
    private = make(model, data, **NOISY)
    got = step(private, ce(model))
    raw = torch.autograd.grad(ce(model)(*data.tensors).mean(), list(model.parameters()))
    noise = 1.0 / 24
    for g, r in zip(got.values(), raw, strict=True):
        assert float((g - r).norm()) > 0.3 * noise * r.numel() ** 0.5


def test_the_divisor_is_a_public_constant() -> None:
    model = mlp()
    private = make(model, points(40), batch_size=10, sampling="poisson")
    divisors = set()
    for batch in private.batches():
        for p in model.parameters():
            p.grad = None
        sums, _ = clipped_sums(private, ce(model), batch)
        whole = norm(sums)
        private.noise.add_ = lambda *_: None
        private.backward(ce(model), batch)
        divisors.add(round(whole / norm(grads(model)), 3))
        if private.step == 10:
            break
    assert divisors == {10.0}


def test_changed_buffers_are_refused_by_name() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            self.codes[0] = x.detach().mean(0)
            return x

    model = nn.Sequential(Codebook(), mlp())
    with pytest.raises(PrivacyError, match="'0.codes'"):
        step(make(model), ce(model))
    assert not model[0].codes.any()


def test_private_numbers_are_in_no_report() -> None:
    model = mlp()
    private = make(model, seed=None, batch_size=9, sampling="poisson", **NOISY)
    step(private, ce(model))
    report = json.dumps(private.guarantee().as_dict()) + str(private.guarantee()) + private.describe()
    for value in (private.last.loss, private.last.clip_fraction, *private.last.norms[:3].tolist()):
        assert f"{value:.3g}" not in report or value in (0.0, 1.0)
    assert "loss" not in private.describe()
    assert any("training loss" in text for text in private.guarantee().not_covered)


def test_a_run_that_trains_nothing_says_so() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(5, 3).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.zeros(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + F.linear(F.linear(x, self.a), self.b).detach()  # somebody's no_grad

    model = nn.Sequential(Adapter(), nn.Linear(3, 3))
    with pytest.raises(SordinoError, match="'0.a', '0.b'"):
        step(make(model), ce(model))


# -- the guarantee printed is the guarantee held ------------------------------------------------------------------


def test_the_sampler_that_runs_is_the_one_accounted_for() -> None:
    for sampling in ("poisson", "fixed-order", "balls-in-bins"):
        private = make(mlp(), sampling=sampling, batch_size=6, seed=None, **NOISY)
        assert private.plan.sampling.describe() in str(private.guarantee())
        batch = next(iter(private.batches()))
        assert list(batch.indices) == list(private.draw(0))
        with pytest.raises(AttributeError):
            private.plan.sampling = None


def test_a_mechanism_refuses_the_step_past_its_last() -> None:
    model = mlp()
    private = make(model, epochs=2, noise="lambda-cgd:0.9", **NOISY)
    for batch in private.batches():
        private.backward(ce(model), batch)
    with pytest.raises(SordinoError, match="all 2 planned steps"):
        private.backward(ce(model), batch)


def test_nothing_is_rounded_silently() -> None:
    """A batch of 300 stays one of 300, and the short last batch is a step of the epoch."""
    data = TensorDataset(torch.zeros(1000, 5), torch.zeros(1000, dtype=torch.long))
    for sampling in ("poisson", "fixed-order", "balls-in-bins"):
        private = make(mlp(), data, batch_size=300, epochs=3, sampling=sampling, **NOISY)
        assert private.plan.schedule.batch_size == 300 and private.steps == 12 == len(private.batches())
        assert "batch size 300 expected, 3 epochs of 4 steps: 12 steps" in private.describe()
    sizes = [len(private.draw(t)) for private in [make(mlp(), data, batch_size=300, epochs=1)] for t in range(4)]
    assert sizes == [300, 300, 300, 100]


def test_schedulers_and_optimizers_stay_connected() -> None:
    """The optimizer is the user's own object, so what adjusts it adjusts the run."""
    model = mlp()
    optimizer = sgd(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    private = make(model, optimizer=optimizer)
    moved = []
    for batch in private.batches():
        private.backward(ce(model), batch)
        before = model[0].weight.detach().clone()
        optimizer.step()
        scheduler.step()
        moved.append(float((model[0].weight.detach() - before).norm()))
        if private.step == 3:
            break
    assert moved[0] > 5 * moved[1] > 25 * moved[2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints_and_in_place_relu_change_nothing(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    busy = nn.Sequential(copy.deepcopy(plain[0]), nn.ReLU(inplace=True), copy.deepcopy(plain[2]))

    def losses(x: Tensor, y: Tensor) -> Tensor:
        h = checkpoint(lambda t: busy[1](busy[0](t)), x.clone().requires_grad_(), use_reentrant=use_reentrant)
        return F.cross_entropy(busy[2](h), y, reduction="none")

    want, got = step(make(plain), ce(plain)), step(make(busy), losses)
    assert norm({k: want[k] - got[k] for k in want}) < 1e-6
