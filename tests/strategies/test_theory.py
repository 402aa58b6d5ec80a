"""The lemmas of DP-λCGD, its closed forms, and its published errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sordino.accounting import gaussian_sigma
from sordino.budget import Participation
from sordino.strategies import LambdaCGD, Problem, Strategy, make_strategy
from sordino.strategies.sensitivity import leftmost, leftmost_applies, separated

from .test_strategies import brute_force, participations, signs

GRID = np.linspace(0.0, 1.0, 201).round(4)


def rmse(s: Strategy, p: Participation) -> float:
    return s.rmse() * s.sensitivity(p)


def max_se(s: Strategy, p: Participation) -> float:
    return s.max_se() * s.sensitivity(p)


class TestLambda:
    def test_lemma_2_the_best_max_error_is_of_order_k_plus_sqrt_k_times_the_fourth_root_of_n(self) -> None:
        """The proof's own λ reach it with one constant over four decades; DP-SGD, at √(nk), does not."""
        ratios, without = [], []
        for n in (100, 1000, 10_000, 100_000):
            for k in {1, 2, 10, math.isqrt(n), n // 10, n // 2, n}:
                b = n // k
                p = Participation(steps=n, epochs=k, separation=b)
                order = k + math.sqrt(k) * n**0.25
                lams = {0.0, 1.0, math.exp(-1.0 / b), math.exp(-1.0 / math.sqrt(n))}
                ratios.append(min(max_se(LambdaCGD(lam, n), p) for lam in lams) / order)
                without.append(math.sqrt(n * k) / order)
        assert max(ratios) < 2.1 and max(without) > 15

    def test_lemma_2_row_norms(self) -> None:
        n = 50
        for lam in (0.0, 0.3, 0.99, 1.0):
            b = np.tril(np.ones((n, n))) @ np.linalg.inv(LambdaCGD(lam, n).dense())
            assert np.linalg.norm(b, axis=1).max() ** 2 == pytest.approx(1 + (1 - lam) ** 2 * (n - 1))
            assert np.linalg.norm(b) ** 2 == pytest.approx(n + (1 - lam) ** 2 * n * (n - 1) / 2)

    @pytest.mark.parametrize("name", ["lambda-cgd", "lambda-cgd-normalized"])
    def test_lemma_3_the_max_error_wants_at_least_as_much_correlation_as_the_mean(self, name: str) -> None:
        for n, k in ((100, 5), (400, 4), (60, 1), (97, 3)):
            p = Participation(steps=n, epochs=k, separation=-(-n // k))
            s = [make_strategy(f"{name}:{lam}", n) for lam in GRID]
            mean, worst = (int(np.argmin([measure(x, p) for x in s])) for measure in (rmse, max_se))
            assert worst >= mean > 0
            found = make_strategy(name, Problem(n, p)).certificate
            assert found["lambda_max_se"] > found["lambda_rmse"]
            assert found["lambda_rmse"] == pytest.approx(GRID[mean], abs=0.005)
            assert found["lambda_max_se"] == pytest.approx(GRID[worst], abs=0.005)

    def test_corollary_6_in_full_batches_no_correlation_is_best(self) -> None:
        """b = 1, k = n: λ = 0 for both errors."""
        for n in (1, 2, 7, 40):
            p = Participation(steps=n, epochs=n, separation=1)
            for lam in GRID[1:]:
                assert rmse(LambdaCGD(lam, n), p) >= math.sqrt(n * (n + 1) / 2) * (1 - 1e-12)
                assert max_se(LambdaCGD(lam, n), p) >= n * (1 - 1e-12)
            found = make_strategy("lambda-cgd", Problem(n, p))
            assert found.is_identity and found.certificate["lambda_rmse"] == found.certificate["lambda_max_se"] == 0.0

    def test_closed_form_holds_at_n_equal_kb_and_only_there(self) -> None:
        for lam, b, k in ((0.9, 3, 4), (0.5, 1, 7), (0.999999, 5, 3)):
            p = Participation(steps=k * b, epochs=k, separation=b)
            j = np.arange(1, k + 1)
            closed = (1 - lam ** (2 * b)) / ((1 - lam**2) * (1 - lam**b) ** 2) * np.square(1 - lam ** (b * j)).sum()
            assert make_strategy(f"lambda-cgd:{lam}", k * b).sensitivity(p) ** 2 == pytest.approx(closed, rel=1e-6)
        p = Participation(steps=12, epochs=4, separation=3)
        assert make_strategy("lambda-cgd:1", 12).sensitivity(p) ** 2 == pytest.approx(3 * (1 + 4 + 9 + 16))
        ten = make_strategy("lambda-cgd:0.9", 10)
        assert ten.sensitivity(Participation(steps=10, epochs=3, separation=3)) == pytest.approx(5.015, abs=5e-4)
        assert ten.sensitivity(Participation(steps=10, epochs=4, separation=3)) == pytest.approx(5.427, abs=5e-4)

    def test_near_one_is_continuous(self) -> None:
        p = Participation(steps=1000, epochs=4, separation=250)
        at_one = make_strategy("lambda-cgd:1", 1000).sensitivity(p)
        near = make_strategy("lambda-cgd:0.9999999999", 1000).sensitivity(p)
        assert near == pytest.approx(at_one, rel=1e-6)


class TestNormalized:
    def test_proposition_7_normalising_columns_scales_the_rows_of_the_inverse(self) -> None:
        """``C̃⁻¹Z = D(C⁻¹Z)``: one multiplication an entry, nothing more to draw again or to keep."""
        z = np.random.default_rng(0).normal(size=(40, 2))
        for lam in (0.3, 0.9, 1.0):
            plain, unit = make_strategy(f"lambda-cgd:{lam}", 40), make_strategy(f"lambda-cgd-normalized:{lam}", 40)
            d = np.linalg.norm(plain.dense(), axis=0)
            np.testing.assert_allclose(unit.dense() * d, plain.dense(), rtol=1e-12)
            np.testing.assert_allclose(unit.solve(z), d[:, None] * plain.solve(z), rtol=1e-12)
            assert unit.vectors_regenerated == plain.vectors_regenerated and unit.vectors_stored == 0

    @pytest.mark.parametrize("lam", [0.01, 0.5, 0.9, 0.999, 1.0])
    def test_lemma_8_the_leftmost_columns_are_the_worst(self, lam: float) -> None:
        """Its two inequalities, and the formula, for every block of leading steps."""
        whole = make_strategy(f"lambda-cgd-normalized:{lam}", 24)
        for n in (24, 17):
            c = whole.dense()[:n, :n]
            x = c.T @ c
            for b in (1, 2, 5):
                assert leftmost_applies(c, b)
                for i, j in itertools.combinations(range(n), 2):
                    if i + b < j:
                        assert x[i, j] <= x[i, j - 1] + 1e-12
                    if i > 0 and i + b <= j:
                        assert x[i, j] <= x[i - 1, j - 1] + 1e-12
                for k in (1, 2, -(-n // b)):
                    p = Participation(steps=n, epochs=k, separation=b)
                    assert whole.sensitivity(p) == pytest.approx(leftmost(c, k, b), rel=1e-12)
                    assert whole.sensitivity(p) <= separated(x, k, b).value * (1 + 1e-12)
        small = make_strategy(f"lambda-cgd-normalized:{lam}", 9)
        for p in participations(9):
            assert small.sensitivity(p) == pytest.approx(brute_force(small.dense(), p), rel=1e-10)

    def test_lemma_9_it_helps_a_single_participation(self) -> None:
        for n in (2, 10, 80, 1000):
            p = Participation(steps=n, epochs=1, separation=n)
            for lam in (0.1, 0.5, 0.9, 0.99):
                plain, unit = make_strategy(f"lambda-cgd:{lam}", n), make_strategy(f"lambda-cgd-normalized:{lam}", n)
                assert unit.sensitivity(p) == pytest.approx(1.0)
                assert rmse(unit, p) < rmse(plain, p)

    def test_error_closed_form(self) -> None:
        s = make_strategy("lambda-cgd-normalized:0.9", 60)
        d = np.linalg.norm(make_strategy("lambda-cgd:0.9", 60).dense(), axis=0)
        kept = np.square(d[:-1] - 0.9 * d[1:]) * np.arange(59, 0, -1)
        assert s.rmse() ** 2 * 60 == pytest.approx(np.square(d).sum() + kept.sum())


def largest_sum(c: np.ndarray) -> float:
    """``max ‖C g‖`` over signs: what an example in every step can do in one dimension, so at most the sensitivity."""
    return float(np.linalg.norm(c @ signs(len(c)), axis=0).max())


class TestFullBatch:
    """b = 1, k = n."""

    @pytest.mark.parametrize("n", [1, 2, 10, 1000])
    def test_theorem_4(self, n: int) -> None:
        p = Participation(steps=n, epochs=n, separation=1)
        identity = rmse(make_strategy("identity", n), p)
        j = np.arange(1, n + 1)
        weights = (n - j + 1.0) ** 0.25
        diagonal = math.sqrt(np.square(weights).sum()) * math.sqrt(((n - j + 1) / np.square(weights)).sum() / n)
        bound = math.sqrt((n + 1) * (2 * n + 1) / 6)
        assert identity == pytest.approx(math.sqrt(n * (n + 1) / 2))
        assert diagonal == pytest.approx(np.sqrt(j).sum() / math.sqrt(n))
        assert bound <= diagonal * (1 + 1e-12) and diagonal <= identity * (1 + 1e-12)
        if n == 1000:
            assert identity / diagonal == pytest.approx(3 / math.sqrt(8), rel=2e-3)  # 6 %
            assert identity / bound == pytest.approx(math.sqrt(1.5), rel=2e-3)  # 22 %
            assert diagonal / bound == pytest.approx(2 / math.sqrt(3), rel=2e-3)  # 15 %

    def test_theorem_4_no_factorisation_is_below_its_lower_bound(self) -> None:
        """Random ones and optimised ones; and, for ``‖C e‖`` alone, the factorisations that come near it."""
        rng, n = np.random.default_rng(0), 8
        a, bound = np.tril(np.ones((n, n))), math.sqrt((n + 1) * (2 * n + 1) / 6)
        for trial in range(200):
            c = np.tril(rng.normal(size=(n, n)) * rng.choice([0.01, 0.3, 1.0])) + np.diag(rng.uniform(0.2, 2, n))
            c = np.abs(c) if trial % 2 else c
            error = np.linalg.norm(a @ np.linalg.inv(c)) / math.sqrt(n)
            assert error * largest_sum(c) >= bound
            assert error * largest_sum(c) >= error * np.linalg.norm(c.sum(axis=1)) * (1 - 1e-12) >= bound * (1 - 1e-9)
        p = Participation(steps=n, epochs=n, separation=1)
        for spelled in ("bisr:4", "bsr:3", "band-mf:1", "band-mf:4", "band-inv-mf:3", "lambda-cgd:0.3"):
            assert rmse(make_strategy(spelled, Problem(n, p)), p) > bound
        target = a @ np.ones(n)
        reflection = np.eye(n)  # takes Ae to ‖Ae‖e_1
        v = target - np.linalg.norm(target) * np.eye(n)[0]
        reflection -= 2 * np.outer(v, v) / (v @ v)
        for lam, near in ((0.1, 1.04), (0.001, 1.0001)):
            c = np.diag(1.0 / np.array([1.0] + [lam] * (n - 1))) @ reflection @ a
            value = np.linalg.norm(a @ np.linalg.inv(c)) / math.sqrt(n) * np.linalg.norm(c.sum(axis=1))
            assert bound * (1 - 1e-9) <= value <= near * bound

    def test_lemma_5_no_factorisation_has_a_smaller_max_error_than_none(self) -> None:
        """The last row of B and ``C e`` have the inner product n (Pillutla et al. 2025, Proposition 3.11)."""
        rng, n = np.random.default_rng(1), 8
        a = np.tril(np.ones((n, n)))
        p = Participation(steps=n, epochs=n, separation=1)
        assert max_se(make_strategy("identity", n), p) == pytest.approx(n)
        for trial in range(200):
            c = np.tril(rng.normal(size=(n, n)) * rng.choice([0.01, 0.3, 1.0])) + np.diag(rng.uniform(0.2, 2, n))
            c = np.abs(c) if trial % 2 else c
            assert np.linalg.norm(a @ np.linalg.inv(c), axis=1).max() * largest_sum(c) >= n * (1 - 1e-12)
        for spelled in ("bisr:4", "bsr:3", "lambda-cgd:0.3", "lambda-cgd-normalized:0.3"):
            assert max_se(make_strategy(spelled, Problem(n, p)), p) >= n


# T = 3900, k = 10, b = 390, (8, 1e-5), without amplification (DP-λCGD, Table 4).
FIXED = Participation(steps=3900, epochs=10, separation=390, fixed=True)
SEPARATED = Participation(steps=3900, epochs=10, separation=390)


def published_rmse(spelled: str, p: Participation) -> float:
    s = make_strategy(spelled, Problem(3900, p))
    return s.rmse() * s.sensitivity(p) * gaussian_sigma(8.0, 1e-5)


@pytest.mark.parametrize(
    ("spelled", "published"),
    [
        ("identity", 83.85),
        ("lambda-cgd:0.9", 19.72),
        ("lambda-cgd:0.95", 14.74),
        ("lambda-cgd:0.975", 12.73),
        ("bisr:2", 48.45),
        ("bisr:16", 17.95),
        ("bsr:2", 62.51),
        ("bsr:16", 26.27),
    ],
)
def test_published_rmse(spelled: str, published: float) -> None:
    for p in (FIXED, SEPARATED):
        assert published_rmse(spelled, p) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("spelled", "published", "reached"),
    [
        ("lambda-cgd", 12.69, 12.69),
        ("band-inv-mf:2", 12.69, 12.69),
        ("band-inv-mf:4", 10.27, 10.2473),
        ("band-inv-mf:16", 8.54, 8.507),
        ("band-inv-mf:64", 8.15, 13.5657 * 0.60023),
        ("band-mf:4", 42.29, 42.281),
        ("band-mf:16", 22.05, 22.044),
        ("band-mf:390", 7.77, 12.883 * 0.60023),
    ],
)
def test_published_rmse_of_optimised_ones_is_reached_or_undercut(
    spelled: str, published: float, reached: float
) -> None:
    for p in (FIXED, SEPARATED):
        value = published_rmse(spelled, p)
        assert published * 0.99 < value < published * 1.001 and value < reached * (1 + 1e-5)
