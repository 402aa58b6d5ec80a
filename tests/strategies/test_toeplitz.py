"""Power series, the sensitivity of Toeplitz matrices of any sign and scale, and long runs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.errors import SordinoError, Unsupported
from sordino.strategies import BLT, Toeplitz, make_strategy, parse_bandwidth
from sordino.strategies import power_series as series
from sordino.strategies import toeplitz_sensitivity as sensitivity
from sordino.strategies.sensitivity import leftmost_applies, separated
from sordino.strategies.toeplitz_sensitivity import leftmost, majorant, repeated, third_condition, toeplitz_sensitivity

from .test_strategies import brute_force, participations


def dense(c: np.ndarray, n: int, scale: np.ndarray | None = None) -> np.ndarray:
    full = sum(value * np.eye(n, k=-lag) for lag, value in enumerate(c[:n]))
    return full if scale is None else full * scale


class TestPowerSeries:
    @pytest.mark.parametrize("direct", [256, 0])  # by recursion, by FFT
    def test_products_and_quotients(self, direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(series, "_SHORT", direct)
        rng = np.random.default_rng(0)
        for n, p in itertools.product((1, 2, 3, 50), (1, 2, 7, 50)):
            a = np.r_[1.5, rng.normal(size=p - 1) * 0.8 ** np.arange(1, p)]
            t = dense(a, n)
            assert np.allclose(series.reciprocal(a, n), np.linalg.inv(t)[:, 0], atol=1e-9)
            for x in (rng.normal(size=n), rng.normal(size=(n, 4))):
                assert np.allclose(series.product(a, x), t @ x, atol=1e-12)
                assert np.allclose(series.quotient(a, x), np.linalg.solve(t, x), atol=1e-8)
                assert np.allclose(series.product_transposed(a, x), t.T @ x, atol=1e-12)
                assert np.allclose(series.quotient_transposed(a, x), np.linalg.solve(t.T, x), atol=1e-8)

    def test_fft_agrees_with_the_recursion_on_a_long_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        w = make_strategy("bisr:64", 20_000)
        by_recursion = w.coefficients
        monkeypatch.setattr(series, "_SHORT", 0)
        np.testing.assert_allclose(series.reciprocal(w.inverse_coefficients[:64], 20_000), by_recursion, atol=1e-13)


class TestSensitivity:
    def test_repeated_is_the_sum_of_shifted_columns(self) -> None:
        c = np.random.default_rng(0).uniform(size=200)
        for k, b in itertools.product((1, 2, 63, 65, 100, 200), (1, 2, 3, 70)):
            direct = dense(c, 200)[:, 0 : k * b : b].sum(axis=1)
            np.testing.assert_allclose(repeated(c, k, b), direct, rtol=1e-11)

    def test_majorant_is_the_smallest_that_does_not_increase_from_lag_b_on(self) -> None:
        rng = np.random.default_rng(1)
        for b in (1, 3, 9, 10, 12):
            c = rng.normal(size=10)
            m = majorant(c, b)
            assert (m >= np.abs(c)).all() and (m[:b] == np.abs(c)[:b]).all() and (np.diff(m[b:]) <= 0).all()
            for lag in range(b, 10):
                assert m[lag] == np.abs(c[lag:]).max()

    def test_third_condition_is_the_third_of_the_dense_conditions(self) -> None:
        rng = np.random.default_rng(2)
        seen = set()
        for trial in range(300):
            c = np.r_[1.0, rng.uniform(0, 1, 7) * (0.95, 0.6, 0.3)[trial % 3] ** np.arange(1, 8)]
            for b in (1, 2, 4):
                holds = third_condition(c, b)
                assert holds == leftmost_applies(dense(c, 8), b)
                seen.add((holds, bool((np.diff(c[b:]) <= 0).all())))
                if (np.diff(c[b:]) <= 0).all():
                    assert holds  # summation by parts
        assert seen == {(True, True), (True, False), (False, False)}  # weaker than no increase

    @pytest.mark.parametrize("seed", range(8))
    def test_any_coefficients_against_brute_force(self, seed: int) -> None:
        """Signs, increases, gaps, bands wider than b; equal where exact is claimed."""
        rng = np.random.default_rng(seed)
        n = 9
        kind = (rng.normal, rng.uniform)[seed % 2]
        c = np.r_[1.0, kind(size=n - 1) * (1.0, 0.5, 0.9, 0.7)[seed % 4] ** np.arange(1, n)]
        c[rng.uniform(size=n) < 0.2] = 0.0
        c[0] = 1.0
        scale = None if seed < 4 else rng.uniform(0.5, 1.5, n) if seed < 6 else np.r_[np.ones(n - 3), 1.1, 1.3, 1.6]
        t = dense(c, n, scale)
        for p in participations(n):
            bound, truth = toeplitz_sensitivity(c, scale, p), brute_force(t, p, rng)
            assert bound.value >= truth * (1 - 1e-12), (p, bound)
            if bound.exact:
                assert bound.value == pytest.approx(truth, rel=1e-9), (p, bound)

    def test_bounds_without_dense_matrices_or_enumeration_hold_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What long runs fall back to."""
        for name in ("_DENSE", "_CHECKED", "_ENUMERATED"):
            monkeypatch.setattr(sensitivity, name, 0)
        rng = np.random.default_rng(3)
        for trial in range(30):
            n = 8
            c = np.r_[1.0, rng.normal(size=n - 1) * 0.8 ** np.arange(1, n)]
            c = np.abs(c) if trial % 3 else c
            scale = (None, rng.uniform(0.5, 1.5, n), np.r_[np.ones(n - 3), 1.1, 1.3, 1.6])[trial % 3]
            for p in participations(n):
                if p.steps == n:
                    bound, truth = toeplitz_sensitivity(c, scale, p), brute_force(dense(c, n, scale), p)
                    assert bound.value >= truth * (1 - 1e-12), (p, bound)
                    assert not bound.exact or bound.value == pytest.approx(truth, rel=1e-9)

    def test_the_formula_alone_is_exceeded_and_not_used(self) -> None:
        """C⁻¹ = (1, 0, 0, −.9), n = 8, k = 2, b = 2: the leftmost columns say 2.068, the truth is 2.745."""
        s = Toeplitz("example", 8, inverse=np.array([1.0, 0.0, 0.0, -0.9]))
        p = Participation(steps=8, epochs=2, separation=2)
        assert leftmost(s.coefficients, 2, 2) == pytest.approx(2.068, abs=1e-3)
        assert brute_force(s.dense(), p) == pytest.approx(2.745, abs=1e-3)
        bound = s.sensitivity_bound(p)
        assert bound.value >= brute_force(s.dense(), p) * (1 - 1e-12) and not bound.exact
        fixed = Participation(steps=8, epochs=2, separation=2, fixed=True)
        assert s.sensitivity(fixed) == pytest.approx(brute_force(s.dense(), fixed))  # here it is the formula's

    @pytest.mark.parametrize("b", [4, 2, 1])
    def test_a_late_bump_is_found(self, b: int) -> None:
        """A large coefficient at a lag that no leftmost pattern sees."""
        c = np.zeros(12)
        c[0], c[5] = 1.0, 0.95
        s = Toeplitz("bump", 12, coefficients=c)
        for k in (2, 12 // b):
            p = Participation(steps=12, epochs=k, separation=b)
            truth = brute_force(s.dense(), p)
            assert s.sensitivity(p) >= truth * (1 - 1e-12)
            if (k, b) == (2, 4):
                assert truth > 1.2 * leftmost(c, k, b)

    def test_rounding_of_an_inverse_does_not_cost_the_exact_route(self) -> None:
        s = make_strategy("bisr:8", 400)
        noisy = s.coefficients - 1e-17 * np.arange(400) % 3
        p = Participation(steps=400, epochs=8, separation=50)
        assert toeplitz_sensitivity(noisy, None, p).exact
        assert toeplitz_sensitivity(noisy, None, p).value == pytest.approx(s.sensitivity(p), rel=1e-12)

    def test_columns_that_do_not_overlap_are_exact_for_any_sign(self) -> None:
        c = np.array([1.0, -0.7, 0.4])
        s = Toeplitz("signed", 12, coefficients=c)
        assert not s.nonnegative
        for b in (3, 4, 5):
            bound = s.sensitivity_bound(Participation(steps=12, epochs=2, separation=b))
            assert bound.exact and bound.value == pytest.approx(np.sqrt(2 * c @ c))

    def test_the_majorant_is_not_far_above(self) -> None:
        rng, worst = np.random.default_rng(5), 1.0
        for _ in range(20):
            c = np.r_[1.0, rng.uniform(size=59) * 0.9 ** np.arange(1, 60)]
            t = dense(c, 60)
            m = leftmost(majorant(c, 12), 5, 12)
            worst = max(worst, m / separated(t.T @ t, 5, 12).value)
        assert worst < 1.2


class TestBase:
    def test_what_is_given_decides_what_is_kept(self) -> None:
        banded = Toeplitz("c", 10, coefficients=np.array([2.0, 1.0, 0.0, 0.5, 0.0, 0.0]))
        assert (banded.bands, banded.vectors_stored, banded.vectors_regenerated) == (4, 3, 0)
        inverse = Toeplitz("w", 10, inverse=np.array([2.0, 1.0, 0.0, 0.5, 0.0]))
        assert (inverse.bands, inverse.vectors_stored, inverse.vectors_regenerated) == (None, 0, 3)
        assert not inverse.nonnegative and inverse.terms(9) == [(9, 2.0), (8, 1.0), (6, 0.5)]
        single = Toeplitz("s", 10, coefficients=np.array([2.0, 0.0]))
        assert single.bands == 1 and not single.is_identity and single.terms(4) == [(4, 0.5)]
        assert Toeplitz("i", 10, inverse=np.array([1.0, 0.0])).is_identity

    def test_the_ring_reads_no_output_before_the_first(self) -> None:
        s = make_strategy("bsr:4", 10)
        first = s.recurrence(0)
        assert first.fresh == 1.0 and set(first.read) == {0.0} and first.put == (1.0, 0.0, 0.0)
        later = s.recurrence(4)  # slot 1 held x_1 = x_{t−3}, and is replaced
        assert later.read == (-0.5, -0.3125, -0.375)  # x_3 in slot 0, x_1 in 1, x_2 in 2
        assert later.keep == (1.0, 0.0, 1.0) and later.put == (0.0, 1.0, 0.0)

    def test_rows_of_a_banded_matrix_are_not_sparse(self) -> None:
        with pytest.raises(Unsupported, match="'bsr:4': row 7 of C⁻¹ reaches back to step 0; keep the last 3 outputs"):
            make_strategy("bsr:4", 10).terms(7)

    @pytest.mark.parametrize("given", ["coefficients", "inverse"])
    def test_noise_and_sensitivity_go_on_reading_the_same_numbers(self, given: str) -> None:
        values, scale = np.array([1.0, -0.5, 0.25]), np.linspace(1.0, 2.0, 6)
        s = Toeplitz("mine", 6, scale=scale, **{given: values})  # type: ignore[arg-type]
        before = s.solve(np.eye(6)), s.dense(), s.sensitivity(Participation(6, 3, 2))
        values *= 1e3
        scale *= 1e3
        assert np.array_equal(s.solve(np.eye(6)), before[0]) and np.array_equal(s.dense(), before[1])
        assert s.sensitivity(Participation(6, 3, 2)) == before[2]
        kept = [s.coefficients, s.inverse_coefficients, s.scale]
        kept += [make_strategy("lambda-cgd-normalized:0.9", 6).column_norms]  # type: ignore[attr-defined]
        blt = BLT(6, np.array([0.5]), np.array([0.3]))
        for array in [*kept, blt.decays, blt.weights]:
            with pytest.raises(ValueError, match="read-only"):
                array *= 0.1

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"coefficients": [1.0, np.nan]}, "finite"),
            ({"coefficients": [-1.0, 1.0]}, "the first above 0"),
            ({"inverse": [0.0]}, "1 to 4 numbers"),
            ({"inverse": [1.0, 2.0, 3.0, 4.0, 5.0]}, "1 to 4 numbers"),
            ({"coefficients": ["one"]}, "real numbers"),
            ({"coefficients": [1e-170]}, "1e-100"),
            ({"coefficients": [1.0], "scale": [-5.0, 1.0, 1.0, 1.0]}, "above 0"),
            ({"coefficients": [1.0], "scale": [1.0]}, "4 numbers"),
            ({"inverse": [1e-90, 1.0]}, "grow beyond 1e.100 in 4 steps"),
        ],
    )
    def test_what_is_no_strategy_is_refused(self, options: dict[str, list[float]], match: str) -> None:
        with pytest.raises(SordinoError, match=match):
            Toeplitz("mine", 4, **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize("w", [[1.0, -3.0, 1.0], [1.0, -1.5], [1.0, 3.0, 1.0, 0.2]])
    def test_a_matrix_that_overflows_is_refused(self, w: list[float]) -> None:
        """inf − inf is not a number, nor would its sensitivity be."""
        with np.errstate(all="ignore"), pytest.raises(SordinoError, match="grow beyond"):
            Toeplitz("mine", 2000, inverse=np.array(w))

    def test_bandwidths(self) -> None:
        assert parse_bandwidth("10", "bsr", 10) == 10
        for argument in ("", "0", "-1", "1.5", "x", "11", "1e3"):
            with pytest.raises(SordinoError, match="bsr") as caught:
                parse_bandwidth(argument, "bsr", 10)
            assert "\n" not in str(caught.value)


LONG = """
import resource, sys
import numpy as np
from sordino.budget import Participation
from sordino.strategies import Problem, Workload, make_strategy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
n = 64_000
z = np.random.default_rng(0).normal(size=n)
for spelled in sys.argv[1:]:
    s = make_strategy(spelled, n)
    for p in (Participation(n, 10, 6400), Participation(n, 10, 6400, True), Participation(n - 1, n // 40, 40)):
        assert s.sensitivity(p) > 1
    assert np.abs(s.multiply(s.solve(z)) - z).max() < 1e-8
    assert 0 < s.rmse() <= s.max_se() and s.row_norm(n - 1) > 0 and s.columns(n - 9, n).shape == (n, 9)
    s.recurrence(n - 1) if s.vectors_stored else s.terms(n - 1)
    assert s.column_norm() >= 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_long_runs_in_linear_memory() -> None:
    """T = 64,000, where one T×T matrix has 33 GB."""
    spelled = ["bisr:64", "bsr:64", "bsr:64000", "bisr:64000", "lambda-cgd:0.99", "lambda-cgd-normalized:0.99"]
    out = subprocess.run([sys.executable, "-c", LONG, *spelled], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 400e6
