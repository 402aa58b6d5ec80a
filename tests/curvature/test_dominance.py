"""ρ(H, Ĥ) by three routes that agree, 0/0 = 0, and logistic regression, where the bound is a theorem."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from tests.curvature.common import build, losses
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import SordinoError
from sordino.curvature.dominance import (
    PrivateNumber,
    dominance,
    dominance_of_matrices,
    lobpcg,
    private_dominance,
)
from sordino.curvature.hessian import HessianOperator
from sordino.curvature.lanczos import Lanczos
from sordino.curvature.operators import Dense
from sordino.curvature.picture import draw_dominance
from sordino.curvature.prepare import prepare
from sordino.curvature.upper import Upper

D = 40


def symmetric(values: np.ndarray, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return (q * torch.from_numpy(values)) @ q.T


H = symmetric(np.linspace(-1, 3, D), 1)
HAT = symmetric(np.geomspace(1e-3, 5, D), 2)
RHO = float(scipy.linalg.eigh(H.numpy(), HAT.numpy(), eigvals_only=True)[-1])


def test_three_routes_to_one_number() -> None:
    assert dominance_of_matrices(H, HAT) == pytest.approx(RHO, rel=1e-9)
    found = dominance(Dense(H), Upper.exact(Dense(HAT)), tolerance=1e-9)
    assert found.value == pytest.approx(RHO, rel=1e-8) and not found.dominates and found.products <= D
    by_products = lobpcg(Dense(H), Dense(HAT), tolerance=1e-5)
    assert by_products.value == pytest.approx(RHO, rel=1e-6) and by_products.value <= RHO * (1 + 1e-9)
    assert dominance(Dense(H), Dense(HAT), tolerance=1e-5).value == pytest.approx(by_products.value, rel=1e-6)
    bound = Dense(HAT * RHO)
    assert dominance_of_matrices(H, HAT * RHO) == pytest.approx(1) and dominance(Dense(H), Upper.exact(bound)).dominates
    assert float(torch.linalg.eigvalsh(HAT * RHO - H)[0]) == pytest.approx(0, abs=1e-9)


def test_a_bound_of_low_rank_and_a_rest() -> None:
    top = Lanczos(Dense(HAT), 10).run(vectors=True)
    upper = Upper.of(top, rest=0.05)
    values, vectors = torch.linalg.eigh(HAT)
    values[:-10] = 0.05
    whole = (vectors * values) @ vectors.T
    v = torch.randn(D, dtype=torch.float64)
    torch.testing.assert_close(upper.matvec(v), whole @ v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        upper.scaled(upper.scaled(v, -0.5), -0.5), torch.linalg.solve(whole, v), rtol=1e-3, atol=1e-3
    )
    assert dominance(Dense(H), upper).value == pytest.approx(dominance_of_matrices(H, whole), rel=1e-3)


def brute_force(h: Tensor, u: Tensor, tries: int = 20000) -> float:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(len(h), tries, generator=generator, dtype=torch.float64)
    return float((((h @ v) * v).sum(0) / ((u @ v) * v).sum(0)).max())


def test_where_the_bound_vanishes() -> None:
    """0/0 = 0, x/0 = ∞, −x/0 = −∞, and v that mix the inside and the outside of the null space."""

    def rho(h: list[list[float]], u: list[float]) -> float:
        return dominance_of_matrices(torch.tensor(h), torch.diag(torch.tensor(u)))

    assert rho([[-1, 0], [0, 0]], [2, 0]) == 0  # the direction of 0/0 beats −1/2
    assert rho([[-1, 0], [0, -1]], [2, 0]) == pytest.approx(-0.5)
    assert rho([[1, 0], [0, 1e-3]], [2, 0]) == math.inf
    assert rho([[1, 0.1], [0.1, 0]], [2, 0]) == math.inf  # large along the second axis, never paid for
    assert rho([[1, 1], [1, -1]], [2, 0]) == pytest.approx(1)  # v = (1, 1): (1 + 2 − 1)/2
    assert rho([[0, 0], [0, 0]], [0, 0]) == 0 and rho([[-1, 0], [0, -1]], [0, 0]) == -math.inf
    h, u = symmetric(np.linspace(-2, 1, 4), 3), symmetric(np.array([1.0, 2.0, 3.0, 0.0]), 4)
    null = torch.linalg.eigh(u)[1][:, 0]
    if float(null @ h @ null) < 0:
        assert brute_force(h, u) <= dominance_of_matrices(h, u) < brute_force(h, u) * 1.2 + 1e-6
    low = symmetric(np.r_[np.zeros(20), np.geomspace(0.1, 5, 20)], 2)
    range_ = torch.linalg.eigh(low)[1][:, 20:]
    inside = range_ @ symmetric(np.linspace(-1, 3, 20), 5) @ range_.T
    expected = dominance_of_matrices(inside, low)
    assert 0 < expected < math.inf
    assert lobpcg(Dense(inside), Dense(low), tolerance=1e-7).value == pytest.approx(expected, rel=1e-5)
    assert lobpcg(Dense(H), Dense(low)).value == math.inf
    assert lobpcg(Dense(torch.zeros(5, 5)), Dense(torch.zeros(5, 5))).value == 0
    with pytest.raises(SordinoError, match="Ĥ is 0 in some directions.*rest="):
        dominance(Dense(H), Upper.exact(Dense(low)))
    with pytest.raises(SordinoError, match="H has 40 rows and Ĥ 5"):
        dominance(Dense(H), Dense(torch.eye(5)))


# -- logistic regression ---------------------------------------------------------------------------------------------


def logistic(n: int, d: int) -> tuple[nn.Module, TensorDataset, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n, d, dtype=torch.float64) * torch.logspace(0, -1.5, d)
    y = (x @ torch.randn(d, dtype=torch.float64) > 0).double()
    model = nn.Linear(d, 1, bias=False).double()
    return model, TensorDataset(x, y), x.T @ x / (4 * n)


def binary(model: nn.Module):  # type: ignore[no-untyped-def]
    return lambda x, y: F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")


@pytest.mark.parametrize(("n", "d"), [(80, 12), (10, 15)])
def test_logistic_regression_is_bounded_everywhere(n: int, d: int) -> None:
    """NoiseCurve 5.2: Ĥ = XᵀX/(4N) dominates every Hessian XᵀDX/N of the average loss, whatever weights and labels."""
    model, data, upper = logistic(n, d)
    public = sordino.Public(data, binary(model), "given", batch_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    torch.nn.init.zeros_(model.weight)
    seen = []
    for _ in range(6):
        hessian = HessianOperator(model, public).dense()
        probability = model(data.tensors[0])[:, 0].sigmoid().detach()
        weights = probability * (1 - probability)
        x = data.tensors[0]
        torch.testing.assert_close(hessian, x.T @ (weights[:, None] * x) / n)
        seen.append(dominance_of_matrices(hessian, upper))
        assert seen[-1] <= 4 * float(weights.max()) + 1e-9 <= 1 + 1e-9
        assert float(torch.linalg.eigvalsh(upper - hessian)[0]) >= -1e-12
        assert dominance(Dense(hessian), Dense(upper), tolerance=1e-6).value == pytest.approx(seen[-1], rel=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            binary(model)(*data.tensors).mean().backward()
            optimizer.step()
    assert seen[0] == pytest.approx(1) and seen[-1] < 0.9  # attained at 0, where random labels lead


def test_random_labels_find_the_bound() -> None:
    """A logistic regression trained on random labels has, at the end, nearly the Hessian that bounds all others."""
    model, data, upper = logistic(2000, 6)
    labelled = sordino.Public(
        TensorDataset(data.tensors[0]),
        lambda x, y: F.binary_cross_entropy_with_logits(model(x), y, reduction="none")[:, 0],
        "random",
        multilabel=True,
        batch_size=500,
    )
    with torch.no_grad():
        model.weight.fill_(3.0)
    ready = prepare(model, labelled, epochs=60, learning_rate=1.0, batch_size=1000, show=False)
    estimate = HessianOperator(model, labelled, at=ready).dense()
    assert dominance_of_matrices(upper, estimate) < 1.02  # every Hessian is below 1.02 of the estimate
    start = HessianOperator(model, labelled).dense()
    assert dominance_of_matrices(upper, start) > 1.5


# -- private numbers -------------------------------------------------------------------------------------------------


def test_the_dominance_of_private_data_is_marked(tmp_path: Path) -> None:
    model, public = build("mlp", n=40)
    upper = Upper.exact(HessianOperator(model, public), rest=0.01)
    other = TensorDataset(torch.randn(30, 5), torch.randint(3, (30,)))
    number = private_dominance(model, losses(model), other, upper)
    assert isinstance(number, PrivateNumber) and not isinstance(number, float)
    assert "private: computed from private data without noise, covered by no guarantee" in str(number)
    private = sordino.Public(other, losses(model), "given")
    exact = dominance_of_matrices(HessianOperator(model, private).dense(), upper.dense())
    assert number.value == pytest.approx(exact, rel=1e-2)
    tracks = {"private": [(0, number.value), (200, 1.1)], "without noise": [(0, 0.8), (200, 0.9)]}
    assert draw_dominance(tracks, tmp_path / "rho.png").stat().st_size > 10_000


def test_bad_bounds() -> None:
    with pytest.raises(SordinoError, match=r"\(2,\) eigenvalues need as many vectors, as rows, not \(3, 5\)"):
        Upper(torch.ones(2), torch.eye(5)[:3])
    with pytest.raises(SordinoError, match="rest=-1"):
        Upper(torch.ones(2), torch.eye(5)[:2], rest=-1)
    with pytest.raises(SordinoError, match="without vectors"):
        Upper.of(Lanczos(Dense(HAT), 2).run(), 0.1)
