"""Row t of C⁻¹Z, regenerated, against the dense product."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError, StateError
from sordino.noise import CorrelatedNoise, Keys, Stream

from .doubles import Banded

T = 9
SHAPES = {"weight": (30, 50), "bias": (30,), "head": (3001,)}


STRATEGIES = {
    "identity": Banded((1.0,)),
    "two terms": Banded((1.0, -0.9)),
    "two terms, scaled": Banded((1.0, -0.9), scaled=True),
    "four terms": Banded((1.0, -0.5, -0.125, -0.0625)),
}


def zeros(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def dense_z(subkey: bytes, name: str) -> np.ndarray:
    n = math.prod(SHAPES[name])
    return np.stack([Stream(subkey).normals(t, name, 0, n).double().numpy() for t in range(T)])


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_row_is_the_dense_product(strategy: Banded) -> None:
    keys = Keys.from_seed(0)
    noise = CorrelatedNoise(keys, strategy)
    expected = {n: 1.7 * strategy.inverse() @ dense_z(keys.subkey("noise"), n) for n in SHAPES}
    for step in range(T):
        sums, rounded = zeros(), zeros(torch.float32)
        noise.add_(sums, step, 1.7)
        noise.add_(rounded, step, 1.7)
        for name, shape in SHAPES.items():
            row = expected[name][step].reshape(shape)
            np.testing.assert_allclose(sums[name].numpy(), row, rtol=0, atol=1e-14)
            np.testing.assert_allclose(rounded[name].numpy(), row, rtol=0, atol=3e-6)


def test_what_was_in_the_sums_stays() -> None:
    noise = CorrelatedNoise(Keys.from_seed(0), Banded((1.0, -0.9)))
    only, both = zeros(), {n: torch.full(s, 1000.0, dtype=torch.float64) for n, s in SHAPES.items()}
    noise.add_(only, 3, 1.0)
    noise.add_(both, 3, 1.0)
    for name in SHAPES:
        torch.testing.assert_close(both[name] - 1000, only[name], rtol=0, atol=1e-12)


def test_correlated_noise_has_the_covariance_of_c_inverse() -> None:
    strategy = Banded((1.0, -0.9))
    noise = CorrelatedNoise(Keys.from_seed(1), strategy)
    n = 200_000
    rows = []
    for step in range(T):
        sums = {"w": torch.zeros(n)}
        noise.add_(sums, step, 1.0)
        rows.append(sums["w"].double().numpy())
    observed = np.cov(np.stack(rows))
    inverse = strategy.inverse()
    np.testing.assert_allclose(observed, inverse @ inverse.T, atol=5 * 2.6 / math.sqrt(n))


def test_a_new_generation_changes_only_rows_from_its_first_step() -> None:
    strategy, keys = Banded((1.0, -0.9)), Keys.from_seed(2)
    old, new = CorrelatedNoise(keys, strategy), CorrelatedNoise(keys, strategy)
    new.rekey(5)
    assert new.first_steps == [0, 5]
    z0 = dense_z(keys.subkey("noise", 0), "head")
    z1 = dense_z(keys.subkey("noise", 1), "head")
    mixed = strategy.inverse() @ np.concatenate([z0[:5], z1[5:]])
    for step in range(T):
        a, b = zeros(), zeros()
        old.add_(a, step, 1.0)
        new.add_(b, step, 1.0)
        assert all(torch.equal(a[n], b[n]) == (step < 5) for n in SHAPES)
        np.testing.assert_allclose(b["head"].numpy(), mixed[step], rtol=0, atol=1e-14)


def test_the_latest_generation_that_reaches_a_row_covers_it() -> None:
    noise = CorrelatedNoise(Keys.from_seed(2), Banded((1.0,)))
    noise.rekey(6)
    noise.rekey(3)  # further back than before: rows 6 and up too are new once more
    noise.rekey(3)
    noise.rekey(8)
    assert [noise.generation(row) for row in range(T)] == [0, 0, 0, 3, 3, 3, 3, 3, 4]
    for step in (-1, T, 1.5):
        with pytest.raises(SordinoError, match="step="):
            noise.rekey(step)  # type: ignore[arg-type]


def test_purposes_have_noise_of_their_own() -> None:
    keys = Keys.from_seed(0)
    a, b = zeros(), zeros()
    CorrelatedNoise(keys, Banded((1.0,))).add_(a, 0, 1.0)
    CorrelatedNoise(keys, Banded((1.0,)), purpose="noise-residual").add_(b, 0, 1.0)
    assert abs(np.corrcoef(a["head"].numpy(), b["head"].numpy())[0, 1]) < 0.08
    for purpose in ("sampling", "other"):
        with pytest.raises(SordinoError, match=f"purpose='{purpose}'"):
            CorrelatedNoise(keys, Banded((1.0,)), purpose=purpose)


def test_a_step_past_the_plan_is_refused() -> None:
    noise = CorrelatedNoise(Keys.from_seed(0), Banded((1.0,)))
    sums = zeros()
    with pytest.raises(StateError, match=f"step={T}: the noise was planned for {T} steps"):
        noise.add_(sums, T, 1.0)
    with pytest.raises(SordinoError, match="step="):
        noise.add_(sums, -1, 1.0)
    assert not any(s.any() for s in sums.values())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(SordinoError, match="scale="):
        CorrelatedNoise(Keys.from_seed(0), Banded((1.0,))).add_(zeros(), 0, scale)


def test_scale_zero_adds_nothing() -> None:
    sums = zeros()
    CorrelatedNoise(Keys.from_seed(0), Banded((1.0,))).add_(sums, 0, 0.0)
    assert not any(s.any() for s in sums.values())


def test_the_state_has_no_secret_and_goes_round() -> None:
    keys = Keys.from_seed(0)
    noise = CorrelatedNoise(keys, Banded((1.0, -0.9)))
    noise.rekey(4)
    text = json.dumps(noise.state_dict())
    assert keys.subkey("noise").hex() not in text and json.loads(text)["first_steps"] == [0, 4]
    again = CorrelatedNoise(keys, Banded((1.0, -0.9)))
    again.load_state_dict(json.loads(text))
    a, b = zeros(), zeros()
    noise.add_(a, 4, 1.0)
    again.add_(b, 4, 1.0)
    assert all(torch.equal(a[n], b[n]) for n in SHAPES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"purpose": "noise-residual"}, "purpose='noise-residual', this run 'noise'"),
        ({"strategy": "other"}, "strategy='other'"),
        ({"steps": 5}, "steps=5, this run 9"),
        ({"first_steps": []}, "damaged"),
        ({"first_steps": [1]}, "damaged"),
        ({"first_steps": [0, 99]}, "damaged"),
        ({"first_steps": [0, "4"]}, "damaged"),
        ({"first_steps": None}, "damaged"),
    ],
)
def test_a_foreign_or_damaged_state_is_refused(change: dict[str, object], says: str) -> None:
    noise = CorrelatedNoise(Keys.from_seed(0), Banded((1.0,)))
    with pytest.raises(StateError, match=says):
        noise.load_state_dict({**noise.state_dict(), **change})


def test_a_destroyed_key_adds_no_noise_silently() -> None:
    keys = Keys.fresh()
    noise = CorrelatedNoise(keys, Banded((1.0,)))
    keys.destroy()
    with pytest.raises(StateError, match="destroyed"):
        noise.add_(zeros(), 0, 1.0)
