"""Poisson sampling: PLD and RDP against closed forms, quadrature, simulation and published values."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from sordino import Budget, Unsupported
from sordino.accounting import account, calibrate, gaussian_delta, gaussian_epsilon
from sordino.accounting.subsampled import PLDCurve, RDPCurve
from sordino.budget import Schedule
from sordino.plan import plan
from sordino.sampling import make_sampling
from sordino.strategies import make_strategy

from .reference import subsampled_delta, two_steps_delta

CASES = [(0.01, 0.6), (0.1, 1.0), (0.5, 0.8), (0.9, 2.0), (1e-3, 0.4), (0.25, 0.3)]


@pytest.mark.parametrize(("q", "sigma"), CASES)
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
def test_one_step_against_the_closed_form(q: float, sigma: float, epsilon: float) -> None:
    truth = max(subsampled_delta(q, sigma, epsilon))
    curve = PLDCurve(q, sigma, 1)
    assert truth <= curve.delta(epsilon) <= truth * 1.005 + 1.1e-11
    assert PLDCurve(q, sigma, 1, coarse=True).delta(epsilon) >= truth
    assert RDPCurve(q, sigma, 1).delta(epsilon) >= truth
    if truth > 1e-8:
        assert curve.epsilon(truth) >= epsilon - 1e-9


@pytest.mark.parametrize(("q", "sigma"), [(0.1, 1.0), (0.5, 0.8), (0.9, 2.0)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
def test_two_steps_against_quadrature(q: float, sigma: float, epsilon: float) -> None:
    truth = max(two_steps_delta(q, sigma, epsilon))
    assert truth * (1 - 1e-4) <= PLDCurve(q, sigma, 2).delta(epsilon) <= truth * 1.005 + 1e-10


def test_many_steps_against_simulation() -> None:
    q, sigma, steps, epsilon = 0.05, 1.0, 100, 0.7
    rng = np.random.default_rng(0)
    take_part = rng.random((40_000, steps)) < q
    x = rng.normal(size=take_part.shape)

    def loss(x: np.ndarray) -> np.ndarray:
        return np.log1p(q * np.expm1(x / sigma - 0.5 / sigma**2)).sum(axis=1)

    remove = np.maximum(0, 1 - np.exp(epsilon - loss(x + take_part / sigma)))
    add = np.maximum(0, 1 - np.exp(epsilon + loss(x)))
    found = PLDCurve(q, sigma, steps).delta(epsilon)
    worst = max((remove, add), key=lambda g: g.mean())
    assert found == pytest.approx(worst.mean(), abs=4 * worst.std() / 200)


def test_rate_one_is_the_gaussian_mechanism() -> None:
    p = plan(noise_multiplier=3.0, delta=1e-6, examples=64, batch_size=64, epochs=20)
    epsilon = p.account().epsilon
    assert gaussian_delta(epsilon, math.sqrt(20) / 3) == pytest.approx(1e-6, rel=1e-6)
    near = PLDCurve(1 - 1e-9, 3.0, 20).epsilon(1e-6)  # and the PLD arrives there
    assert epsilon == pytest.approx(near, rel=1e-3)


# DP-λCGD's table: T = 3900, b = 390, DP-SGD's row with Poisson sampling, (ε, 1e-5).
@pytest.mark.parametrize(("epsilon", "published"), [(8.0, 21.82), (1.0, 40.10)])
def test_published_rmse_with_amplification(epsilon: float, published: float) -> None:
    p = plan(Budget(epsilon, 1e-5), examples=390 * 128, batch_size=128, epochs=10)
    assert p.steps == 3900
    assert p.as_dict()["rmse"] == pytest.approx(published, rel=2e-3)


@pytest.mark.filterwarnings("ignore:delta")
def test_the_query_everybody_is_compared_on() -> None:
    """(8, 1e-5), q = .01, T = 2000: RDP .6717, PLD .6434; at most .6437, in at most 3 s."""
    run = {"examples": 1_000_000, "batch_size": 10_000, "epochs": 20}
    plan(Budget(8, 1e-7), **run)  # imports
    start = time.perf_counter()
    p = plan(Budget(8, 1e-5), **run)
    seconds = time.perf_counter() - start
    assert 0.6430 < p.noise_multiplier <= 0.6437
    assert seconds < 3.0
    assert plan(Budget(8, 1e-5), **run, accountant="rdp").noise_multiplier == pytest.approx(0.6717, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 1.0, 8.0, 50.0, 100.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_accountants_never_raise_on_valid_queries(epsilon: float, accountant: str) -> None:
    schedule = Schedule(10_000, 100, 5)
    strategy, sampling = make_strategy("identity", schedule.steps), make_sampling("poisson", schedule)
    sigma = calibrate(strategy, sampling, Budget(epsilon, 1e-6), accountant=accountant)
    found = account(strategy, sampling, sigma, delta=1e-6, accountant=accountant).epsilon
    assert epsilon * 0.999 < found <= epsilon


@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [0.5, 1e-3, 1e-9, 1e-12, 1e-30])
def test_epsilon_is_never_negative_or_nan(sigma: float, delta: float) -> None:
    for q, steps in ((0.5, 1), (0.01, 100)):
        pld, rdp = PLDCurve(q, sigma, steps), RDPCurve(q, sigma, steps)
        for curve in (pld, rdp):
            epsilon = curve.epsilon(delta)
            assert epsilon >= 0.0 and not math.isnan(epsilon)
            assert 0.0 <= curve.delta(1.0) <= 1.0
        if delta >= 1e-9:
            assert pld.epsilon(delta) <= rdp.epsilon(delta) + 1e-3


def test_zero_steps_cost_nothing() -> None:
    for sampling in ("poisson", "fixed-order", "balls-in-bins"):
        p = plan(noise_multiplier=1.0, delta=1e-5, examples=1000, batch_size=10, epochs=2, sampling=sampling)
        assert p.account(0).epsilon == 0.0
        assert account(p.strategy, p.sampling, 1.0, steps=0, epsilon=0.1).delta == 0.0


def test_a_fixed_grid_is_loose_at_small_rates_and_many_steps_and_ours_is_not() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    q, sigma, steps = 1e-3, 2.0, 100_000
    fixed = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=1e-3, use_connect_dots=True
    )
    fine = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=5e-6, use_connect_dots=True
    )
    truth = fine.self_compose(steps).get_epsilon_for_delta(1e-5)
    ours = PLDCurve(q, sigma, steps).epsilon(1e-5)
    assert truth * (1 - 1e-4) <= ours <= truth * 1.0005
    assert fixed.self_compose(steps).get_epsilon_for_delta(1e-5) > truth * 1.01


def test_poisson_with_correlated_noise_is_unsupported_and_says_what_is() -> None:
    for accountant in ("auto", "pld", "rdp"):
        with pytest.raises(Unsupported, match="lambda-cgd:0.9.*correlated noise.*balls-in-bins") as caught:
            plan(Budget(8, 1e-5), examples=1000, batch_size=10, epochs=2, noise="lambda-cgd:0.9", accountant=accountant)
        assert "\n" not in str(caught.value)
    zero = plan(Budget(8, 1e-5), examples=1000, batch_size=10, epochs=2, noise="lambda-cgd:0")  # C = I is C = I
    assert zero.noise_multiplier == plan(Budget(8, 1e-5), examples=1000, batch_size=10, epochs=2).noise_multiplier


def test_fixed_size_batches_are_not_accounted_as_poisson() -> None:
    fixed = make_sampling("fixed-order", Schedule(1000, 10, 2))
    for accountant in ("pld", "rdp", "convolution"):
        with pytest.raises(Unsupported, match="fixed-order"):
            account(make_strategy("identity", 200), fixed, 1.0, delta=1e-5, accountant=accountant)


def test_epsilon_printed_is_epsilon_asked() -> None:
    for sampling in ("poisson", "balls-in-bins", "fixed-order"):
        for epsilon in (0.3, 1.0, 8.0):
            p = plan(Budget(epsilon, 1e-5), examples=5000, batch_size=50, epochs=3, sampling=sampling)
            assert str(p.guarantee()).startswith(f"({epsilon:.2f}, 1e-05)-DP")
            back = plan(
                noise_multiplier=p.noise_multiplier,
                delta=1e-5,
                examples=5000,
                batch_size=50,
                epochs=3,
                sampling=sampling,
            )
            assert back.guarantee().epsilon == p.guarantee().epsilon <= epsilon


@pytest.mark.parametrize("sigma", [1e-320, 1e-200, 1e-30, 1e-10, 1e-3, 1e4, 1e100])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_any_noise_has_an_answer(sigma: float, accountant: str) -> None:
    run = {"examples": 1000, "batch_size": 100, "epochs": 2, "accountant": accountant}
    for parameters in (None, 10**12):
        found = plan(noise_multiplier=sigma, delta=1e-5, parameters=parameters, **run).account()  # type: ignore[arg-type]
        assert found.epsilon >= 0.0
    schedule = Schedule(examples=1000, batch_size=100, epochs=2)
    strategy, sampling = make_strategy("identity", 20), make_sampling("poisson", schedule)
    for epsilon in (0.0, 1.0, 1e4, 1e300):
        assert 0.0 <= account(strategy, sampling, sigma, epsilon=epsilon, accountant=accountant).delta <= 1.0
    if sigma <= 1e-3:
        assert account(strategy, sampling, sigma, epsilon=1.0, accountant=accountant).delta > 0.5


@pytest.mark.parametrize("error", [OverflowError("math range error"), ValueError("no"), MemoryError()])
def test_what_the_library_raises_is_answered_by_a_coarser_bound(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sordino.accounting.subsampled as module

    def broken(*arguments: object) -> None:
        raise error

    curve, rdp = PLDCurve(0.1, 1.0, 50), RDPCurve(0.1, 1.0, 50)
    tight = curve.epsilon(1e-5), curve.delta(2.0)
    middle = rdp.epsilon(1e-5), rdp.delta(2.0)
    monkeypatch.setattr(module, "_compose", broken)
    assert curve.epsilon(1e-5) == middle[0] >= tight[0] and curve.delta(2.0) >= middle[1] >= tight[1]
    monkeypatch.setattr(module, "_rdp", broken)
    mu = math.sqrt(50)
    assert curve.epsilon(1e-5) == gaussian_epsilon(1e-5, mu) > middle[0]
    assert curve.delta(2.0) >= gaussian_delta(2.0, mu) > middle[1]


def test_calibrating_ends_where_only_one_direction_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PLDCurve, "epsilon", lambda self, delta: RDPCurve(self.q, self.sigma, self.steps).epsilon(delta)
    )
    planned = plan(Budget(2.0, 1e-5), examples=1000, batch_size=100, epochs=2)
    assert planned.account().epsilon <= 2.0
