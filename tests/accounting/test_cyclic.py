"""Cyclic Poisson with banded noise: against mixtures worked out in all dimensions, and what must be refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp

from sordino import Budget, SordinoError, Unsupported
from sordino.accounting import account, calibrate, gaussian_sigma
from sordino.accounting.base import Query
from sordino.accounting.cyclic import rounds
from sordino.accounting.subsampled import PLDCurve
from sordino.budget import Schedule
from sordino.sampling import CyclicPoisson, make_sampling
from sordino.strategies import Strategy, make_strategy

from .banded import Given, banded, toeplitz
from .reference import two_steps_delta


def cyclic(steps: int, parts: int, rate: float, size: int = 1000) -> CyclicPoisson:
    """`steps` steps of one epoch, so that q = parts·B/N is about `rate`."""
    schedule = Schedule(examples=size * steps, batch_size=size, epochs=1)
    assert schedule.steps == steps and rate == pytest.approx(parts / steps)
    return CyclicPoisson(schedule, parts)


def mixture(c: np.ndarray, part: int, parts: int, q: float) -> tuple[np.ndarray, np.ndarray]:
    """All outcomes of one example's coins: their means (2^m × T) and log-probabilities; every contribution is 1."""
    mine = range(part, len(c), parts)
    coins = np.array(list(itertools.product((0, 1), repeat=len(mine))))
    heads = coins.sum(axis=1)
    return coins @ c[:, list(mine)].T, heads * math.log(q) + (len(mine) - heads) * math.log1p(-q)


def deltas(
    means: np.ndarray, log_p: np.ndarray, sigma: float, epsilon: float, samples: int, seed: int
) -> tuple[float, float, float, float]:
    """Plain averages in T dimensions: remove and its standard error, add and its."""
    rng = np.random.default_rng(seed)
    which = rng.choice(len(means), size=samples, p=np.exp(log_p))
    noise = sigma * rng.normal(size=(samples, means.shape[1]))

    def log_ratio(y: np.ndarray) -> np.ndarray:
        return logsumexp(log_p + (y @ means.T - np.square(means).sum(axis=1) / 2) / sigma**2, axis=1)

    remove = np.maximum(0.0, 1.0 - np.exp(epsilon - log_ratio(noise + means[which])))
    add = np.maximum(0.0, 1.0 - np.exp(epsilon + log_ratio(noise)))
    root = math.sqrt(samples)
    return float(remove.mean()), float(remove.std() / root), float(add.mean()), float(add.std() / root)


CASES = [
    # steps, parts, bands, σ, ε: with unit columns the accountant is exact up to its grid
    (4, 2, 2, 1.0, 0.5),
    (6, 3, 2, 0.8, 1.0),
    (6, 3, 3, 1.5, 0.2),
    (5, 2, 1, 0.7, 1.0),
]


@pytest.mark.parametrize(("steps", "parts", "bands", "sigma", "epsilon"), CASES)
def test_against_the_mixture_in_all_dimensions(
    steps: int, parts: int, bands: int, sigma: float, epsilon: float
) -> None:
    strategy, sampling = banded(steps, bands, unit=True), cyclic(steps, parts, parts / steps)
    upper = account(strategy, sampling, sigma, epsilon=epsilon).delta
    found = []
    for part in range(parts):
        means, log_p = mixture(strategy.c, part, parts, parts / steps)
        remove, remove_error, add, add_error = deltas(means, log_p, sigma, epsilon, 400_000, seed=part)
        assert max(remove - 4.5 * remove_error, add - 4.5 * add_error) <= upper
        found.append((max(remove, add), max(remove_error, add_error)))
    worst, error = max(found)
    assert worst > 1e-3  # large enough for a plain average to say something
    if steps % parts == 0 or bands == 1:  # the first part's columns are whole: nothing is given away
        assert upper <= worst * 1.005 + 4.5 * error


def test_two_rounds_against_quadrature() -> None:
    strategy, sampling = toeplitz(8, [1.0, 0.6, -0.3]), cyclic(8, 4, 0.5)
    norm = math.sqrt(1 + 0.36 + 0.09)
    truth = max(two_steps_delta(0.5, 1.2 / norm, 0.8))
    found = account(strategy, sampling, 1.2, epsilon=0.8).delta
    assert truth * (1 - 1e-4) <= found <= truth * 1.005


