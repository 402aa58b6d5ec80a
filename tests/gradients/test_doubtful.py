"""What an adversary tried: each is found out again, refused, or ends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.errors import PrivacyError, SordinoError
from sordino.geometry import Euclidean
from sordino.gradients.clipping import Clipping
from sordino.gradients.engine import Engine


def engine_of(model: nn.Module) -> Engine:
    return Engine(model, {name: p for name, p in model.named_parameters() if p.requires_grad})


def test_an_infinite_gradient_in_half_precision_ends_and_contributes_nothing() -> None:
    """Scaling down would go on for ever: no scale makes it finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, bad = torch.randn(6, 4), torch.arange(6) == 2

    def losses(x: Tensor, bad: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            h = model(x)
        h = h.float()
        safe = torch.where(bad, (h * 0).sum(1), torch.ones(6))
        return (h**2).mean(1) + torch.sqrt(safe)  # an infinite slope at zero

    found = engine_of(model).clipped_sums(losses, (x, bad), 6, 6, Euclidean(), Clipping(1.0))
    assert found.bad == 1
    assert all(bool(s.isfinite().all()) and bool((s != 0).any()) for s in found.sums.values())


class Packs(nn.Module):
    """Takes the padding out by lengths that are numbers, not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        rows = self.first(torch.cat([x[i, :length] for i, length in enumerate(lengths)])).tanh()
        return self.last(torch.stack([part.mean(0) for part in rows.split(list(lengths))]))


def test_lengths_that_are_not_tensors_never_move_an_owner_unseen() -> None:
    """Equal lengths first, then unequal ones of a total that also divides: the layout of the first batch is wrong."""
    torch.manual_seed(0)
    model, n = Packs(), 8
    engine = engine_of(model)
    x, y = torch.randn(n, 25, 4), torch.randint(3, (n,))

    def losses(x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, lengths), y, reduction="none")

    engine.clipped_sums(losses, (x, [4] * n, y), n, n, Euclidean(), Clipping(1.0))
    with pytest.raises(PrivacyError, match="first.weight"):
        engine.clipped_sums(losses, (x, [1] * 7 + [25], y), n, n, Euclidean(), Clipping(1.0))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).mean(0)


def test_the_probe_sends_gradients_as_large_as_the_pass_does() -> None:
    """In float16 a gradient of 1e-8 arrives only if it is scaled; unscaled, the probe would see nothing."""
    torch.manual_seed(0)
    model, n = TimeFirst(), 4
    x = torch.randn(8, n, 5)

    def losses(x: Tensor, half: bool = True) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = model(x)
        return 1e-8 * out.float().square().sum(1)

    def norms(half: bool) -> Tensor:
        engine = engine_of(model)
        return engine.clipped_sums(lambda x: losses(x, half), (x,), n, n, Euclidean(), Clipping(1.0)).norms

    assert torch.allclose(norms(True), norms(False), rtol=0.02)


@pytest.mark.parametrize("size", ["clip_norm", "gamma"])
def test_bounds_below_what_squares_can_show_are_refused(size: str) -> None:
    with pytest.raises(SordinoError, match=f"{size}=1e-26"):
        Clipping(1e-26) if size == "clip_norm" else Clipping(1.0, "automatic", gamma=1e-26)
