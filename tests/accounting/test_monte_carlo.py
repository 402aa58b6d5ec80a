"""The Monte Carlo accountant: above the truth, near it, the same answer to the same question, β inside δ."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino import Budget, Unsupported
from sordino.accounting import account, bins_pilot, calibrate, estimate_noise, gaussian_epsilon
from sordino.accounting import monte_carlo as module
from sordino.accounting.balls_in_bins import BinsCurve
from sordino.accounting.base import Query
from sordino.accounting.bins_allowance import ATTEMPTS, allowance_of, failure_probability
from sordino.accounting.bins_certify import candidates, smallest
from sordino.accounting.bins_closed import closed_epsilon, closed_sigma
from sordino.accounting.bins_gram import BinsGram, bins_gram
from sordino.accounting.bins_pilot import WORTH, Look, expect
from sordino.accounting.bins_question import Question, _round_up
from sordino.accounting.bins_sampler import Sampler, Samples
from sordino.accounting.counted import Counted
from sordino.accounting.monte_carlo import MonteCarlo, gram_of
from sordino.budget import Schedule
from sordino.plan import plan
from sordino.sampling import BallsInBins, Sampling, make_sampling
from sordino.strategies import Problem, Strategy, make_strategy

from .reference import two_correlated_bins_delta


def setting(noise: str, bins: int, epochs: int) -> tuple[Strategy, Sampling]:
    return make_strategy(noise, bins * epochs), make_sampling("balls-in-bins", Schedule(10 * bins, 10, epochs))


@pytest.fixture(autouse=True)
def nothing_kept_and_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    monkeypatch.setattr(bins_pilot, "WORTH", 3e9)  # fewer samples, a looser bound, the same code
    module._question.cache_clear()
    yield


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many samples as a user gets."""
    monkeypatch.setattr(bins_pilot, "WORTH", WORTH / 4)


@pytest.fixture
def all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bins_pilot, "WORTH", WORTH)


def truth_of(gram: np.ndarray, sigma: float, epsilon: float) -> float:
    return max(two_correlated_bins_delta(gram / sigma**2, epsilon))


def test_which_combinations() -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 4, 2)
    assert MonteCarlo().reason(strategy, sampling) is None
    assert account(strategy, sampling, 3.0, delta=1e-3).accountant == "monte-carlo"
    assert account(make_strategy("identity", 8), sampling, 3.0, delta=1e-3).accountant == "convolution"
    for other in ("fixed-order", "poisson", "balls-in-bins:fresh"):
        with pytest.raises(Unsupported):
            account(strategy, make_sampling(other, Schedule(40, 10, 2)), 3.0, delta=1e-3, accountant="monte-carlo")


@pytest.mark.parametrize("noise", ["lambda-cgd:0.9", "identity"])
def test_one_bin_is_the_gaussian_mechanism(noise: str) -> None:
    strategy, sampling = setting(noise, 1, 6)
    for sigma in (2.0, 9.0):
        shift = strategy.sensitivity(sampling.participation) / sigma
        found = account(strategy, sampling, sigma, delta=1e-5, accountant="monte-carlo")
        assert found.epsilon == pytest.approx(gaussian_epsilon(1e-5, shift), rel=1e-6)
        assert found.failure_probability == 0.0 and found.samples == 0


@pytest.mark.parametrize(("noise", "epsilon"), [("lambda-cgd:0.5", 1.0), ("lambda-cgd:0.9", 6.0), ("bsr:2", 3.0)])
def test_two_bins_against_quadrature(noise: str, epsilon: float, tight: None) -> None:
    """Never below the truth, and σ within 1 % of it."""
    strategy, sampling = setting(noise, 2, 3)
    gram = bins_gram(strategy, 2, 6).gram
    sigma = calibrate(strategy, sampling, Budget(epsilon, 1e-5))
    assert truth_of(gram, sigma, epsilon) <= 1e-5 < truth_of(gram, sigma * 0.99, epsilon)
    found = account(strategy, sampling, sigma, delta=1e-5)
    assert found.epsilon <= epsilon and truth_of(gram, sigma, found.epsilon) <= 1e-5
    back = account(strategy, sampling, sigma, epsilon=epsilon)
    assert truth_of(gram, sigma, epsilon) <= back.delta <= 1.01e-5
    assert 0 < found.failure_probability <= 1e-9 and 0 < back.failure_probability <= 1e-9


