"""Both equations against what gradient descent on a quadratic does, and the factors against dense matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sordino import SordinoError, Unsupported
from sordino.curvature.measure import compressed, gauss
from sordino.curvature.objective import CurvatureWorkload, curvature_score, late_effects
from sordino.curvature.spectrum import Spectrum
from sordino.strategies import make_strategy

SMALL = Spectrum.given([1.9, 1.2, 0.7, 0.2, 0.01, 0.0])
WIDE = Spectrum.given(np.r_[8.0, 3.0, 6 * np.arange(1, 3001) ** -1.3, np.full(50, 1e-6)])
STRATEGIES = ["identity", "lambda-cgd:0.9", "lambda-cgd-normalized:0.8", "bisr:4", "band-mf:4"]


def quadratic(
    mu: np.ndarray, steps: int, noise: np.ndarray, make: Callable[[Any], Any], rates: np.ndarray
) -> np.ndarray:
    """Torch's own optimizer on ½ Σ μ_i w_i², from 0, with noise (T × d) added to the gradients: all iterates."""
    w = torch.zeros(len(mu), dtype=torch.float64, requires_grad=True)
    optimizer = make([w])
    iterates = []
    for t in range(steps):
        w.grad = torch.tensor(mu) * w.detach() + torch.from_numpy(noise[t])
        for group in optimizer.param_groups:
            group["lr"] = float(rates[t])
        optimizer.step()
        iterates.append(w.detach().numpy().copy())
    return np.array(iterates)


def exactly(workload: CurvatureWorkload, inverse: np.ndarray, make: Callable[[Any], Any]) -> tuple[float, float]:
    """(E[L(w_T)], 1/T Σ_t E‖∇L(w_t)‖²) from optimum and unit noise: descent is linear, so impulses say it all."""
    mu, steps = workload.spectrum.eigenvalues, len(inverse)
    rates = workload.rates(steps)
    loss = gradients = 0.0
    for column in inverse.T:  # z_j = 1 in every coordinate: coordinates do not mix, nor do the z_j
        noise = np.tile(column[:, None], (1, len(mu)))
        iterates = quadratic(mu, steps, noise, make, rates)
        loss += float((0.5 * mu * iterates[-1] ** 2).sum())
        gradients += float((mu**2 * iterates**2).sum()) / steps
    return loss, gradients


