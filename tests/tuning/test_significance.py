"""The two tests against the paper's numbers, scipy, enumeration by hand, and their own level."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sordino.errors import SordinoError
from sordino.tuning import paired_t_test, permutation_test
from sordino.tuning.significance import _signed_sums, _subset_sums


def runs_with_t(t: float, n: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose differences have exactly this t."""
    rng = np.random.default_rng(1)
    d = rng.normal(size=n)
    d = (d - d.mean()) / d.std(ddof=1)
    theirs = rng.normal(65.0, 1.0, size=n)
    return theirs + d + t / math.sqrt(n), theirs


@pytest.mark.parametrize(
    ("t", "p"),
    [(1.69, 0.076), (8.3, 2.1e-4), (6.32, 7.3e-4), (19.49, 3.3e-6)],
    ids=["epsilon 1", "epsilon 2", "epsilon 5", "epsilon 8"],
)
def test_the_papers_t_tests(t: float, p: float) -> None:
    """NoiseCurve A.3: six seeds; p = .076, < .001, < .001, < .00001."""
    found = paired_t_test(*runs_with_t(t))
    assert found.statistic == pytest.approx(t)
    assert found.p_value == pytest.approx(p, rel=0.02)
    assert found.effect == pytest.approx(t / math.sqrt(6))


@pytest.mark.parametrize(("n", "ways"), [(6, 924), (3, 20)])
def test_the_papers_permutation_tests(n: int, ways: int) -> None:
    """Every run of ours above every run of theirs: 6!6!/12! = 1/924, and 3!3!/6! = 0.05."""
    theirs = np.linspace(66.0, 67.0, n)
    found = permutation_test(theirs + 1.5, theirs)
    assert found.p_value == found.smallest == 1 / ways
    assert found.effect == pytest.approx(1.5)
    assert f"all {ways} ways" in found.method
    assert permutation_test(theirs, theirs + 1.5).p_value == 1.0


def test_the_smallest_paired_value_is_one_in_all_signs() -> None:
    theirs = [66.0, 66.5, 67.2, 66.1, 66.9, 66.4]
    found = permutation_test([s + 1 + i / 10 for i, s in enumerate(theirs)], theirs, paired=True)
    assert found.p_value == found.smallest == 1 / 64


@pytest.mark.parametrize(("n", "m"), [(4, 4), (2, 7), (7, 2), (5, 3)])
def test_unpaired_is_what_scipy_and_counting_give(n: int, m: int) -> None:
    rng = np.random.default_rng(n)
    for shift in (0.0, 0.5, 1.5):
        x, y = rng.normal(shift, size=n), rng.normal(size=m)
        pooled, hits = [*x, *y], 0
        for ours in itertools.combinations(range(n + m), n):
            rest = [pooled[i] for i in range(n + m) if i not in ours]
            hits += np.mean([pooled[i] for i in ours]) - np.mean(rest) >= x.mean() - y.mean() - 1e-12
        found = permutation_test(x, y)
        assert found.p_value == hits / math.comb(n + m, n)
        reference = stats.permutation_test(
            (x, y), lambda a, b: a.mean() - b.mean(), permutation_type="independent", alternative="greater"
        )
        assert found.p_value == pytest.approx(reference.pvalue)


def test_paired_is_what_counting_gives() -> None:
    rng = np.random.default_rng(0)
    for shift in (-0.5, 0.0, 0.8):
        x, y = rng.normal(shift, size=7), rng.normal(size=7)
        d = x - y
        hits = sum(np.dot(s, d) >= d.sum() - 1e-12 for s in itertools.product((1, -1), repeat=7))
        assert permutation_test(x, y, paired=True).p_value == hits / 2**7
        assert paired_t_test(x, y).p_value == pytest.approx(stats.ttest_rel(x, y, alternative="greater").pvalue)


