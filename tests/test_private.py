"""The step: what lands in p.grad, what is left untouched, and what a failure leaves behind."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, clipped_sum, close, each_alone, grads, make, mlp, norm, points, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import PrivacyError, SordinoError, SordinoWarning
from sordino.denoising import DENOISERS
from sordino.geometry import GEOMETRIES
from sordino.sampling import SAMPLERS
from sordino.strategies import STRATEGIES

NOISY = {"noise_multiplier": 1.0, "delta": 1e-6}


# -- p.grad --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, "auto", 1, 2, 5, 7, 23, 24, 100])
def test_without_noise_it_is_the_clipped_sum_over_the_expected_batch_size(physical) -> None:
    model, data = mlp(), points()
    want = clipped_sum(each_alone(model, ce(model), data.tensors), 0.7)
    got = step(make(model, data, clip_norm=0.7, physical_batch_size=physical), ce(model))
    close({k: g * 24 for k, g in got.items()}, want, 1e-5)


def test_the_divisor_is_the_public_batch_size_whatever_was_drawn() -> None:
    model, data = mlp(), points()
    private = make(model, data, batch_size=6, sampling="poisson")
    for batch in private.batches():
        private.backward(ce(model), batch)
        each = each_alone(model, ce(model), tuple(t[list(batch.indices)] for t in data.tensors))
        if each:
            close({k: g * 6 for k, g in grads(model).items()}, clipped_sum(each, 1.0))
        else:
            assert norm(grads(model)) == 0
        if private.step == 30:
            break


def test_an_empty_batch_still_releases_noise() -> None:
    model = mlp()
    private = make(model, points(40), batch_size=1, sampling="poisson", **NOISY)
    empty = 0
    for batch in private.batches():
        assert (batch.data is None) == (len(batch) == 0)
        private.backward(ce(model), batch)
        if not len(batch):
            empty += 1
            assert private.last.batch_size == 0 and math.isnan(private.last.loss)
            assert abs(norm(grads(model)) / math.sqrt(75) - 1) < 0.4
        if empty == 5:
            break
    assert empty == 5


def test_an_empty_batch_never_calls_the_losses() -> None:
    model = mlp()
    private = make(model, points(40), batch_size=1, sampling="poisson", **NOISY)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        assert len(x)
        return ce(model)(x, y)

    for batch in private.batches():
        private.backward(losses, batch)
        if private.step == 20:
            break


def test_p_grad_never_holds_anything_but_the_private_gradient() -> None:
    """Watched from inside the model, forward and backward, with a raw gradient of the user's own beforehand."""
    model = mlp()
    seen = []

    def look(*_) -> None:
        seen.append([p.grad for p in model.parameters()])

    for module in model.modules():
        module.register_forward_hook(lambda *_: look())
        module.register_forward_pre_hook(lambda *_: look())
    private = make(model, **NOISY)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x.register_hook(lambda g: look())
        h = torch.tanh(model[0](x))
        h.register_hook(lambda g: look())
        look()
        return F.cross_entropy(model[2](h), y, reduction="none")

    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    step(private, losses)
    assert len(seen) > 20 and all(g is None for row in seen for g in row)
    assert not any((p.grad == 7).any() for p in model.parameters())


def test_a_backward_of_the_users_own_between_steps_is_overwritten() -> None:
    found = []
    for disturb in (False, True):
        model = mlp()
        private = make(model, **NOISY)
        step(private, ce(model))
        if disturb:
            ce(model)(*points().tensors).mean().backward()
        found.append(step(private, ce(model)))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_a_backward_inside_losses_is_refused_and_leaves_no_raw_gradient() -> None:
    model = mlp()

    def backward(x: Tensor, y: Tensor) -> Tensor:
        ce(model)(x, y).mean().backward()
        return ce(model)(x, y)

    def writes(x: Tensor, y: Tensor) -> Tensor:
        model[0].weight.grad = x.mean() * torch.ones_like(model[0].weight)
        return ce(model)(x, y)

    original = torch.autograd.backward
    for (losses, text), check, physical in product(
        ((backward, "called backward\\(\\) itself"), (writes, "left a gradient in parameter '0.weight'")),
        (True, False),
        (None, 1),
    ):
        if losses is writes and physical is None:
            continue  # the recorder lets no such assignment through
        private = make(model, check=check, physical_batch_size=physical)
        with pytest.raises(PrivacyError, match=text):
            step(private, losses)
        assert private.step == 0 and all(p.grad is None for p in model.parameters())
        assert torch.autograd.backward is original