CASES = [
    {},
    {"momentum": 0.8},
    {"weight_decay": 0.05},
    {"schedule": tuple(np.linspace(1.0, 0.1, 9))},
    {"momentum": 0.5, "weight_decay": 0.02, "schedule": (0.2, 0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.2, 0.0)},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("name", ["identity", "lambda-cgd:0.9", "band-mf:4"])
def test_the_first_equation_is_what_descent_does(name: str, options: dict[str, Any]) -> None:
    """E[L(w̃_T)] − E[L(w_T)] = η²σ²/2 · Tr(X⁻¹W), with momentum, weight decay and schedules too."""
    strategy = make_strategy(name, 9)
    workload = CurvatureWorkload(SMALL, 0.8, cap=False, **options)

    def make(parameters: Any) -> torch.optim.Optimizer:
        picked = {k: v for k, v in options.items() if k != "schedule"}
        return torch.optim.SGD(parameters, lr=0.8, **picked)

    loss, _ = exactly(workload, strategy.inverse(), make)
    assert workload.expected(strategy, 1.0) == pytest.approx(loss, rel=1e-10)
    assert workload.expected(strategy, 0.3) == pytest.approx(0.09 * loss, rel=1e-10)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_second_equation_is_what_descent_does(name: str) -> None:
    """1/T Σ E‖∇L(w̃_t)‖² = const + η²σ²·Tr(X⁻¹W₂); the matrix the paper prints is far from it."""
    strategy = make_strategy(name, 9)
    workload = CurvatureWorkload(SMALL, 0.8, "gradient", cap=False)
    _, gradients = exactly(workload, strategy.inverse(), lambda p: torch.optim.SGD(p, lr=0.8))
    assert workload.expected(strategy, 1.0) == pytest.approx(gradients, rel=1e-10)
    printed = CurvatureWorkload(SMALL, 0.8, "gradient-printed", cap=False)
    assert abs(printed.expected(strategy, 1.0) / gradients - 1) > 0.2


def test_both_equations_by_random_noise() -> None:
    """The same by simulation: many runs, from a start that is not the optimum, with the noise of a λCGD run."""
    rng = np.random.default_rng(0)
    mu, eta, steps, sigma, runs = SMALL.eigenvalues, 0.6, 12, 0.3, 200_000
    strategy = make_strategy("lambda-cgd:0.8", steps)
    z = np.einsum("ts,rsd->rtd", strategy.inverse(), sigma * rng.standard_normal((runs, steps, len(mu))))
    noisy, clean = np.ones((runs, len(mu))), np.ones(len(mu))
    noisy_gradients = clean_gradients = 0.0
    for t in range(steps):
        noisy, clean = noisy - eta * (mu * noisy + z[:, t]), clean - eta * mu * clean
        noisy_gradients = noisy_gradients + (mu**2 * noisy**2).sum(1) / steps
        clean_gradients += float((mu**2 * clean**2).sum()) / steps
    for equation, seen in [
        ("loss", 0.5 * (mu * noisy**2).sum(1) - 0.5 * float((mu * clean**2).sum())),
        ("gradient", noisy_gradients - clean_gradients),
    ]:
        expected = CurvatureWorkload(SMALL, eta, equation, cap=False).expected(strategy, sigma)  # type: ignore[arg-type]
        assert abs(seen.mean() - expected) < 4 * seen.std() / np.sqrt(runs)
        assert seen.std() / np.sqrt(runs) < 0.02 * expected


def plain_w(workload: CurvatureWorkload, steps: int) -> np.ndarray:
    """VᵀMV as it is written, over all eigenvalues."""
    mu = workload.eigenvalues()
    late = np.arange(steps - 1, -1, -1)
    V = (1 - workload.learning_rate * mu)[:, None] ** late
    return V.T @ (mu[:, None] * V)


@pytest.mark.parametrize("eta", [0.01, 0.125, 0.2, 0.25])
@pytest.mark.parametrize("cap", [True, False])
def test_the_factor_is_the_formula(eta: float, cap: bool) -> None:
    """To 1e-10 in the trace and in the objective, at a rank of a few tens, ημ = 2 and 0⁰ included."""
    workload = CurvatureWorkload(WIDE, eta, cap=cap)
    true, q = plain_w(workload, 250), workload.factor(250)
    assert q.shape[1] <= 45
    assert np.trace(true) == pytest.approx(float((q**2).sum()), rel=1e-12)
    assert float(np.abs(q @ q.T - true).max()) < 1e-11 * np.trace(true)
    for name in STRATEGIES:
        strategy = make_strategy(name, 250)
        x = strategy.dense().T @ strategy.dense()
        objective = float(np.trace(np.linalg.solve(x, true)))
        assert workload.score(strategy) == pytest.approx(objective, rel=1e-10)
    if eta == 0.125 or (cap and eta > 0.125):
        assert (np.abs(1 - eta * workload.eigenvalues()).min() < 1e-15) and true[-1, -1] > true[-2, -2]


def test_the_hankel_form() -> None:
    w = plain_w(CurvatureWorkload(WIDE, 0.1), 40)
    for n in range(-39, 40):
        anti = np.diagonal(w[::-1], n)
        np.testing.assert_allclose(anti, anti[0], rtol=1e-9)


@pytest.mark.parametrize("eta", [0.05, 0.25])
def test_the_second_matrix_is_the_formula(eta: float) -> None:
    steps = 60
    workload = CurvatureWorkload(WIDE, eta, "gradient", cap=False)
    mu, x = workload.eigenvalues(), 1 - eta * workload.eigenvalues()
    j = np.arange(steps)
    lag, late = np.abs(np.subtract.outer(j, j)), steps - np.maximum.outer(j, j)
    true, printed = np.zeros((steps, steps)), np.zeros((steps, steps))
    for m, r in zip(mu, x, strict=True):
        inner = late if abs(r) == 1 else (1 - r ** (2.0 * late)) / (1 - r * r)
        true += m * m * np.power(r, lag) * inner / steps
        v = r ** (steps - 1.0 - j)
        printed += m * m * np.outer(v, v) * late / steps
    np.testing.assert_allclose(workload.dense(steps), true, atol=1e-9 * true.max())
    q = workload.factor(steps)
    np.testing.assert_allclose(q @ q.T, true, atol=1e-10 * true.max())
    other = CurvatureWorkload(WIDE, eta, "gradient-printed", cap=False)
    np.testing.assert_allclose(other.dense(steps), printed, atol=1e-9 * printed.max())


@pytest.mark.parametrize("options", CASES[1:], ids=str)
def test_compression_with_momentum_and_schedules(options: dict[str, Any]) -> None:
    steps = 300
    if "schedule" in options:
        options = {**options, "schedule": tuple(0.5 + 0.5 * np.cos(np.linspace(0, np.pi, steps)))}
    for cap in (True, False):
        workload = CurvatureWorkload(WIDE, 0.2, cap=cap, **options)
        mu = workload.eigenvalues()
        V = late_effects(mu + workload.weight_decay, workload.rates(steps), workload.momentum) / 0.2
        true = V.T @ (mu[:, None] * V)
        q = workload.factor(steps)
        assert float(np.abs(q @ q.T - true).max()) < 1e-10 * np.trace(true)
        assert np.trace(true) == pytest.approx(float((q**2).sum()), rel=1e-11)


def test_a_constant_schedule_is_none() -> None:
    one = CurvatureWorkload(WIDE, 0.1, schedule=(1.0,) * 50)
    two = CurvatureWorkload(WIDE, 0.1)
    np.testing.assert_allclose(one.dense(50), two.dense(50), rtol=1e-10)
    np.testing.assert_allclose(
        late_effects(np.array([0.3, 1.0]), np.full(5, 1.0), 1e-300),
        late_effects(np.array([0.3, 1.0]), np.full(5, 1.0)),
        atol=1e-200,
    )


def test_the_cap_only_matters_above_it() -> None:
    assert CurvatureWorkload(WIDE, 0.2).eigenvalues().max() == 5.0
    assert CurvatureWorkload(WIDE, 0.2, cap=False).eigenvalues().max() == 8.0
    low = CurvatureWorkload(WIDE, 0.1)
    np.testing.assert_array_equal(low.dense(9), CurvatureWorkload(WIDE, 0.1, cap=False).dense(9))


def test_a_long_run_and_a_long_spectrum_in_seconds() -> None:
    spectrum = Spectrum.given(5 * np.arange(1, 200_001) ** -1.1)
    began = time.process_time()
    q = CurvatureWorkload(spectrum, 0.15).factor(10_000)
    assert time.process_time() - began < 20  # about 2 s
    assert q.shape[0] == 10_000 and q.shape[1] <= 45
    x = (1 - 0.15 * spectrum.eigenvalues) ** 2
    trace = spectrum.eigenvalues @ ((1 - x**10_000) / (1 - x))
    assert float((q**2).sum()) == pytest.approx(trace, rel=1e-11)


def test_the_score_and_its_noise() -> None:
    strategy = make_strategy("lambda-cgd:0.9", 40)
    base = curvature_score(strategy, WIDE, 0.1)
    assert curvature_score(strategy, WIDE, 0.1, 3.0) == pytest.approx(9 * base)
    assert curvature_score(strategy, WIDE, 0.1, momentum=0.5) != pytest.approx(base)
    workload = CurvatureWorkload(WIDE, 0.1)
    assert workload.expected(strategy, 0.2) == pytest.approx(0.5 * 0.1**2 * 0.2**2 * base)
    assert workload.factor(40) is workload.factor(40)


@pytest.mark.parametrize("name", [*STRATEGIES, "band-mf-general:3"])
def test_solve_transposed(name: str) -> None:
    strategy = make_strategy(name, 30)
    z = np.random.default_rng(0).standard_normal((30, 4))
    np.testing.assert_allclose(strategy.dense().T @ strategy.solve_transposed(z), z, atol=1e-10)
    np.testing.assert_allclose(strategy.solve_transposed(z[:, 0]), strategy.solve_transposed(z)[:, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"learning_rate": 0.3}, r"learning rate 0.3 times the largest eigenvalue 8 is 2.4, above 2.*of at most 0.25"),
        ({"learning_rate": 0.3, "cap": True}, "such steps diverge"),
        ({"learning_rate": 0.45, "momentum": 0.5}, "is 3.6, above 3"),
        ({"learning_rate": 0.2, "weight_decay": 3.0}, "largest eigenvalue 11 is 2.2"),
        ({"learning_rate": 0.1, "schedule": (1.0, 3.0)}, "learning rate 0.3 times"),
        ({"learning_rate": 0.0}, "never moves"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be"),
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"equation": "third"}, "equation='third' is not known"),
        ({"schedule": (0.0, 0.0)}, "schedule must be"),
    ],
)
def test_bad_requests(options: dict[str, Any], text: str) -> None:
    spectrum = Spectrum.given([8.0, 1.0])
    with pytest.raises(SordinoError, match=text):
        CurvatureWorkload(spectrum, **{"learning_rate": 0.1, **options})