def test_an_adaptive_adversary_in_two_dimensions_gains_nothing() -> None:
    """g_r turns and shrinks with what was released before, the sign with it: the ratio stays that of the rounds."""
    steps, parts, q, sigma, epsilon = 4, 2, 0.5, 0.9, 0.7
    strategy = banded(steps, 2, seed=3, unit=True)
    upper = account(strategy, cyclic(steps, parts, q), sigma, epsilon=epsilon).delta
    rng = np.random.default_rng(0)
    n = 400_000
    for with_example in (True, False):
        coins = (rng.random((n, 2)) < q) & with_example
        log_r = np.zeros(n)
        before = np.zeros((n, 2))
        y = np.zeros((n, steps, 2))
        drift = sigma * rng.normal(size=(n, steps, 2))
        for r in range(2):
            angle = before.sum(axis=1) * 3.0  # anything computed from the rows so far
            g = np.stack([np.cos(angle), np.sin(angle)], axis=1) * np.where(before[:, :1] > 0.3, 0.6, 1.0)
            c = strategy.c[2 * r : 2 * r + 2, 2 * r]
            v = c[None, :, None] * g[:, None, :]
            w = drift[:, 2 * r : 2 * r + 2]
            y[:, 2 * r : 2 * r + 2] = w + coins[:, r, None, None] * v  # others' contributions cancel
            inner = (y[:, 2 * r : 2 * r + 2] * v).sum(axis=(1, 2)) - np.square(v).sum(axis=(1, 2)) / 2
            log_r += np.log((1 - q) + q * np.exp(inner / sigma**2))
            before = y[:, 2 * r : 2 * r + 2].sum(axis=1)
        loss = log_r if with_example else -log_r
        value = np.maximum(0.0, 1.0 - np.exp(epsilon - loss))
        assert value.mean() - 4.5 * value.std() / math.sqrt(n) <= upper


def test_more_bands_than_parts_would_be_wrong_and_is_refused() -> None:
    """Three bands on two parts: the columns of one example overlap, and δ is more than the rounds would say."""
    c = toeplitz(6, [1.0, 0.8, 0.8])
    sampling = cyclic(6, 2, 1 / 3)
    with pytest.raises(Unsupported, match="3 bands are more than the 2 parts; use at least 3 parts or at most 2 bands"):
        account(c, sampling, 1.0, epsilon=1.0)
    means, log_p = mixture(c.c, 0, 2, 1 / 3)
    remove, error, *_ = deltas(means, log_p, 1.0, 1.0, 400_000, seed=0)
    norm = math.sqrt(1 + 2 * 0.64)
    assert remove - 4.5 * error > 1.15 * PLDCurve(1 / 3, 1.0 / norm, 3).delta(1.0)


def test_the_last_round_counts_though_it_is_cut_short() -> None:
    """T = 100, b = 40, q = .4, σ = 1.5: ε 2.78; ⌊T/b⌋ = 2 rounds would say 2.35."""
    sampling = make_sampling("cyclic-poisson:40", Schedule(examples=100_000, batch_size=1000, epochs=1))
    found = account(make_strategy("identity", 100), sampling, 1.5, delta=1e-5).epsilon
    assert found == pytest.approx(2.777, abs=2e-3)
    assert PLDCurve(0.4, 1.5, 2).epsilon(1e-5) == pytest.approx(2.351, abs=2e-3)


def test_one_part_and_independent_noise_is_poisson() -> None:
    schedule = Schedule(examples=10_000, batch_size=100, epochs=3)
    strategy = make_strategy("identity", 300)
    poisson, one = make_sampling("poisson", schedule), make_sampling("cyclic-poisson", schedule, bands=1)
    assert one.name == "cyclic-poisson:1" and one.rate == poisson.rate
    for accountant in ("pld", "rdp"):
        for parameters in (None, 10**6):
            for steps in (1, 7, 300):
                options = {"steps": steps, "delta": 1e-6, "accountant": accountant, "parameters": parameters}
                theirs = account(strategy, poisson, 0.9, **options)  # type: ignore[arg-type]
                assert account(strategy, one, 0.9, **options) == theirs  # type: ignore[arg-type]


