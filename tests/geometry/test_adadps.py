"""AdaDPS: clip g/(√v + ε), keep the scaled update, v from public data alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, clipped_sum, close, each_alone, make, mlp, points, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import SordinoError
from sordino.geometry import geometry


def public(model: nn.Module, n: int = 12, **options) -> sordino.Public:
    return sordino.Public(points(n, seed=4), ce(model), **{"labels": "given", **options})


def moments(model: nn.Module, n: int = 12) -> dict[str, Tensor]:
    each = each_alone(model, ce(model), points(n, seed=4).tensors)
    return {name: torch.stack([one[name].square() for one in each]).mean(0) for name in each[0]}


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("examples", [None, 7])
def test_the_scale_comes_from_the_public_second_moments(batch_size: int, examples: int | None) -> None:
    model = mlp()
    private = make(model, geometry=sordino.AdaDPS(0.01, examples), public=public(model, batch_size=batch_size))
    v = moments(model, examples or 12) if examples is None else None
    if v is None:
        each = each_alone(model, ce(model), tuple(t[:7] for t in points(12, seed=4).tensors))
        v = {name: torch.stack([one[name].square() for one in each]).mean(0) for name in each[0]}
    top = max(float(t.max()) for t in v.values()) ** 0.5
    want = {name: 1 / (t.sqrt() + 0.01 * top) for name, t in v.items()}
    got = private.geometry.scale
    ratio = torch.cat([(got[name] / want[name]).reshape(-1) for name in want])
    assert float(ratio.std() / ratio.mean()) < 1e-4  # up to one common factor,
    inverse = torch.cat([(1 / s).square().reshape(-1) for s in got.values()])
    assert abs(float(inverse.mean()) - 1) < 1e-4  # which makes the typical scale 1


@pytest.mark.parametrize("physical", [None, 1, 5])
@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_gradients_are_clipped_scaled_and_stay_scaled(physical: int | None, bound: float) -> None:
    model, data = mlp(), points()
    private = make(model, data, geometry="adadps", public=public(model), clip_norm=bound, physical_batch_size=physical)
    scale = private.geometry.scale
    each = [{k: g * scale[k] for k, g in one.items()} for one in each_alone(model, ce(model), data.tensors)]
    got = step(private, ce(model))
    close({k: 24 * g for k, g in got.items()}, clipped_sum(each, bound), 1e-4)


class Several(nn.Module):
    """Sequences, a table, a convolution, a tied weight: every form a gradient comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(9, 6), nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(6)
        self.shift = nn.Parameter(torch.zeros(5, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(tokens).transpose(1, 2)).transpose(1, 2) + self.shift)
        return F.linear(h.tanh(), self.table.weight)


def test_every_form_of_a_gradient() -> None:
    torch.manual_seed(0)
    model = Several()
    tokens = torch.randint(0, 9, (10, 5))

    def losses(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).transpose(1, 2), x, reduction="none").mean(1)

    source = sordino.Public(TensorDataset(torch.randint(0, 9, (8, 5))), losses, labels="given")
    private = make(model, TensorDataset(tokens), geometry="adadps", public=source, clip_norm=0.5)
    scale = private.geometry.scale
    each = [{k: g * scale[k] for k, g in one.items()} for one in each_alone(model, losses, (tokens,))]
    close({k: 10 * g for k, g in step(private, losses).items()}, clipped_sum(each, 0.5), 1e-4)


def test_the_noise_is_white_in_the_coordinates_kept() -> None:
    model = mlp(features=40, hidden=60)
    quiet, loud = mlp(features=40, hidden=60), mlp(features=40, hidden=60)
    data = points(24, features=40)
    got = []
    for m, options in ((quiet, {}), (loud, {"noise_multiplier": 2.0, "delta": 1e-6})):
        source = sordino.Public(points(12, features=40), ce(m), labels="given")
        got.append(step(make(m, data, geometry="adadps", public=source, **options), ce(m)))
    z = torch.cat([(got[1][k] - got[0][k]).reshape(-1) for k in got[0]]) / (2.0 / 24)
    assert abs(float(z.std()) - 1) < 5 / (2 * len(z)) ** 0.5
    assert len(z) == sum(p.numel() for p in model.parameters())


def test_one_object_serves_several_runs() -> None:
    chosen = sordino.AdaDPS()
    small, large = mlp(), mlp(hidden=20)
    one = make(small, geometry=chosen, public=public(small))
    scale = {k: v.clone() for k, v in one.geometry.scale.items()}
    make(large, geometry=chosen, public=public(large))
    assert all(torch.equal(scale[k], v) for k, v in one.geometry.scale.items()) and not chosen.scale


def test_a_table_is_an_object() -> None:
    chosen = geometry({"name": "adadps", "epsilon": 0.02, "examples": 3})
    assert (chosen.epsilon, chosen.examples) == (0.02, 3)
    assert "0.02" in chosen.describe() and "first 3 public examples" in chosen.describe()
    assert geometry({"name": "euclidean"}).name == "euclidean"
    with pytest.raises(SordinoError, match=r"no option 'epsilon'; known: \(none\)"):
        geometry({"name": "euclidean", "epsilon": 1})


@pytest.mark.parametrize("bad", ["nan", "inf", "zero"])
def test_public_gradients_that_are_of_no_use(bad: str) -> None:
    model = mlp()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        value = ce(model)(x, y)
        # only the last parameters: the first ones stay finite
        return (
            value
            + {"nan": float("nan"), "inf": 1e30, "zero": 0}[bad] * model[2].bias.sum()
            - (value if bad == "zero" else 0)
        )

    with pytest.raises(SordinoError) as error:
        make(model, geometry="adadps", public=sordino.Public(points(6), losses, labels="given"))
    assert "\n" not in str(error.value) and ("finite" in str(error.value) or "second moment" in str(error.value))


def test_its_state_survives_a_save(tmp_path: Path) -> None:
    options = {"geometry": "adadps", "noise_multiplier": 1.0, "delta": 1e-6, "seed": None}
    model = mlp()
    private = make(model, public=public(model), **options)
    step(private, ce(model))
    private.save(tmp_path / "run")
    want = step(private, ce(model))
    scale = {k: v.clone() for k, v in private.geometry.scale.items()}
    private.close()
    twin = mlp(seed=3)  # other weights: another scale, until the run is loaded
    again = make(twin, public=public(twin), **options)
    assert not torch.equal(again.geometry.scale["0.weight"], scale["0.weight"])
    again.load(tmp_path / "run")
    assert all(torch.equal(scale[k], v) for k, v in again.geometry.scale.items())
    got = step(again, ce(twin))
    assert all(torch.equal(want[k], got[k]) for k in want)
    again.close()