@pytest.mark.parametrize(("bins", "epochs", "epsilon"), [(10, 4, 8.0), (20, 5, 1.0), (30, 1, 4.0)])
def test_independent_noise_against_the_convolution(bins: int, epochs: int, epsilon: float, tight: None) -> None:
    strategy, sampling = setting("identity", bins, epochs)
    sigma = calibrate(strategy, sampling, Budget(epsilon, 1e-5), accountant="monte-carlo")
    exact = calibrate(strategy, sampling, Budget(epsilon, 1e-5))
    assert exact * 0.9995 <= sigma <= exact * 1.012
    delta = account(strategy, sampling, exact, epsilon=epsilon, accountant="monte-carlo").delta
    certified = BinsCurve(bins, math.sqrt(epochs) / exact).delta(epsilon)
    assert certified * 0.995 <= delta <= certified * 1.15


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_large_delta_against_a_plain_average(sigma: float, tight: None) -> None:
    strategy, sampling = setting("lambda-cgd:0.8", 5, 3)
    m = np.zeros((15, 5))
    for step in range(15):
        m[:, step % 5] += strategy.dense()[:, step]
    rng, count, epsilon = np.random.default_rng(0), 200_000, 0.5
    x = rng.normal(size=(count, 15)) * sigma + m.T[rng.integers(5, size=count)]
    exponent = (x @ m - np.square(m).sum(axis=0) / 2) / sigma**2
    log_r = np.logaddexp.reduce(exponent, axis=1) - math.log(5)
    plain = np.maximum(0, -np.expm1(epsilon - log_r))
    found = account(strategy, sampling, sigma, epsilon=epsilon)
    assert plain.mean() > 0.03
    assert plain.mean() - 4.5 * plain.std() / math.sqrt(count) <= found.delta <= plain.mean() * 1.06


def test_too_little_noise_is_found_out() -> None:
    strategy, sampling = make_strategy("lambda-cgd:0.95", 3900), make_sampling("balls-in-bins", Schedule(3900, 10, 10))
    found = account(strategy, sampling, 1.5, epsilon=8.0)
    assert 0.905 <= found.delta < 0.93


def test_failure_probability_is_inside_delta() -> None:
    assert failure_probability(1e-5) == 1e-9 and failure_probability(1e-7) == pytest.approx(1e-10)
    gram = bins_gram(make_strategy("lambda-cgd:0.9", 6), 2, 6)
    for parameters in (None, 10**6):
        allowance = allowance_of(gram, 2.0, 1e-5, parameters)
        lost = 1e-5 - allowance.remove()
        assert lost >= 1e-9 and allowance.level == pytest.approx(1e-9 / ATTEMPTS)
        assert allowance.exact.remove() - allowance.remove() == pytest.approx(1e-9)
        bound = allowance.remove()
        assert allowance.total(1.0, bound, 0.0) == pytest.approx(1e-5)
        assert allowance.total(1.0, bound, bound) >= 1e-5 * (1 - 1e-12)