def test_an_external_grad_scaler_is_refused_by_name() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    original = torch.amp.GradScaler.scale
    for check, physical in product((True, False), (None, 1)):
        private = make(model, check=check, physical_batch_size=physical)
        with pytest.raises(SordinoError, match="GradScaler"):
            step(private, lambda x, y: scaler.scale(ce(model)(x, y)))
        assert torch.amp.GradScaler.scale is original and private.step == 0
    off = torch.amp.GradScaler("cpu", enabled=False)
    step(make(model), lambda x, y: off.scale(ce(model)(x, y)))
    assert float(scaler.scale(torch.ones(()))) == 1024.0


def test_p_grad_has_the_parameters_dtype_shape_and_no_graph() -> None:
    model = mlp().bfloat16()
    data = TensorDataset(points().tensors[0].bfloat16(), points().tensors[1])
    private = make(model, data, **NOISY)
    step(private, ce(model))
    for p in model.parameters():
        assert p.grad.dtype == p.dtype and p.grad.shape == p.shape and not p.grad.requires_grad


def test_frozen_parameters_are_untouched() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 5.0)
    private = make(model, **NOISY)
    step(private, ce(model))
    assert (model[0].weight.grad == 5).all() and model[0].bias.grad is None and model[2].weight.grad is not None


def test_under_no_grad_and_autocast_it_does_the_same() -> None:
    found = []
    for context in (torch.enable_grad, torch.no_grad):
        model = mlp()
        private = make(model, **NOISY)
        with context():
            found.append(step(private, ce(model)))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    model = mlp()
    private = make(model, **NOISY, denoising="shrinkage", geometry="euclidean")
    with torch.autocast("cpu", torch.bfloat16):
        got = step(private, ce(model))
    assert all(g.dtype == torch.float32 for g in got.values())
    with torch.inference_mode(), pytest.raises(SordinoError, match="inference_mode"):
        step(private, ce(model))


# -- noise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["identity", "lambda-cgd:0.8", "lambda-cgd-normalized:0.8"])
def test_the_noise_in_p_grad_has_the_stated_covariance(noise: str) -> None:
    """std ζσ·row_norm/B in every step; across steps C⁻¹C⁻ᵀ."""
    data, bound, sigma, steps = points(8, features=40), 0.5, 3.0, 6
    model = mlp(features=40, hidden=60)
    quiet, loud = (
        make(
            m := copy.deepcopy(model), data, clip_norm=bound, noise=noise, batch_size=4, epochs=steps // 2, seed=5, **o
        )
        for o in ({"budget": sordino.Budget(math.inf, 1e-5)}, {"noise_multiplier": sigma, "delta": 1e-6})
    )
    rows = []
    for a, b in zip(quiet.batches(), loud.batches(), strict=True):
        quiet.backward(ce(quiet.model), a)
        loud.backward(ce(loud.model), b)
        difference = [loud.model.get_parameter(k).grad - g for k, g in grads(quiet.model).items()]
        rows.append(torch.cat([d.reshape(-1) for d in difference]).double())
    assert len(rows) == steps
    z = torch.stack(rows).numpy() / (bound * sigma / 4)
    inverse = loud.plan.strategy.inverse()
    want = inverse @ inverse.T
    got = z @ z.T / z.shape[1]
    tolerance = 5 * np.sqrt((np.outer(np.diag(want), np.diag(want)) + want**2) / z.shape[1])
    assert (np.abs(got - want) < tolerance).all()
    assert np.allclose(np.sqrt(np.diag(want)), [loud.plan.strategy.row_norm(t) for t in range(steps)])


def test_a_fresh_run_is_a_fresh_key() -> None:
    found = [step(make(m := mlp(), seed=None, **NOISY), ce(m)) for _ in range(2)]
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])


