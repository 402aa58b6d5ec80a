"""One suite for every strategy, against its dense matrix and against brute force."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.errors import SordinoError, Unsupported
from sordino.strategies import STRATEGIES, Strategy, make_strategy
from sordino.strategies.workload import Workload

from .cases import EXAMPLES, SPELLED, build


def patterns(p: Participation) -> list[tuple[int, ...]]:
    """Every set of steps one example may take part in."""
    if p.fixed:
        return [tuple(range(i, p.steps, p.separation))[: p.epochs] for i in range(p.steps)]
    out: list[tuple[int, ...]] = []
    for size in range(1, p.epochs + 1):
        for steps in itertools.combinations(range(p.steps), size):
            if all(b - a >= p.separation for a, b in itertools.pairwise(steps)):
                out.append(steps)
    return out


@functools.cache
def signs(count: int) -> np.ndarray:
    """All ±1 vectors whose first entry is 1, as columns."""
    return np.array([(1.0, *rest) for rest in itertools.product((-1.0, 1.0), repeat=count - 1)]).T


def brute_force(c: np.ndarray, p: Participation, rng: np.random.Generator | None = None) -> float:
    """The largest ``‖C G‖`` over all patterns: equal contributions, all signs, and a few random vectors.

    A lower bound of the sensitivity, and equal to it where C ≥ 0.
    """
    c = c[: p.steps, : p.steps]
    best = 0.0
    for pattern in patterns(p):
        columns = c[:, list(pattern)]
        best = max(best, float(np.linalg.norm(columns.sum(axis=1))))
        if (columns < 0).any():
            best = max(best, float(np.sqrt(np.square(columns @ signs(len(pattern))).sum(axis=0).max())))
        if rng is not None and len(pattern) > 1:
            g = rng.normal(size=(20, len(pattern), 2))
            g /= np.linalg.norm(g, axis=2, keepdims=True)
            best = max(best, float(np.sqrt(np.square(columns @ g).sum(axis=(1, 2))).max()))
    return best


def participations(longest: int) -> list[Participation]:
    return [
        Participation(steps=n, epochs=k, separation=b, fixed=fixed)
        for n in range(1, longest + 1)
        for b in range(1, n + 1)
        for k in range(1, -(-n // b) + 1)
        for fixed in (False, True)
    ]


WORKLOADS = {
    "prefix sum": lambda n: Workload(),
    "momentum": lambda n: Workload(momentum=0.9),
    "decay": lambda n: Workload(shrink=0.95),
    "both": lambda n: Workload(momentum=0.5, shrink=0.99),
    "a constant rate": lambda n: Workload(momentum=0.5, learning_rates=(0.1,) * n),
    "schedule": lambda n: Workload(learning_rates=tuple(np.linspace(1.0, 0.0, n + 1)[:-1])),
    "all": lambda n: Workload(0.9, 0.97, tuple(1.0 + np.cos(np.linspace(0.0, 3.0, n)))),
}


@pytest.fixture(params=SPELLED)
def spelled(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def streamed(s: Strategy, z: np.ndarray) -> np.ndarray:
    """``C⁻¹ z``, step by step, from what the strategy says each step needs."""
    out = np.zeros_like(z)
    if s.vectors_stored == 0:
        for t in range(s.steps):
            out[t] = sum(coefficient * z[j] for j, coefficient in s.terms(t))
        return out
    kept = np.zeros((s.vectors_stored, *z.shape[1:]))
    for t in range(s.steps):
        r = s.recurrence(t)
        assert len(r.read) == len(r.keep) == len(r.put) == s.vectors_stored
        out[t] = r.fresh * z[t] + np.tensordot(r.read, kept, 1)
        kept = np.array(r.keep)[:, None] * kept + np.array(r.put)[:, None] * out[t]
    return out


class TestAgainstDense:
    def test_c_is_lower_triangular_and_its_inverse_is_its_inverse(self, spelled: str) -> None:
        s = build(spelled, 30)
        c = s.dense()
        assert c.shape == (30, 30) and c.dtype == np.float64
        assert np.array_equal(c, np.tril(c)) and (np.diagonal(c) > 0).all()
        np.testing.assert_allclose(c @ s.inverse(), np.eye(30), atol=1e-12)
        assert s.nonnegative == bool((c >= 0).all())
        assert s.is_identity == np.array_equal(c, np.eye(30))
        if s.bands is not None:
            assert np.array_equal(c, c * (np.subtract.outer(np.arange(30), np.arange(30)) < s.bands))

    def test_products_and_columns_are_those_of_the_dense_matrix(self, spelled: str) -> None:
        rng = np.random.default_rng(0)
        for n in (1, 2, 30):
            s = build(spelled, n)
            c = s.dense()
            for x in (rng.normal(size=n), rng.normal(size=(n, 3))):
                np.testing.assert_allclose(s.multiply(x), c @ x, atol=1e-12)
                np.testing.assert_allclose(s.solve(c @ x), x, atol=1e-10)
                np.testing.assert_allclose(s.solve_transposed(c.T @ x), x, atol=1e-10)
            for first, last in ((0, n), (0, 1), (n - 1, n), (n // 3, n // 2 + 1)):
                np.testing.assert_allclose(s.columns(first, last), c[:, first:last], atol=1e-14)

    def test_streamed_noise_is_that_of_the_dense_matrix(self, spelled: str) -> None:
        for n in (1, 2, 30):
            s = build(spelled, n)
            z = np.random.default_rng(n).normal(size=(n, 4))
            np.testing.assert_allclose(s.dense() @ streamed(s, z), z, atol=1e-10)

    def test_noise_is_either_drawn_again_or_kept(self, spelled: str) -> None:
        s = build(spelled, 30)
        assert s.vectors_stored == 0 or s.vectors_regenerated == 0
        if s.vectors_stored:
            with pytest.raises(Unsupported, match=re.escape(repr(s.name))):
                s.terms(29)
        else:
            assert max(sum(j < t for j, _ in s.terms(t)) for t in range(30)) == s.vectors_regenerated
            assert all(0 <= j <= t for t in range(30) for j, _ in s.terms(t))
            with pytest.raises(Unsupported, match=re.escape(repr(s.name))):
                s.recurrence(29)

    def test_row_and_column_norms(self, spelled: str) -> None:
        s = build(spelled, 30)
        inverse = np.linalg.inv(s.dense())
        for t in range(30):
            assert s.row_norm(t) == pytest.approx(np.linalg.norm(inverse[t]), rel=1e-10)
        assert s.column_norm() == pytest.approx(np.linalg.norm(s.dense(), axis=0).max(), rel=1e-12)

    @pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
    def test_errors_are_those_of_the_dense_matrix(self, spelled: str, workload: Callable[[int], Workload]) -> None:
        for n in (1, 2, 30):
            s, a = build(spelled, n), workload(n)
            product = a.dense(n) @ np.linalg.inv(s.dense())
            np.testing.assert_allclose(s.error_rows(a), np.square(product).sum(axis=1), rtol=1e-9)
            assert s.rmse(a) == pytest.approx(np.linalg.norm(product) / math.sqrt(n), rel=1e-10)
            assert s.max_se(a) == pytest.approx(np.linalg.norm(product, axis=1).max(), rel=1e-10)

    def test_sensitivity_is_brute_force_over_all_participation_patterns(self, spelled: str) -> None:
        s = build(spelled, 12)
        c = s.dense()
        for p in participations(12):  # every prefix of the run, every k and b
            bound, truth = s.sensitivity_bound(p), brute_force(c, p)
            assert bound.value >= truth * (1 - 1e-12), p
            if bound.exact:
                assert bound.value == pytest.approx(truth, rel=1e-10), p
            assert s.sensitivity(p) == bound.value

    def test_nothing_released_costs_nothing(self, spelled: str) -> None:
        assert build(spelled, 9).sensitivity(Participation(steps=0, epochs=0, separation=3)) == 0.0

    def test_a_step_past_the_last_is_refused(self, spelled: str) -> None:
        s = build(spelled, 5)
        for step in (5, -1):
            with pytest.raises(SordinoError, match="5 planned steps"):
                s.recurrence(step) if s.vectors_stored else s.terms(step)
            with pytest.raises(SordinoError, match="5 planned steps"):
                s.row_norm(step)
        with pytest.raises(SordinoError, match="built for 5"):
            s.sensitivity(Participation(steps=6, epochs=1, separation=1))

    def test_its_name_and_definition_build_it_again(self, spelled: str) -> None:
        s = build(spelled, 7)
        again = make_strategy(s.name, 7, s.definition())  # nothing but the steps is known when a run is resumed
        assert again.name == s.name and np.array_equal(again.dense(), s.dense())
        assert {key: value.tolist() for key, value in again.definition().items()} == {
            key: value.tolist() for key, value in s.definition().items()
        }


def test_every_registered_strategy_is_in_the_suite() -> None:
    assert set(EXAMPLES) == set(STRATEGIES.names())


def test_long_runs_take_no_time() -> None:
    start = time.perf_counter()
    for spelled in ("identity", "lambda-cgd:0.95", "lambda-cgd-normalized:0.95", "bisr:4", "bsr:4"):
        s = make_strategy(spelled, 1_000_000)
        s.sensitivity(Participation(steps=1_000_000, epochs=20, separation=50_000, fixed=True))
        s.recurrence(999_999) if s.vectors_stored else s.terms(999_999)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lambda-cgd:1.01", "from 0 to 1"),
        ("lambda-cgd:-0.1", "from 0 to 1"),
        ("lambda-cgd:nan", "from 0 to 1"),
        ("lambda-cgd:inf", "from 0 to 1"),
        ("lambda-cgd:much", "from 0 to 1"),
        ("lambda-cgd-normalized:2", "from 0 to 1"),
        ("identity:3", "takes no argument"),
        ("bisr", "needs a bandwidth"),
        ("bisr:0", "at least 1"),
        ("bisr:-3", "at least 1"),
        ("bisr:2.5", "at least 1"),
        ("bisr:many", "at least 1"),
        ("bisr:11", "above the 10 steps"),
        ("bsr:11", "above the 10 steps"),
        ("bsr:0", "at least 1"),
        ("band-inv-mf", "needs a bandwidth"),
        ("band-inv-mf:11", "above the 10 steps"),
        ("band-inv-mf:0", "at least 1"),
        ("band-mf", "needs a bandwidth"),
        ("band-mf:11", "above the 10 steps"),
        ("band-mf:x", "at least 1"),
        ("lamda-cgd:0.9", "did you mean 'lambda-cgd'"),
        ("", "not known"),
        (0.9, "must be a name"),
        (None, "must be a name"),
    ],
)
def test_bad_names(text: object, message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        make_strategy(text, 10)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "ten"])
def test_bad_steps(steps: object) -> None:
    with pytest.raises(SordinoError, match="steps="):
        make_strategy("identity", steps)  # type: ignore[arg-type]