def test_ties_count_as_at_least_as_large() -> None:
    """0.1 + 0.2 and 0.3 + 0.0 differ in floating point and not otherwise."""
    assert 0.1 + 0.2 != 0.3 + 0.0
    # of {.1, .2, .3, 0} the pairs with a sum of at least .3: {.1,.2}, {.3,0}, {.3,.1}, {.3,.2}
    assert permutation_test([0.3, 0.0], [0.1, 0.2]).p_value == 4 / 6
    assert permutation_test([0.1, 0.2], [0.3, 0.0]).p_value == 4 / 6
    assert permutation_test([0.7, 0.7, 0.7], [0.7, 0.7]).p_value == 1.0
    # a difference of 0 has the same sum under both signs
    assert permutation_test([0.3, 0.5, 0.7], [0.1, 0.5, 0.4], paired=True).p_value == 2 / 8


@pytest.mark.parametrize("paired", [False, True])
def test_no_level_is_exceeded(paired: bool) -> None:
    """Under the null hypothesis all assignments are equally likely: at most a share α of them has p ≤ α. Exactly."""
    values = np.array([0.1, 0.4, 0.4, 0.5, 0.9, 1.3, 0.2, 0.8])  # with a tie
    found = []
    if paired:
        for signs in itertools.product((1, -1), repeat=4):
            d = np.array(signs) * (values[:4] - values[4:])
            found.append(permutation_test(values[4:] + d, values[4:], paired=True).p_value)
    else:
        for ours in itertools.combinations(range(8), 4):
            rest = [i for i in range(8) if i not in ours]
            found.append(permutation_test(values[list(ours)], values[rest]).p_value)
    p = np.array(found)
    for alpha in np.unique(p):
        assert (p <= alpha).mean() <= alpha + 1e-12
    assert p.min() < 0.15  # and the test is not empty


@pytest.mark.parametrize(("paired", "n"), [(False, 12), (True, 22)])
def test_too_many_are_drawn(paired: bool, n: int) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(0.5, size=n), rng.normal(size=n)
    found = permutation_test(x, y, paired=paired, draws=40_000)
    assert "40000 of" in found.method and found.smallest == 1 / 40_001
    if paired:
        exact = float((_signed_sums(x - y) >= (x - y).sum() - 1e-9).mean())
    else:
        exact = float((_subset_sums(np.concatenate([x, y]), n) >= x.sum() - 1e-9).mean())
    assert found.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 40_000))
    assert permutation_test(x, y, paired=paired, draws=40_000) == found
    assert permutation_test(x + 100, y, paired=paired, draws=500).p_value == 1 / 501  # never 0


def test_equal_differences_have_no_t() -> None:
    same = paired_t_test([0.5, 0.6], [0.5, 0.6])
    assert (same.p_value, same.effect) == (1.0, 0.0)
    with pytest.raises(SordinoError, match="paired=True"):
        paired_t_test([0.81, 0.71, 0.91], [0.80, 0.70, 0.90])


@pytest.mark.parametrize("test", [paired_t_test, permutation_test])
@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([1.0], [2.0, 3.0], "ours has 1 run"),
        ([1.0, 2.0], [], "theirs has 0 run"),
        ([1.0, math.nan], [1.0, 2.0], r"ours\[1\] is nan"),
        ([1.0, 2.0], [math.inf, 2.0], r"theirs\[0\] is inf"),
        ([[1.0, 2.0]], [1.0, 2.0], "shape"),
        (["good", "bad"], [1.0, 2.0], "sequence of numbers"),
    ],
)
def test_bad_input(test: object, ours: object, theirs: object, message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        test(ours, theirs)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_pairs_must_pair_up() -> None:
    for call in (lambda: paired_t_test([1, 2, 3], [1, 2]), lambda: permutation_test([1, 2, 3], [1, 2], paired=True)):
        with pytest.raises(SordinoError, match="3 runs of ours and 2 of theirs"):
            call()
    assert 0 < permutation_test([1, 2, 3], [1, 2]).p_value <= 1
    with pytest.raises(SordinoError, match="draws=0"):
        permutation_test([1, 2], [1, 2], draws=0)