def test_private_is_no_place_from_which_the_key_slips_out() -> None:
    model = mlp()
    private = make(model, seed=None, **NOISY)
    secret = private.keys._secret.hex()
    assert secret not in repr(private) + repr(vars(private)) + private.describe() + str(private.guarantee())
    with pytest.raises(SordinoError):
        copy.deepcopy(private.keys)
    private.close()
    with pytest.raises(SordinoError):
        step(private, ce(model))


# -- one example more or less -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_removing_one_record_moves_the_sum_by_no_more_than_the_bound(seed: int) -> None:
    """For fixed batches, small random models, every clipping, and records as bad as they come."""
    generator = torch.Generator().manual_seed(seed)
    n, features = int(torch.randint(2, 9, (), generator=generator)), int(torch.randint(2, 6, (), generator=generator))
    x = torch.randn(n, features, generator=generator) * 10 ** float(torch.randn((), generator=generator))
    y = torch.randint(0, 3, (n,), generator=generator)
    x[0] *= 10 ** float(3 * torch.randn((), generator=generator))
    if seed % 4 == 3:
        x[1, 0] = float("inf")
    bound = 10 ** float(torch.randn((), generator=generator))
    style = ("flat", "layer-wise", "automatic")[seed % 3]
    model = mlp(features, seed=seed)
    options = {"clip_norm": bound, "clipping": style, "batch_size": n, "examples": n}

    def run(keep: list[int]) -> dict[str, Tensor]:
        twin = copy.deepcopy(model)
        data = TensorDataset(x[keep], y[keep])
        return {k: n * g for k, g in step(make(twin, data, **options), ce(twin)).items()}

    everyone = list(range(n))
    whole = run(everyone)
    for i in everyone:
        rest = run([j for j in everyone if j != i])
        assert norm({k: whole[k] - rest[k] for k in whole}) <= bound * (1 + 1e-4)


def test_an_attack_measures_no_more_than_the_stated_epsilon() -> None:
    """One number, one example more or less, its gradient along the clip bound in every step: the best case for the
    attacker. With Clopper-Pearson bounds on its two errors, the ε it proves must stay under the stated one, and come
    near enough that the test could fail."""
    from scipy.stats import beta

    from sordino.noise import CorrelatedNoise, Keys
    from sordino.plan import plan

    steps, runs, delta = 4, 4000, 1e-3
    stated = plan(
        sordino.Budget(2.0, delta), examples=4, batch_size=1, epochs=1, noise="lambda-cgd:0.5", sampling="fixed-order"
    )
    sigma, strategy = stated.noise_multiplier, stated.strategy
    everyone = []
    for run in range(runs):
        noise = CorrelatedNoise(Keys.from_seed(run), strategy)
        rows = []
        for t in range(steps):
            sums = {"w": torch.zeros(2)}
            noise.add_(sums, t, sigma)
            rows.append(sums["w"])
        everyone.append(torch.stack(rows))
    z = torch.stack(everyone).double().numpy()  # (runs, steps, 2 independent worlds)
    signal = np.zeros(steps)
    signal[0] = 1.0  # the example of the first step
    dense = strategy.dense()
    direction = dense.T @ dense @ signal / (sigma**2)
    out, with_ = z[:, :, 0] @ direction, (z[:, :, 1] + signal) @ direction
    best = 0.0
    for threshold in np.quantile(with_, [0.1, 0.3, 0.5, 0.7, 0.9, 0.95]):
        for hit, false in ((with_ > threshold, out > threshold), (out <= threshold, with_ <= threshold)):
            true = beta.ppf(0.001, hit.sum(), runs - hit.sum() + 1) if hit.sum() else 0.0
            wrong = beta.ppf(0.999, false.sum() + 1, runs - false.sum()) if false.sum() < runs else 1.0
            if true > delta:
                best = max(best, math.log((true - delta) / wrong))
    assert 0.4 * 2.0 < best <= 2.0


