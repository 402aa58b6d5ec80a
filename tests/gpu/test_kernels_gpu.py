"""The kernels of per-example norms, compiled, at sizes that matter; and one whole step on the GPU against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.gradients.gpu_path import agree, cases, of_logits, once
from tests.gradients.kernel_cases import CASES
from torch import nn
from torch.utils.data import TensorDataset

import sordino
from sordino.gradients.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_float64(case: str) -> None:
    torch.manual_seed(0)
    CASES[case]("cuda", True)


@pytest.mark.parametrize("style", ["flat", "layer-wise"])
@pytest.mark.parametrize("name", cases())
def test_a_step_the_gpus_way_is_the_cpus(name: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the model's own convolutions, on the CPU exact
    agree(name, "cuda", style)


def test_more_groups_than_a_grid_takes() -> None:
    """300 examples of 256 groups each."""
    torch.manual_seed(0)
    x = torch.randn(300, 256, 2, 2)
    found = []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(nn.GroupNorm(256, 256), nn.Flatten(), nn.Linear(1024, 3)).to(device)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
        found.append(once(Engine(model, dict(model.named_parameters())), of_logits, x.to(device), "flat"))
    for name, total in found[0].sums.items():
        assert (found[1].sums[name].cpu() - total).norm() < 2e-4 * total.norm(), name


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, stride=2),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(2), nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Flatten(),
        nn.Linear(32 * 24, 10),
    )  # fmt: skip


def test_a_step_is_the_cpus() -> None:
    """Same key, same noise to the bit, gradients to rounding."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    found = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = sordino.make_private(
            model, optimizer, TensorDataset(x, y), noise_multiplier=0.5, delta=1e-5, batch_size=16, epochs=1,
            clip_norm=0.3, noise="lambda-cgd:0.9", sampling="fixed-order", seed=3,
        )  # fmt: skip

        def losses(a: torch.Tensor, b: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(a), b, reduction="none")

        for batch in private.batches():
            private.backward(losses, batch)
            optimizer.step()
        found.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 2e-4 * found[0].norm()
