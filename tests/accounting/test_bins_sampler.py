"""The importance samplers behind balls in bins with any C: unbiased, bounded by what they say, and the same for
ever."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from sordino.accounting.bernstein import Moments, moments
from sordino.accounting.bins_bounds import BinsBounds
from sordino.accounting.bins_gram import bins_gram, from_means
from sordino.accounting.bins_sampler import Sampler, Samples, best_tilt, exact, log_largest_add
from sordino.accounting.counted import Counted, seed
from sordino.accounting.gaussian import gaussian_delta
from sordino.strategies import make_strategy

from .reference import two_correlated_bins_delta

CPU = torch.device("cpu")
GRAMS = {
    "alike": np.array([[1.0, 0.9], [0.9, 1.0]]),
    "apart": np.array([[2.0, 0.1], [0.1, 0.5]]),
    "one silent": np.array([[1.5, 0.0], [0.0, 1e-9]]),
}


def remove(gram: np.ndarray, sigma: float, order: int, count: int, name: str = "test") -> Samples:
    sampler = Sampler(gram)
    return sampler.remove(BinsBounds(gram, sigma), sigma, [order], sampler.draws(seed(name, gram), count, order + 1))[0]


def add(gram: np.ndarray, sigma: float, epsilon: float, count: int) -> Samples:
    sampler, bounds = Sampler(gram), BinsBounds(gram, sigma)
    return sampler.add(bounds, sigma, best_tilt(bounds, epsilon), sampler.draws(seed("test", gram), count))


def near(found: Moments, truth: float, deviations: float = 4.5) -> bool:
    error = found.error * found.estimate if found.estimate > 0.0 else 0.0
    return abs(found.estimate - truth) <= deviations * error + 1e-12


@pytest.mark.parametrize("gram", GRAMS.values(), ids=GRAMS.keys())
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (0.5, 4.0), (0.4, 8.0), (3.0, 0.1)])
def test_two_bins_against_quadrature(gram: np.ndarray, sigma: float, epsilon: float) -> None:
    truth = two_correlated_bins_delta(gram / sigma**2, epsilon)
    # (not every order: where R is large the mean is not seen, which is what the bound is for)
    orders = [order for order in (0, 1, 2, 3, 5) if BinsBounds(gram, sigma).log_largest(order, epsilon) < 2.0]
    for order in orders:
        found = remove(gram, sigma, order, 100_000).moments(epsilon)
        assert near(found, truth[0]) and (found.error < 0.15 or order == 0)
        assert found.bound(1e-9) >= truth[0]
    found = add(gram, sigma, epsilon, 100_000).moments(epsilon)
    assert near(found, truth[1]) and (found.error < 0.1 or truth[1] == 0.0)
    assert found.bound(1e-9) >= truth[1]


@pytest.mark.parametrize("order", [1, 2, 4])
def test_one_bin_is_the_gaussian_mechanism(order: int) -> None:
    gram = np.array([[1.7]])
    for sigma, epsilon in ((0.8, 6.0), (2.0, 0.5)):
        truth = gaussian_delta(epsilon, math.sqrt(1.7) / sigma)
        assert near(remove(gram, sigma, order, 100_000).moments(epsilon), truth)
        assert near(add(gram, sigma, epsilon, 100_000).moments(epsilon), truth)


def test_many_bins_against_a_plain_average_in_as_many_dimensions_as_there_are_steps() -> None:
    rng = np.random.default_rng(3)
    m = np.abs(rng.normal(size=(30, 7)))
    sigma, epsilon, count = 4.0, 1.0, 200_000

    def log_ratio(x: np.ndarray) -> np.ndarray:
        return np.asarray(logsumexp((x @ m - np.square(m).sum(axis=0) / 2) / sigma**2, axis=1)) - math.log(7)

    x = rng.normal(size=(count, 30)) * sigma
    adding = np.maximum(0, -np.expm1(epsilon + log_ratio(x)))
    removing = np.maximum(0, -np.expm1(epsilon - log_ratio(x + m.T[rng.integers(7, size=count)])))
    gram = from_means(m).gram
    for found, samples in (
        (remove(gram, sigma, 2, 100_000), removing),
        (add(gram, sigma, epsilon, 100_000), adding),
    ):
        error = samples.std() / math.sqrt(count)
        ours = found.moments(epsilon)
        assert samples.mean() > 0.01
        assert abs(ours.estimate - samples.mean()) < 4.5 * math.hypot(error, ours.error * ours.estimate)


def test_against_another_librarys_accountant() -> None:
    """jax_privacy 2.0.0, its Monte Carlo for balls in bins: C Toeplitz, coefficients .9^i, 40 steps, cycle length 8.

    Noise multiplier 6, ε = 2, 200,000 samples each (numpy's default_rng(20261120)): remove .032141 ± .000271, add
    .031566 ± .000269.
    """
    gram = bins_gram(make_strategy("lambda-cgd:0.9", 40), 8, 40).gram
    for found, theirs, error in (
        (remove(gram, 6.0, 2, 200_000), 0.03214111661699206, 0.00027118113800488704),
        (add(gram, 6.0, 2.0, 200_000), 0.0315659797631714, 0.0002685200160246945),
    ):
        ours = found.moments(2.0)
        assert ours.error < 0.01
        assert abs(ours.estimate - theirs) < 4 * math.hypot(error, ours.error * ours.estimate)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_largest_value_of_a_sample_is_just_that(order: int) -> None:
    """Every tuple's weight times the largest g, by brute force; attained where one bin overlaps most with all."""
    rng = np.random.default_rng(order)
    for largest_overlap in (False, True):
        m = np.abs(rng.normal(size=(5, 3)))
        gram = np.maximum(m.T @ m, 0) + (np.diag([9.0, 0.0, 0.0]) if largest_overlap else 0.0)
        sigma, epsilon = 2.0, 1.3
        scaled = gram / sigma**2
        largest = -math.inf
        for chosen in itertools.product(range(3), repeat=order + 1):
            weight = sum(math.log(np.exp(scaled[:, list(chosen[:j])].sum(axis=1)).mean()) for j in range(1, order + 1))
            largest = max(largest, weight)
        r = np.exp(np.linspace(epsilon, epsilon + 8, 100_001))
        gain = math.log(((r - math.exp(epsilon)) / r ** (order + 1)).max())
        stated = BinsBounds(gram, sigma).log_largest(order, epsilon)
        assert largest + gain <= stated + 1e-9
        if largest_overlap:
            assert largest + gain == pytest.approx(stated, abs=1e-6)
        samples = remove(gram, sigma, order, 50_000)
        raw = samples.log_weight + np.log(np.maximum(np.exp(samples.log_ratio) - math.exp(epsilon), 1e-300))
        raw -= (order + 1) * samples.log_ratio
        assert raw.max() <= stated + 1e-9


def test_the_largest_value_of_an_add_sample() -> None:
    gram, sigma = np.array([[1.0, 0.3], [0.3, 1.0]]), 0.7
    bounds = BinsBounds(gram, sigma)
    for epsilon in (0.1, 1.0, 3.0):
        samples = add(gram, sigma, epsilon, 50_000)
        raw = samples.log_weight + np.log(np.maximum(1 - np.exp(epsilon + samples.log_ratio), 1e-300))
        tilt = best_tilt(bounds, epsilon)
        stated = log_largest_add(bounds, epsilon, tilt)
        assert raw.max() <= stated + 1e-9
        assert raw.max() > stated - 1.0
        # the tilt is the one of least R
        assert all(log_largest_add(bounds, epsilon, t) >= stated for t in (tilt * 0.9, tilt * 1.1, 1e-6, tilt + 1.0))
    # one bin: r is what the bound assumes, so it is attained
    one = np.array([[1.0]])
    samples = add(one, 1.0, 1.0, 50_000)
    raw = samples.log_weight + np.log(np.maximum(1 - np.exp(1.0 + samples.log_ratio), 1e-300))
    assert raw.max() == pytest.approx(log_largest_add(BinsBounds(one, 1.0), 1.0, samples.tilt or 0.0), abs=1e-4)


def test_too_little_noise_deceives_the_average_and_not_the_bound() -> None:
    """λ = .95, ε = 8, s = 2, σ = 1.5: the true δ is .905, the samples that make it up are never seen."""
    gram = bins_gram(make_strategy("lambda-cgd:0.95", 3900), 390, 3900).gram
    samples = remove(gram, 1.5, 2, 4096)
    found = samples.moments(8.0)
    assert found.estimate < 1e-15
    assert found.bound(1e-9) == 1.0 and found.bound(0.5) == 1.0
    with_it = remove(gram, 1.5, 0, 4096)  # no importance sampling: a tuple of one bin is the run with the example
    assert with_it.moments(8.0).estimate == pytest.approx(0.905, abs=0.02)


def test_the_bound_holds_as_often_as_it_says() -> None:
    """200 repeats where the truth is known by quadrature; at 5 % it may fail 10 times (5.7 deviations: 27)."""
    gram, sigma, epsilon, beta = GRAMS["alike"], 0.8, 4.0, 0.05
    truth = two_correlated_bins_delta(gram / sigma**2, epsilon)[0]
    for order in (1, 4):
        sampler, bounds = Sampler(gram), BinsBounds(gram, sigma)
        draws = sampler.draws(seed("coverage", gram), 8192 * 25, order + 1)
        every = sampler.remove(bounds, sigma, [order], draws)[0]
        failed = too_low = 0
        for repeat in range(200):
            part = slice(repeat * 1024, (repeat + 1) * 1024)
            found = Samples(every.log_ratio[part], every.log_weight[part], bounds, order).moments(epsilon)
            failed += found.bound(beta) < truth
            too_low += found.estimate < truth
        assert failed <= 10
        assert 60 <= too_low <= 195  # where an average would do, the test could not fail
        assert every.moments(epsilon).bound(beta) < truth * (1.05 if order == 1 else 1.5)


def test_bernstein_is_the_formula_and_uses_the_unbiased_variance() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=1000) ** 3
    found = moments(x, math.log(1e-3))
    v, level = x.var(ddof=1), math.log(2 / 1e-6)
    expected = 1e-3 * (x.mean() + math.sqrt(2 * v * level / 1000) + 7 * level / (3 * 999))
    assert found.bound(1e-6) == pytest.approx(expected, rel=1e-9)
    assert found.estimate == pytest.approx(1e-3 * x.mean())
    assert found.bound(1e-6, 4000) < found.bound(1e-6)
    nothing = moments(np.zeros(1000), 0.0)
    assert nothing.bound(1e-6) >= 7 * level / (3 * 999) and nothing.error == math.inf
    assert moments(np.zeros(1000), 50.0).bound(1e-6) == 1.0


