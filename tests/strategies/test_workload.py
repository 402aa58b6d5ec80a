"""Workloads against what an optimiser does with the noise, and problems against their parts."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from sordino.budget import Participation
from sordino.errors import SordinoError
from sordino.strategies import PREFIX_SUM, Problem, Workload, make_strategy
from sordino.strategies.toeplitz_errors import error_rows

N = 23
RATES = tuple(np.random.default_rng(0).uniform(0.1, 2.0, N).tolist())
CASES = [
    Workload(),
    Workload(momentum=0.9),
    Workload(shrink=0.9),
    Workload(shrink=0.0),
    Workload(momentum=0.5, shrink=0.97),
    Workload(momentum=0.9, shrink=0.9),  # a double pole
    Workload(learning_rates=RATES),
    Workload(0.8, 0.95, RATES),
    Workload(0.8, 0.95, (0.3,) * N),
]


def ids(workload: Workload) -> str:
    return f"β{workload.momentum:g} α{workload.shrink:g} {'η' if workload.learning_rates else ''}"


def by_definition(workload: Workload, n: int) -> np.ndarray:
    """``A_ts = η_s Σ_{j≤t−s} α^{t−s−j} β^j``."""
    rates = np.ones(n) if workload.learning_rates is None else np.array(workload.learning_rates)
    a = np.zeros((n, n))
    for t in range(n):
        for s in range(t + 1):
            i = t - s
            a[t, s] = rates[s] * sum(workload.shrink ** (i - j) * workload.momentum**j for j in range(i + 1))
    return a


@pytest.mark.parametrize("workload", CASES, ids=ids)
class TestAgainstDefinition:
    def test_matrix_products_and_coefficients(self, workload: Workload) -> None:
        a = by_definition(workload, N)
        np.testing.assert_allclose(workload.dense(N), a, rtol=1e-12, atol=1e-14)
        for x in (np.random.default_rng(1).normal(size=N), np.random.default_rng(1).normal(size=(N, 3))):
            np.testing.assert_allclose(workload.apply(x), a @ x, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(workload.apply_transposed(x), a.T @ x, rtol=1e-10, atol=1e-12)
        plain = by_definition(Workload(workload.momentum, workload.shrink), N)
        np.testing.assert_allclose(workload.coefficients(N), plain[:, 0], rtol=1e-12)
        assert workload.is_toeplitz == all(np.ptp(np.diagonal(a, -i)) < 1e-15 for i in range(N))
        assert workload.is_prefix_sum == np.array_equal(a, np.tril(np.ones((N, N))))

    def test_what_scales_the_columns_joins_the_schedule(self, workload: Workload) -> None:
        weights = np.random.default_rng(2).uniform(0.5, 2.0, N)
        np.testing.assert_allclose(
            workload.scaled(weights).dense(N), by_definition(workload, N) * weights, rtol=1e-12, atol=1e-14
        )

    def test_fewer_steps_than_the_schedule_has(self, workload: Workload) -> None:
        np.testing.assert_allclose(workload.dense(9), by_definition(workload, N)[:9, :9], rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("p", [1, 2, 7, N])
    def test_error_rows_of_any_toeplitz_inverse(self, workload: Workload, p: int) -> None:
        rng = np.random.default_rng(p)
        w = rng.normal(size=p)
        full = sum(w[lag] * np.eye(N, k=-lag) for lag in range(p))
        for changed in (workload, workload.scaled(np.r_[np.ones(N - 3), 0.5, 2.0, 3.0])):  # late rates: by rows
            rows = np.square(changed.dense(N) @ full).sum(axis=1)
            np.testing.assert_allclose(error_rows(w, N, changed), rows, rtol=1e-10)


def test_it_is_what_sgd_with_momentum_and_decay_sums() -> None:
    """Decoupled weight decay and a constant rate: the weights are ``−η A u``."""
    u = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    path = []
    for step in range(N):
        with torch.no_grad():
            weight.mul_(1 - 0.1 * 0.5)
        weight.grad = u[step].reshape(1)
        optimizer.step()
        path.append(float(weight.detach()))
    workload = Workload(momentum=0.9, shrink=1 - 0.1 * 0.5, learning_rates=(0.1,) * N)
    np.testing.assert_allclose(path, -workload.apply(u.numpy()), rtol=1e-10)


def test_a_schedule_without_momentum_is_what_sgd_sums() -> None:
    u = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    path = []
    for step in range(N):
        optimizer.param_groups[0]["lr"] = RATES[step]
        weight.grad = u[step].reshape(1)
        optimizer.step()
        path.append(float(weight.detach()))
    np.testing.assert_allclose(path, -Workload(learning_rates=RATES).apply(u.numpy()), rtol=1e-10)


def test_long_schedules_are_linear() -> None:
    n = 200_000
    workload = Workload(0.9, 0.9999, tuple(np.linspace(1.0, 0.0, n, endpoint=False).tolist()))
    start = time.process_time()
    rows = make_strategy("lambda-cgd:0.9", n).error_rows(workload)
    assert rows.shape == (n,) and time.process_time() - start < 3.0
    head = make_strategy("lambda-cgd:0.9", 60).error_rows(workload)
    np.testing.assert_allclose(rows[:60], head, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum=1 never forgets"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"momentum": 2}, "momentum=2"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"shrink": 1.1}, "shrink=1.1"),
        ({"shrink": True}, "shrink=True"),
        ({"learning_rates": ()}, "learning_rates"),
        ({"learning_rates": (0.0, 0.0)}, "not all of them 0"),
        ({"learning_rates": (1.0, -1.0)}, "at least 0"),
        ({"learning_rates": (1.0, float("inf"))}, "finite"),
    ],
)
def test_bad_workloads(options: dict[str, object], message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        Workload(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_schedule_that_is_too_short() -> None:
    with pytest.raises(SordinoError, match="3 entries for 4 steps"):
        make_strategy("lambda-cgd:0.5", 4).rmse(Workload(learning_rates=(1.0, 2.0, 3.0)))


class TestProblem:
    def test_loss_is_error_times_noise(self) -> None:
        p = Participation(steps=20, epochs=4, separation=5)
        s, momentum = make_strategy("bisr:3", 20), Workload(momentum=0.9)
        assert Problem(20, p).loss(s) == pytest.approx(s.rmse() * s.sensitivity(p))
        assert Problem(20, p, momentum, "max-se").loss(s) == pytest.approx(s.max_se(momentum) * s.sensitivity(p))
        assert Problem(20, p, noise_needed=lambda candidate: 3.0).loss(s) == pytest.approx(3.0 * s.rmse())
        assert Problem(20, p).error(s) == s.rmse(PREFIX_SUM) and Problem(20, p).noise(s) == s.sensitivity(p)

    def test_one_participation_unless_said(self) -> None:
        assert Problem(20).participations == Participation(steps=20, epochs=1, separation=20)

    def test_bad_problems(self) -> None:
        for steps in (0, -1, 2.5, True, "ten"):
            with pytest.raises(SordinoError, match="steps="):
                Problem(steps)  # type: ignore[arg-type]
        with pytest.raises(SordinoError, match="choose 'rmse', 'max-se' or 'curvature'"):
            Problem(3, objective="mse")  # type: ignore[arg-type]