def test_what_is_certified_is_certified_at_its_share_of_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level, n and s are fixed before the samples are drawn; both directions and no other number enter."""
    levels = []
    original = module.MonteCarlo.answer_epsilon
    import sordino.accounting.bins_question as question

    def spy(*arguments: object, **named: object) -> object:
        levels.append(arguments[3])
        return draw(*arguments, **named)  # type: ignore[arg-type]

    draw = question.draw
    monkeypatch.setattr(question, "draw", spy)
    strategy, sampling = setting("lambda-cgd:0.9", 3, 2)
    found = original(MonteCarlo(), Query(strategy, sampling, 2.0, 6), 1e-6, None)
    assert levels == [1e-9 / ATTEMPTS] and found.failure_probability == 1e-9
    found = MonteCarlo().answer_delta(Query(strategy, sampling, 2.0, 6), found.epsilon, None)
    assert found.failure_probability <= 1.1e-3 * found.delta and levels[1] == found.failure_probability / ATTEMPTS


def test_every_set_of_samples_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    original = Counted.__init__

    def spy(self: Counted, seed: bytes, *others: object) -> None:
        seen.append(seed)
        original(self, seed, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Counted, "__init__", spy)
    strategy, sampling = setting("bsr:4", 4, 2)
    account(strategy, sampling, 2.0, delta=1e-5)
    assert len(seen) >= 3 and len(set(seen)) == len(seen)  # pilot, refinement, certification
    for sigma, delta in ((2.0, 1.01e-5), (2.0001, 1e-5)):
        before = list(seen)
        account(strategy, sampling, sigma, delta=delta)
        assert seen[-1] not in before  # the samples that count; pilots are shared
    before = list(seen)
    account(strategy, sampling, 2.0, epsilon=3.0)
    assert seen[-1] not in before


def test_the_same_question_has_the_same_answer() -> None:
    """Whatever was asked before, however many threads, from disk or not, in another process."""
    strategy, sampling = setting("lambda-cgd:0.9", 6, 3)
    sigma = calibrate(strategy, sampling, Budget(4, 1e-5))
    found = account(strategy, sampling, sigma, delta=1e-5)
    module._question.cache_clear()
    assert account(strategy, sampling, sigma, delta=1e-5) == found  # from disk
    fresh = Question(bins_gram(make_strategy("lambda-cgd:0.9", 18), 6, 18))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fresh._epsilon(sigma, 1e-5, None).epsilon == found.epsilon
    finally:
        torch.set_num_threads(threads)
    perturbed = bins_gram(make_strategy("lambda-cgd:0.9", 18), 6, 18)
    perturbed = replace(perturbed, gram=perturbed.gram * (1 + 1e-14))  # another machine's product
    assert Question(perturbed)._epsilon(sigma, 1e-5, None).epsilon == found.epsilon


@pytest.mark.slow
def test_another_process_answers_the_same(tmp_path: Path, all_work: None) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 40, 3)
    sigma = calibrate(strategy, sampling, Budget(4, 1e-5))
    code = (
        "from sordino import Budget; from sordino.budget import Schedule; from sordino.accounting import calibrate\n"
        "from sordino.sampling import make_sampling; from sordino.strategies import make_strategy\n"
        "s = make_sampling('balls-in-bins', Schedule(400, 10, 3))\n"
        "print(repr(calibrate(make_strategy('lambda-cgd:0.9', 120), s, Budget(4, 1e-5))))"
    )
    for threads in ("1", "2"):
        environment = {"SORDINO_CACHE": str(tmp_path / threads), "OMP_NUM_THREADS": threads, "PATH": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert float(done.stdout) == sigma


def test_the_report_of_a_run_is_its_plan() -> None:
    p = plan(Budget(8, 1e-5), examples=300, batch_size=10, epochs=4, noise="lambda-cgd:0.9", sampling="balls-in-bins")
    guarantee = p.guarantee()
    assert 7.95 < guarantee.epsilon <= 8.0
    assert guarantee.failure_probability == 1e-9 and "failure probability 1e-09 inside δ" in str(guarantee)
    again = plan(
        noise_multiplier=p.noise_multiplier, delta=1e-5, examples=300, batch_size=10, epochs=4,
        noise="lambda-cgd:0.9", sampling="balls-in-bins",
    )  # fmt: skip
    assert again.guarantee().epsilon == guarantee.epsilon
    assert p.noise_multiplier == _round_up(p.noise_multiplier, 5)


def test_progress_is_sound_cheap_and_random_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 20, 5)
    sigma = calibrate(strategy, sampling, Budget(4, 1e-5))
    certified = account(strategy, sampling, sigma, delta=1e-5, steps=40)
    monkeypatch.setattr(Sampler, "draws", None)
    spent = [account(strategy, sampling, sigma, delta=1e-5, steps=t, coarse=True) for t in range(0, 101, 10)]
    assert spent[0].epsilon == 0.0 and spent[1].epsilon == spent[2].epsilon > 0.0  # whole epochs
    assert all(a.epsilon <= b.epsilon for a, b in zip(spent, spent[1:], strict=False))
    assert spent[4].epsilon >= certified.epsilon > 0.0
    assert all(found.failure_probability == 0.0 and found.samples == 0 for found in spent)
    both = account(strategy, sampling, sigma, epsilon=spent[-1].epsilon, coarse=True)
    assert both.delta <= 1e-5 * (1 + 1e-6)


def test_a_prefix_is_the_leading_block_and_costs_less() -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 4, 3)
    query = Query(strategy, sampling, 2.0, 7)
    assert gram_of(query) is bins_gram(strategy, 4, 7)
    assert gram_of(replace(query, coarse=True)) is bins_gram(strategy, 4, 8)
    epsilons = [account(strategy, sampling, 2.0, delta=1e-3, steps=t).epsilon for t in (2, 7, 12)]
    assert epsilons[0] < epsilons[1] < epsilons[2]


def test_candidates_are_round_ordered_and_reach_what_is_enough() -> None:
    for expected, slope, enough in (
        (8.0003, 3.0, 9.2),
        (0.9987, 11.0, 1.5),
        (0.00312, 900.0, 0.01),
        (49.99, 0.9, 80.0),
    ):
        found = candidates(expected, slope, enough)
        assert found == sorted(found) and len(set(found)) == len(found) < 90
        assert found[0] < expected < found[-1] < enough
        assert enough - found[-1] < 2 * (enough - expected) / 3
        nearby = [e for e in found if abs(e - expected) < 0.03 / slope]
        assert len(nearby) > 2
    assert 8.0 in candidates(8.0003, 3.0, 9.2) and 1.0 in candidates(0.9987, 11.0, 1.5)


def test_the_first_candidate_that_fails_ends_it() -> None:
    class Said:
        def remove(self, epsilon: float) -> float:
            return {4.0: 0.1, 3.0: 0.2, 2.0: 0.9, 1.0: 0.1}[epsilon]

        def add(self, epsilon: float) -> float:
            return 0.0

    allowance = replace(allowance_of(bins_gram(make_strategy("identity", 4), 2, 4), 1.0, 0.5, None), beta=0.0)
    assert smallest(Said(), allowance, [1.0, 2.0, 3.0, 4.0]) == 3.0  # type: ignore[arg-type]
    assert smallest(Said(), allowance, [2.0]) == math.inf  # type: ignore[arg-type]


def test_a_pilot_that_lies_costs_tightness_and_not_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 2, 3)
    gram = bins_gram(strategy, 2, 6)
    original = Look.remove

    def optimistic(self: Look, epsilon: float, beta: float) -> object:
        return replace(original(self, epsilon, beta), expected=1e-12, order=6, count=16384)

    monkeypatch.setattr(Look, "remove", optimistic)
    for sigma in (1.0, 2.0, 4.0):
        found = account(strategy, sampling, sigma, delta=1e-5).epsilon
        assert truth_of(gram.gram, sigma, found) <= 1e-5
    sigma = calibrate(strategy, sampling, Budget(3, 1e-5))
    assert truth_of(gram.gram, sigma, 3.0) <= 1e-5


def test_failed_attempts_are_counted_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 4, 3)
    tried = []

    def never(self: Question, sigma: float, delta: float, parameters: int | None) -> object:
        tried.append(sigma)
        return replace(original(self, sigma, delta, parameters), epsilon=5.1)

    original = Question.epsilon
    monkeypatch.setattr(Question, "epsilon", never)
    sigma = calibrate(strategy, sampling, Budget(5, 1e-5))
    gram = bins_gram(strategy, 4, 12)
    assert 1 <= len(tried) <= ATTEMPTS and tried == sorted(tried)
    assert sigma == closed_sigma(gram, Budget(5, 1e-5), None) > tried[-1]


def test_sampling_is_never_worse_than_the_closed_forms() -> None:
    from sordino.accounting.bins_bounds import BinsBounds

    strategy, sampling = setting("lambda-cgd:0.7", 8, 2)
    gram = bins_gram(strategy, 8, 16)
    for sigma in (0.02, 0.3, 1.0, 8.0, 300.0, 1e6):
        closed = closed_epsilon(BinsBounds(gram.gram, sigma), allowance_of(gram, sigma, 1e-6, None))
        found = account(strategy, sampling, sigma, delta=1e-6)
        assert 0.0 <= found.epsilon <= closed <= gaussian_epsilon(1e-6, math.sqrt(gram.gram.max()) / sigma) * (1 + 1e-6)


@pytest.mark.parametrize("sigma", [1e-320, 1e-200, 1e-30, 1e-3, 1e9, 1e200])
@pytest.mark.parametrize("parameters", [None, 10**12])
def test_any_noise_has_an_answer(sigma: float, parameters: int | None) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 5, 2)
    found = account(strategy, sampling, sigma, delta=1e-5, parameters=parameters)
    assert found.epsilon >= 0.0 and not math.isnan(found.epsilon)
    for epsilon in (0.0, 1.0, 1e4, 1e300):
        assert 0.0 <= account(strategy, sampling, sigma, epsilon=epsilon, parameters=parameters).delta <= 1.0


@pytest.mark.parametrize("epsilon", [0.3, 2.0, 30.0, 200.0])
def test_every_epsilon_calibrates(epsilon: float) -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 10, 3)
    sigma = calibrate(strategy, sampling, Budget(epsilon, 1e-6))
    found = account(strategy, sampling, sigma, delta=1e-6).epsilon
    assert epsilon * 0.97 < found <= epsilon


def test_the_tails_are_inside_delta() -> None:
    strategy, sampling = setting("lambda-cgd:0.9", 30, 4)
    bare, small, large = (calibrate(strategy, sampling, Budget(8, 1e-6), parameters=d) for d in (None, 10**4, 10**7))
    assert bare * 0.999 < small < large * 0.999 and large < bare * 1.1
    costs = account(strategy, sampling, bare, delta=1e-6, parameters=10**7)
    assert costs.tails_included and costs.epsilon > account(strategy, sampling, bare, delta=1e-6).epsilon


def test_the_estimate_is_near_and_is_not_what_is_reported() -> None:
    for noise in ("lambda-cgd:0.5", "lambda-cgd:0.9", "bsr:4"):
        strategy, sampling = setting(noise, 30, 4)
        for epsilon in (1.0, 8.0):
            estimate = estimate_noise(strategy, sampling, Budget(epsilon, 1e-5))
            assert estimate == pytest.approx(calibrate(strategy, sampling, Budget(epsilon, 1e-5)), rel=0.02)
    assert estimate_noise(strategy, sampling, Budget(math.inf, 1e-5)) == 0.0


def test_work_is_bounded_whatever_b() -> None:
    from sordino.accounting.bernstein import Moments

    hopeless = Moments(1e-9, 1e-6, 0.0, 16384)
    for bins in (2, 50, 390, 4000):
        choice = expect(hopeless, 1e-10, bins, 8)
        assert choice.count * bins**2 / 15 < 5e10 or choice.count < 20_000
    easy = Moments(0.5, 0.01, math.log(1e-4), 16384)
    assert expect(easy, 1e-10, 390, 2).count < 40_000


PUBLISHED = [
    ("lambda-cgd:0.95", 8.0, 10.27),
    ("bsr:16", 8.0, 16.88),
    ("band-mf:390", 8.0, 5.84),
    ("lambda-cgd:0.9", 1.0, 33.66),
    ("band-inv-mf:16", 1.0, 37.09),
    ("blt:4", 1.0, 35.97),
]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "epsilon", "rmse"), PUBLISHED)
def test_published_rmse_with_amplification(noise: str, epsilon: float, rmse: float, all_work: None) -> None:
    """DP-λCGD's table: T = 3900, b = 390, (ε, 1e-5), which scatters by 2 % itself."""
    sampling = make_sampling("balls-in-bins", Schedule(390 * 128, 128, 10))
    strategy = make_strategy(noise, Problem(3900, participation=sampling.participation))
    sigma = calibrate(strategy, sampling, Budget(epsilon, 1e-5))
    assert strategy.rmse() * sigma == pytest.approx(rmse, rel=0.025)
    # Close to the truth: at 2 % less noise the average of fresh samples is above δ by far more than its error.
    gram, less = bins_gram(strategy, 390, 3900), sigma * 0.98
    samples = many(gram, less, 2 if epsilon == 8.0 else 5)
    found = samples.moments(epsilon)
    assert found.estimate * (1 - 5 * found.error) > 1e-5


def many(gram: BinsGram, sigma: float, order: int) -> Samples:
    from sordino.accounting.bins_bounds import BinsBounds
    from sordino.accounting.counted import seed

    sampler = Sampler(gram.gram)
    draws = sampler.draws(seed("a test", gram.gram), 100_000, order + 1)
    return sampler.remove(BinsBounds(gram.gram, sigma), sigma, [order], draws)[0]


def test_the_sampler_is_the_one_with_bins_that_stay() -> None:
    _, sampling = setting("identity", 4, 2)
    assert type(sampling) is BallsInBins