def test_random_numbers_are_a_function_of_the_question() -> None:
    gram = np.array([[1.0, 0.2], [0.2, 1.0]])
    asked = seed("remove", gram, 1.0, 1e-5)
    assert asked == seed("remove", gram * (1 + 1e-13), 1.0, 1e-5)  # another machine's product
    others = [
        seed("add", gram, 1.0, 1e-5),
        seed("remove", gram * 1.001, 1.0, 1e-5),
        seed("remove", gram[::-1], 1.0, 1e-5),
        seed("remove", gram, np.nextafter(1.0, 2.0), 1e-5),
        seed("remove", gram, 1.0, 2e-5),
        seed("remove", gram, 1.0, 1e-5, 0.0),
        seed("remove", gram * 2.0, 1.0, 1e-5),
    ]
    assert len({asked, *others}) == 1 + len(others)


def test_numbers_are_philox_and_the_same_however_they_are_drawn() -> None:
    key = seed("words", np.eye(3))
    counted = Counted(key, 3, 2, CPU)
    bits = counted._bits(5)
    words = np.random.Philox(key=int.from_bytes(key[:16], "little"), counter=[0, 0, 0, 5]).random_raw(len(bits))
    assert np.array_equal(bits, words >> np.uint64(11))
    long, short = list(counted.chunks(3 * counted.rows)), list(Counted(key, 3, 2, CPU).chunks(1))
    assert len(long) == 3 and len(short) == 1 and all(torch.equal(a, b) for a, b in zip(long[0], short[0], strict=True))
    uniform, normal = (torch.cat(part) for part in zip(*long, strict=True))
    assert uniform.shape[1] == 2 and normal.shape[1] == 3
    assert 0.0 < float(uniform.min()) and float(uniform.max()) < 1.0
    n = len(normal)
    assert abs(float(uniform.mean()) - 0.5) < 4.5 / math.sqrt(12 * 2 * n)
    assert float((normal.T @ normal / n - torch.eye(3)).abs().max()) < 4.5 * math.sqrt(2 / n)
    assert abs(float((normal**4).mean()) - 3.0) < 4.5 * math.sqrt(96 / (3 * n))
    assert not torch.equal(long[0][1], long[1][1])


def test_orders_asked_together_and_alone_are_the_same_samples() -> None:
    gram, bounds = GRAMS["apart"], BinsBounds(GRAMS["apart"], 1.0)
    sampler = Sampler(gram)
    draws = list(sampler.draws(seed("kept", gram), 8192, 6))
    both = sampler.remove(bounds, 1.0, [2, 5], draws)
    for order, found in zip((2, 5), both, strict=True):
        alone = sampler.remove(bounds, 1.0, [order], draws)[0]
        assert np.array_equal(alone.log_ratio, found.log_ratio) and np.array_equal(alone.log_weight, found.log_weight)


def test_the_callers_settings_are_left_alone_and_do_not_matter() -> None:
    gram = GRAMS["alike"]
    plain = remove(gram, 1.0, 2, 8192)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            again = remove(gram, 1.0, 2, 8192)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert np.array_equal(plain.log_ratio, again.log_ratio)
    with exact():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