# -- failures leave no trace ---------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("physical", [None, 1, 8])
@pytest.mark.parametrize("check", [True, False])
def test_s7_an_exception_at_any_point_leaves_no_trace(check: bool, physical: int | None) -> None:
    """A failure in any call of the losses, forward or backward; then the same batch gives the identical result."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(extra=nn.Dropout(0.5))
            self.register_buffer("note", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    def run(fail_at: int, where: str) -> tuple[dict[str, Tensor], bool]:
        torch.manual_seed(0)
        model = Module()
        private = make(model, check=check, physical_batch_size=physical, **NOISY)
        calls = [0]

        def losses(x: Tensor, y: Tensor) -> Tensor:
            calls[0] += 1
            out = model(x)
            if calls[0] == fail_at:
                if where == "forward":
                    model.note.add_(1)
                    raise Boom
                out = Explode.apply(out)
            return F.cross_entropy(out, y, reduction="none")

        batches = iter(private.batches())
        before = copy.deepcopy(model.state_dict())
        hooks = [dict(m.__dict__) for m in model.modules()]
        rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        batch, failed = next(batches), False
        try:
            private.backward(losses, batch)
        except Boom:
            failed = True
            assert private.step == 0 and private.journal.steps == 0 and private.last is None
            assert all(p.grad is None for p in model.parameters())
            assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
            assert rng == (Same(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist())
            assert hooks == [dict(m.__dict__) for m in model.modules()]
            assert float(private.guarantee().epsilon) == 0.0
            again = next(batches)
            assert again.step == 0
            private.backward(losses, again)
        assert rng == (Same(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist())
        return grads(model), failed

    want, _ = run(0, "forward")
    failures = 0
    for where in ("forward", "backward"):
        for fail_at in (1, 2, 3, 5, 9, 14, 20, 26):
            got, failed = run(fail_at, where)
            failures += failed
            assert all(torch.equal(want[k], got[k]) for k in want), (where, fail_at)
    assert failures >= 2


class Same:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return torch.equal(self.tensor, other)

    __hash__ = None


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        raise Boom


def test_s7_a_loop_left_half_way_goes_on_where_it_was() -> None:
    want_model, got_model = mlp(), mlp()
    want, got = make(want_model, **NOISY), make(got_model, **NOISY)
    a = [step(want, ce(want_model)) for _ in range(6)]
    b = []
    while got.step < 6:
        for batch in got.batches():
            if len(b) % 2:  # drawn, never used
                break
            got.backward(ce(got_model), batch)
            b.append(grads(got_model))
            break
        else:
            raise AssertionError
        if len(b) % 2:
            b.append(step(got, ce(got_model)))
    assert all(torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


def test_a_failure_in_the_release_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    want = step(make(twin, **NOISY), ce(twin))
    private = make(model, **NOISY)
    batch = next(iter(private.batches()))
    original, calls = private.geometry.back, []

    def back(name: str, update: Tensor) -> Tensor:
        calls.append(name)
        if len(calls) == 3:
            raise Boom
        return original(name, update)

    monkeypatch.setattr(private.geometry, "back", back)
    with pytest.raises(Boom):
        private.backward(ce(model), batch)
    assert private.step == 0 and all(p.grad is None for p in model.parameters())
    private.backward(ce(model), batch)
    assert all(torch.equal(want[k], v) for k, v in grads(model).items()) and not private.noise.first_steps[1:]


# -- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "host"])
@pytest.mark.parametrize("limit", [1, 3, 6, 12])
def test_out_of_memory_halves_only_the_chunk(limit: int, kind: str) -> None:
    model, twin, data = mlp(), mlp(), points()
    want = step(make(twin, data), ce(twin))
    error = torch.OutOfMemoryError("simulated") if kind == "device" else RuntimeError(
        "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
    )  # fmt: skip
    sizes = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        if len(x) > limit:
            raise error
        return ce(model)(x, y)

    private = make(model, data, physical_batch_size="auto", check=False)
    with pytest.warns(SordinoWarning, match="out of memory with"):
        got = step(private, losses)
    close(got, want, 1e-5)
    assert private.physical_batch_size <= limit
    good = [s for s in sizes if s <= limit]
    assert sum(good) == 24 or limit > 1  # probes of the layouts come on top
    sizes.clear()
    step(private, losses)
    assert max(sizes) <= limit and sum(sizes) == 24


def test_out_of_memory_in_a_later_chunk_keeps_the_earlier_ones() -> None:
    model, twin, data = mlp(), mlp(), points()
    close_to = step(make(twin, data), ce(twin))
    private = make(model, data, physical_batch_size="auto", check=False)
    private.physical_batch_size = 8
    seen = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        if private.step == 1 and len(seen) == 3:
            raise torch.OutOfMemoryError("simulated")
        return ce(model)(x, y)

    close(step(private, losses), close_to)
    seen.clear()
    with pytest.warns(SordinoWarning, match="with 8 examples at once; going on with 4"):
        close(step(private, losses), close_to)
    assert seen == [8, 8, 8, 4, 4]


def test_out_of_memory_with_one_example_or_a_fixed_size_is_an_error() -> None:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("simulated")

    for physical in (1, 4, None):
        private = make(mlp(), physical_batch_size=physical)
        with pytest.raises(torch.OutOfMemoryError):
            step(private, losses)
        assert private.step == 0


def test_out_of_memory_during_the_check_halves_too() -> None:
    model = mlp()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("simulated")
        return ce(model)(x, y)

    private = make(model)
    with pytest.warns(SordinoWarning):
        step(private, losses)
    assert private.check_report.passed and private.physical_batch_size <= 4


def test_losses_under_torch_compile_are_the_same() -> None:
    model, twin = mlp(), mlp()
    close(step(make(model), torch.compile(ce(model))), step(make(twin), ce(twin)))


# -- randomness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 1, 7])
def test_the_users_own_random_sequence_is_the_same_with_or_without(physical: int | None) -> None:
    def sequence(private_step: bool) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = mlp(extra=nn.Dropout(0.5))
        torch.manual_seed(1)
        out = [float(torch.rand(())), random.random(), float(np.random.rand())]
        if private_step:
            private = make(model, physical_batch_size=physical, augment=jitter, augmentations=2, **NOISY)
            step(private, ce(model), 2)
        return [*out, float(torch.rand(())), random.random(), float(np.random.rand())]

    assert sequence(False) == sequence(True)


def jitter(example):
    return example[0] + 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * np.random.rand(), example[1]


def test_dropout_is_drawn_anew_in_every_step_and_the_same_in_every_attempt() -> None:
    masks: list[Tensor] = []

    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(len(x), 1) < 0.5
            masks.append(mask)
            return x * mask

    def run() -> list[Tensor]:
        masks.clear()
        model = mlp(extra=Drop())
        private = make(model, check=False, **NOISY)
        torch.manual_seed(random.randrange(100))
        step(private, ce(model), 2)
        return [m for m in masks if len(m) == 24]

    a, b = run(), run()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], a[-1])


# -- the user's own objects ------------------------------------------------------------------------------------


def test_model_optimizer_and_loop_stay_the_users_own() -> None:
    model = mlp(extra=nn.Dropout(0.3))
    model[0].train()
    model[2].eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    called = []
    handle = model.register_forward_hook(lambda *_: called.append(1))
    keys = [sorted(m.__dict__) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    kind, group = type(optimizer), len(optimizer.param_groups)
    private = make(model, optimizer=optimizer, **NOISY)
    rates = []
    for batch in private.batches():
        private.backward(ce(model), batch)
        torch.nn.utils.clip_grad_value_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        if private.step == 10:
            break
    assert rates[0] > rates[4] > rates[9] and called
    assert keys == [sorted(m.__dict__) for m in model.modules()] and modes == [m.training for m in model.modules()]
    assert hooks == [
        len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]
    assert type(optimizer) is kind and len(optimizer.param_groups) == group
    twin = torch.optim.AdamW(mlp(extra=nn.Dropout(0.3)).parameters(), lr=0.05)
    twin.load_state_dict(optimizer.state_dict())
    handle.remove()
    again = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = points().tensors[0]
    model.eval(), again.eval(), loaded.eval()
    assert torch.equal(model(x), again(x)) and torch.equal(model(x), loaded(x))


def test_the_clip_bound_has_one_owner() -> None:
    """S1, S2: nobody can change it half-way, in one place or in two."""
    private = make(mlp(), **NOISY)
    with pytest.raises(AttributeError):
        private.clipping = sordino.Clipping(10.0)
    with pytest.raises(AttributeError):
        private.clipping.bound = 10.0
    layered = sordino.Clipping(5.0, "layer-wise", layers=(layers := {"0": 3.0, "2": 4.0}))
    layers["0"] = 300.0
    assert layered.layers["0"] == 3.0
    for change in (lambda d: d.update(a=1), lambda d: d.__setitem__("0", 300.0), lambda d: d.clear()):
        with pytest.raises(TypeError):
            change(layered.layers)
    assert json.dumps(asdict(layered)) and copy.deepcopy(layered) == layered
    source = Path(sordino.__file__).with_name("private.py").read_text()
    assert len(re.findall(r"clip_norm", source.split("class Private:")[1])) == 1  # the guarantee prints it


# -- what composes -----------------------------------------------------------------------------------------------


def everything() -> list[tuple[str, str, str, str]]:
    """Bandwidths of two in place of the usual ones, since the runs are short; what needs a file is left out."""
    free = [e for e in STRATEGIES if not e.capabilities.get("needs_spectrum")]
    usual = {e.name: e.argument for e in free if e.argument == "" or e.argument.replace(".", "").isdigit()}
    noises = [f"{name}:{'2' if text.isdigit() else text}" if text else name for name, text in usual.items()]
    return list(product(SAMPLERS.names(), noises, GEOMETRIES.names(), DENOISERS.names()))


@pytest.mark.filterwarnings("ignore::sordino.SordinoWarning")
@pytest.mark.parametrize("sampling, noise, geometry, denoising", everything())
def test_every_combination_runs_or_says_what_is_missing(
    sampling: str, noise: str, geometry: str, denoising: str
) -> None:
    model = mlp()
    public = sordino.Public(points(10, seed=9), ce(model)) if GEOMETRIES.find(geometry).capabilities else None
    options = {"sampling": sampling, "noise": noise, "geometry": geometry, "denoising": denoising, "public": public}
    # a search by simulation takes its time, and is tested where it is done
    quick = sampling != "balls-in-bins" or noise == "identity"
    cost = {"budget": sordino.Budget(3.0, 1e-3)} if quick else {"noise_multiplier": 3.0, "delta": 1e-3}
    try:
        private = make(model, batch_size=8, epochs=2, seed=None, **cost, **options)
    except sordino.Unsupported as error:
        text = str(error)
        assert "\n" not in text and any(f"{k}={v!r}" in text for k, v in options.items())
        return
    for batch in private.batches():
        private.backward(ce(model), batch)
        assert all(torch.isfinite(g).all() for g in grads(model).values())
    if quick:
        assert private.guarantee().epsilon <= 3.0 and private.guarantee().void is None


def test_the_step_knows_no_choice_by_name() -> None:
    names = [*SAMPLERS.names(), *STRATEGIES.names(), *GEOMETRIES.names(), *DENOISERS.names()]
    source = Path(sordino.__file__).with_name("private.py").read_text()
    body = source[source.index("class Private:") :]
    for name in names:
        for spelling in (f'"{name}"', f'"{name}:', name.title().replace("-", "")):
            assert spelling == "None" or spelling not in body, spelling
    defaults = {"poisson", "identity", "euclidean", "none"}  # what make_private does if nothing is said
    head = source[: source.index("class Private:")]
    assert {name for name in names if f'"{name}"' in head} <= defaults


# -- what holds ---------------------------------------------------------------------------------------------------


def test_the_guarantee_at_every_step() -> None:
    model = mlp()
    private = make(
        model, points(64), batch_size=8, epochs=3, sampling="poisson", budget=sordino.Budget(2.0, 1e-4), seed=None
    )
    assert private.guarantee().epsilon == 0.0 and private.guarantee().void is None
    last = 0.0
    for batch in private.batches():
        private.backward(ce(model), batch)
        now = private.guarantee()
        assert last <= now.epsilon <= 2.0 and now.steps_released == private.step
        last = now.epsilon
    text = str(private.guarantee())
    assert text.startswith("(2.00, 0.0001)-DP, add/remove one example") and "24 of 24 steps" in text
    assert "\n" not in text and "64, is treated as public" in text
    with pytest.raises(SordinoError, match="all 24 planned steps are released"):
        private.backward(ce(model), batch)
    assert list(private.batches()) == [] and len(private.batches()) == 0


def test_no_guarantee_where_there_is_none() -> None:
    model = mlp()
    seeded = make(model, seed=3, **NOISY)
    step(seeded, ce(model))
    assert str(seeded.guarantee()).startswith("none: seeded")
    free = make(model, seed=None)
    step(free, ce(model))
    assert str(free.guarantee()).startswith("none: no noise")


def test_with_examples_stated_nothing_depends_on_the_data_set() -> None:
    plans, texts = [], []
    for n in (30, 57):
        private = make(
            mlp(), points(n), examples=40, batch_size=8, epochs=2, sampling="poisson", seed=None,
            budget=sordino.Budget(1.0, 1e-3),
        )  # fmt: skip
        step(private, ce(private.model))
        plans.append((private.steps, private.plan.noise_multiplier, private.plan.sampling.rate, len(private.batches())))
        texts.append((private.describe(), str(private.guarantee())))
    assert plans[0] == plans[1] and texts[0] == texts[1] and plans[0][0] == 10
    assert "treated as public" not in texts[0][1] and "57" not in texts[1][0] + texts[1][1]


def test_what_runs_is_printed() -> None:
    private = make(mlp(), points(50), batch_size=8, sampling="balls-in-bins", budget=sordino.Budget(3, 1e-4))
    text = private.describe()
    for part in ("50 examples", "batch size 8 expected", "7 steps", "balls-in-bins", "identity", "flat at 1",
                 "euclidean", "denoising none", "ε 3.00 at δ 0.0001", "add/remove", "75 trainable"):  # fmt: skip
        assert part in text, part
    assert "none (no noise)" in make(mlp()).describe()


def test_where_past_noise_lives_is_printed_and_changes_no_bit() -> None:
    found = {}
    for noise, places in (("bisr:4", ("auto", "regenerate", "device", "host")), ("bsr:4", ("auto", "device", "host"))):
        for place in places:
            model = mlp()
            private = make(model, noise=noise, noise_storage=place, noise_multiplier=1.0, delta=1e-6)
            text = private.describe()
            again = noise == "bisr:4" and place in ("auto", "regenerate")
            kept = "past noise: 3 past vectors kept in memory (98.3 kB)"  # a tile for each of four tensors
            assert ("past noise: 3 past rows drawn again at each step" if again else kept) in text
            found[noise, place] = step(private, ce(model), 6)
            assert all(torch.equal(g, found[noise, "auto"][name]) for name, g in found[noise, place].items())
    assert "past noise" not in make(mlp(), **NOISY).describe()
    assert "past noise" not in make(mlp(), noise="bsr:4").describe()  # clip only


@pytest.mark.parametrize(
    ("noise", "place", "says"),
    [
        ("bsr:4", "regenerate", "noise_storage='regenerate': each step of noise='bsr:4' depends on all before it"),
        ("bisr:4", "disk", "noise_storage='disk' is not known; choose one of: auto, regenerate, device, host"),
        ("identity", None, "noise_storage=None is not known"),
    ],
)
def test_places_where_noise_cannot_live(noise: str, place: Any, says: str) -> None:
    with pytest.raises(SordinoError, match=says) as caught:
        make(mlp(), noise=noise, noise_storage=place, **NOISY)
    assert "\n" not in str(caught.value)


def test_one_row_of_noise_hides_one_sum() -> None:
    model = mlp()
    private = make(model, noise_multiplier=1.0, delta=1e-6, seed=None)
    batch = next(iter(private.batches()))
    private.backward(ce(model), batch)
    with pytest.raises(AttributeError):
        private.step = 0  # type: ignore[misc]
    private._step = 0  # by force
    with pytest.raises(SordinoError, match="step 0 was handed out already"):
        private.backward(ce(model), batch)
    assert all(p.grad is None for p in model.parameters())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(SordinoError, match="not pickled or copied"):
            copied(private)
    assert not hasattr(private, "batch")