def test_prefixes_count_the_rounds_begun() -> None:
    strategy, sampling = toeplitz(20, [1.0, 0.5]), cyclic(20, 4, 0.2)
    norm = math.sqrt(1.25)
    for t in range(1, 21):
        found = rounds(Query(strategy, sampling, 2.0, t))
        assert found.count == math.ceil(t / 4) == sampling.participation.first(t).epochs
        assert found.multiplier == pytest.approx(2.0 / norm) and found.rate == pytest.approx(0.2)
        assert found.rows == min(2, t)
    spent = [account(strategy, sampling, 2.0, steps=t, delta=1e-5).epsilon for t in range(21)]
    assert spent[0] == 0.0 and all(a <= b for a, b in zip(spent, spent[1:], strict=False))
    assert spent[5] == spent[8] > spent[4]


def test_calibrating_scales_with_the_largest_column() -> None:
    sampling, budget = cyclic(40, 8, 0.2), Budget(2.0, 1e-5)
    one = calibrate(make_strategy("identity", 40), sampling, budget)
    for strategy in (toeplitz(40, [1.0, 0.7, 0.4]), banded(40, 8), banded(40, 8, unit=True)):
        largest = np.linalg.norm(strategy.c, axis=0).max()
        assert strategy.column_norm() == pytest.approx(largest)
        assert calibrate(strategy, sampling, budget) == pytest.approx(one * largest, rel=1e-5)


def test_amplification_is_worth_it() -> None:
    strategy, sampling = toeplitz(100, [1.0, 0.5, 0.3]), cyclic(100, 5, 0.05)
    without = gaussian_sigma(2.0, 1e-5) * strategy.sensitivity(sampling.participation)
    assert calibrate(strategy, sampling, Budget(2.0, 1e-5)) < 0.5 * without


def test_finite_tails_count_in_rounds() -> None:
    """m = 5 rounds of p = 3 rows: the strip of one round has the shift of one column over p·d entries."""
    from sordino.accounting.tails import log_kept, lost_mass

    strategy, sampling, d = toeplitz(20, [1.0, 0.5, 0.3]), cyclic(20, 4, 0.2), 10**6
    bare = account(strategy, sampling, 1.0, epsilon=4.0).delta
    full = account(strategy, sampling, 1.0, epsilon=4.0, parameters=d).delta
    strip = lost_mass(math.sqrt(1.34), 3 * d)
    assert full == pytest.approx((bare + 0.2 * 5 * strip) / math.exp(log_kept(20, d)), rel=1e-6)
    assert full > bare


@pytest.mark.parametrize(
    ("sampling", "bands", "message"),
    [
        ("cyclic-poisson:11", 4, r"11 parts of about 90.91 examples are smaller than the batch of 100 \(bB > N\)"),
        ("cyclic-poisson", 11, "bB > N.*at most 10 parts"),
        ("cyclic-poisson:0", 4, "at least 1"),
        ("cyclic-poisson:-3", 4, "at least 1"),
        ("cyclic-poisson:two", 4, "'cyclic-poisson:two'.*whole number"),
        ("cyclic-poisson:2.5", 4, "whole number"),
        ("cyclic-poisson", None, "as many parts as C has bands, and this C has none"),
    ],
)
def test_bad_parts(sampling: str, bands: int | None, message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        make_sampling(sampling, Schedule(examples=1000, batch_size=100, epochs=2), bands)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", [Given(np.tril(np.ones((10, 10))), None), make_strategy("lambda-cgd:0.9", 10)])
def test_what_has_no_bands_is_refused(strategy: Strategy) -> None:
    for accountant in ("auto", "pld", "rdp"):
        with pytest.raises(
            Unsupported, match="banded C, and this one has no bands.*'fixed-order'.*banded noise \\(identity, bsr"
        ):
            account(strategy, cyclic(10, 5, 0.5), 1.0, epsilon=1.0, accountant=accountant)
    with pytest.raises(Unsupported, match="needs sampling='poisson' or 'cyclic-poisson', not 'fixed-order'"):
        schedule = Schedule(examples=100, batch_size=10, epochs=1)
        account(strategy, make_sampling("fixed-order", schedule), 1.0, epsilon=1.0, accountant="pld")
