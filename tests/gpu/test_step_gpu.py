"""The step and its check on a GPU: TF32, autocast, loader pinning, random states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.common import close, make, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sordino import PrivacyError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Mix(nn.Module):
    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return x - self.strength * x.mean(0).detach()


def network(strength: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Dropout(0.2),
              nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), Mix(strength), nn.Linear(64, 10)]  # fmt: skip
    return nn.Sequential(*layers).cuda()


def images(n: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, 12, 12, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (n,), generator=generator))


def losses_of(model: nn.Module, dtype: torch.dtype | None = None):
    def losses(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None):
            return F.cross_entropy(model(x), y, reduction="none").float()

    return losses


@pytest.fixture(params=[False, True], ids=["ieee", "tf32"])
def tf32(request):
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    assert torch.backends.cuda.matmul.allow_tf32 == request.param == torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_check_passes_and_finds_weak_mixing(tf32: bool, dtype: torch.dtype | None) -> None:
    model = network()
    private = make(model, images())
    step(private, losses_of(model, dtype), 2)
    assert private.check_report.complete
    mixed = network(0.03)
    with pytest.raises(PrivacyError):
        step(make(mixed, images()), losses_of(mixed, dtype))


def test_the_step_leaves_the_users_random_states(tf32: bool) -> None:
    model = network()
    private = make(model, images(), physical_batch_size=20)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    step(private, losses_of(model), 2)
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())


def test_out_of_memory_halves() -> None:
    model, twin = network(), network()
    for m in (model, twin):
        m[4].p = 0.0

    def losses(x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 20:
            torch.empty(2**50, device="cuda")
        return losses_of(model)(x, y)

    private = make(model, images())
    with pytest.warns(UserWarning, match="out of memory"):
        got = step(private, losses)
    close(got, step(make(twin, images()), losses_of(twin)), 2e-3)
    assert private.physical_batch_size == 16


@pytest.mark.parametrize("pin", [False, True])
def test_the_batch_is_moved_to_the_device(pin: bool) -> None:
    private = make(network(), images(), pin_memory=pin, workers=0)
    data = next(iter(private.batches())).data
    assert all(t.is_cuda for t in data)