def test_what_is_not_derived_is_refused() -> None:
    with pytest.raises(Unsupported, match="derived for plain gradient descent"):
        CurvatureWorkload(SMALL, 0.1, "gradient", momentum=0.9)
    with pytest.raises(Unsupported, match="no low rank"):
        CurvatureWorkload(SMALL, 0.1, "gradient").factor(7000)
    with pytest.raises(SordinoError, match="schedule has 2 entries for 3 steps"):
        CurvatureWorkload(SMALL, 0.1, schedule=(1.0, 0.5)).factor(3)


def test_gauss_rules() -> None:
    rng = np.random.default_rng(1)
    places, weights = rng.uniform(1, 2, 500), rng.uniform(0, 1, 500)
    x, w = gauss(places, weights)
    assert len(x) == 12 and (w > 0).all()
    for n in range(24):
        assert w @ x**n == pytest.approx(weights @ places**n, rel=1e-12)
    x, w = gauss(np.r_[1.0, 1.0, 3.0], np.r_[1.0, 2.0, 5.0])
    assert x.tolist() == [1, 3] and w.tolist() == [3, 5]
    x, w = gauss(np.repeat(np.linspace(1, 2, 14), 3), np.r_[np.ones(6), np.zeros(36)])  # weights at two places only
    assert len(x) <= 12 and w.sum() == pytest.approx(6)
    x, w = compressed(rng.uniform(0, 4, 3000), np.ones(3000), 1e-3, 4.0)
    assert w.sum() == pytest.approx(3000) and len(x) <= 12 * 26
