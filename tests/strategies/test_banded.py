"""Banded matrices with any entries: algebra, recursions and their derivatives, sensitivities, against dense ones."""

from __future__ import annotations

import time

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.strategies import Workload
from sordino.strategies.banded import Banded
from sordino.strategies.banded_algebra import cut, factor, from_dense, gram, multiply, solve, to_dense
from sordino.strategies.blocks import Covariances, Filter, Layout, Sums, curvature
from sordino.strategies.objectives import Errors, LowRank, Total, workload_filter
from sordino.strategies.sensitivity import sensitivity_of

from .test_strategies import brute_force, participations, streamed

SHAPES = [(1, 1), (2, 1), (2, 2), (5, 5), (7, 2), (23, 4), (40, 5), (30, 1), (9, 8)]


def columns_of(steps: int, bands: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = 0.4 * rng.normal(size=(steps, bands))
    columns[:, 0] = 1.0 + rng.random(steps)
    return cut(columns)


@pytest.mark.parametrize(("steps", "bands"), SHAPES)
class TestAlgebra:
    def test_products_solutions_and_factors_are_those_of_the_dense_matrix(self, steps: int, bands: int) -> None:
        columns = columns_of(steps, bands)
        c = to_dense(columns)
        np.testing.assert_array_equal(from_dense(c, bands), columns)
        for x in (np.arange(1.0, steps + 1), np.random.default_rng(1).normal(size=(steps, 3))):
            np.testing.assert_allclose(multiply(columns, x), c @ x, atol=1e-13)
            np.testing.assert_allclose(c @ solve(columns, x), x, atol=1e-12)
            np.testing.assert_allclose(c.T @ solve(columns, x, transposed=True), x, atol=1e-12)
        x = gram(columns)
        np.testing.assert_allclose(x, from_dense(c.T @ c, bands), atol=1e-13)
        np.testing.assert_allclose(factor(x), columns, atol=1e-12)

    def test_the_factor_is_the_reverse_one(self, steps: int, bands: int) -> None:
        """With it the norms of C's columns are √X_jj; the usual Cholesky factor of X does not keep them."""
        x = gram(columns_of(steps, bands))
        c = factor(x)
        assert c is not None
        np.testing.assert_allclose(np.square(c).sum(axis=1), x[:, 0], rtol=1e-12)

    def test_blocks_give_the_variances_and_derivatives_of_the_dense_matrix(self, steps: int, bands: int) -> None:
        rng = np.random.default_rng(2)
        columns = columns_of(steps, bands)
        c = to_dense(columns)
        inverse = np.linalg.inv(c)
        x_inverse = inverse @ inverse.T
        weights, ridge = rng.random(steps), rng.random(steps)
        workload = Workload(0.5, 0.9, tuple(rng.random(steps) + 0.1))
        for filtered, a in ((None, np.zeros((0, steps))), (workload_filter(workload, steps), workload.dense(steps))):
            for size in (1, 4, 100):
                layout = Layout(steps, bands, size)
                sums = Sums(layout, filtered)
                forward = Covariances(layout, sums, columns)
                np.testing.assert_allclose(forward.noise(), np.square(inverse).sum(axis=1))
                if filtered is not None:
                    np.testing.assert_allclose(forward.errors(), np.square(a @ inverse).sum(axis=1))
                costs = sums.costs(layout.rows(weights), layout.rows(ridge))
                w = np.diag(ridge) + (a.T @ (weights[:, None] * a) if len(a) else 0.0)
                value = np.einsum("kij,kij->", costs, forward.summed)
                assert value == pytest.approx(np.trace(w @ x_inverse))
                s, gradient = curvature(forward, costs)
                dense = x_inverse @ w @ x_inverse
                np.testing.assert_allclose(s, from_dense(dense, bands), rtol=1e-9, atol=1e-9 * np.abs(dense).max())
                np.testing.assert_allclose(gradient, from_dense(c @ dense, bands), atol=1e-9 * np.abs(dense).max())


def objectives(steps: int, bands: int) -> dict[str, tuple[Errors | LowRank | Total, np.ndarray | None]]:
    """Each with W where there is one."""
    rng = np.random.default_rng(3)
    prefix = workload_filter(Workload(), steps)
    q = rng.normal(size=(steps, 3))
    decays = np.array([0.5, 0.9, 0.99])
    memories = Filter(np.diag(decays), np.ones(3), np.diag([1.0, 2.0, 0.5]), np.ones(steps))
    a = [np.tril(d ** np.subtract.outer(np.arange(steps), np.arange(steps)).clip(0)) for d in decays]
    ones = np.tril(np.ones((steps, steps)))
    return {
        "prefix sum": (Errors(steps, bands, prefix), ones.T @ ones),
        "ridge": (Errors(steps, bands, ridge=0.3), 0.3 * np.eye(steps)),
        "memories": (
            Errors(steps, bands, memories),
            sum(f**2 * (m.T @ m) for f, m in zip((1.0, 2.0, 0.5), a, strict=True)),
        ),
        "low rank and ridge": (Total(LowRank(q), Errors(steps, bands, ridge=0.1)), q @ q.T + 0.1 * np.eye(steps)),
        "norm of errors": (Errors(steps, bands, prefix, 0.05, power=3.0), None),
    }


@pytest.mark.parametrize("name", objectives(1, 1))
def test_an_objective_and_its_gradient(name: str) -> None:
    """Against Tr(W X⁻¹) where there is a W, and finite differences in X."""
    steps, bands = 31, 4
    objective, w = objectives(steps, bands)[name]
    x = gram(columns_of(steps, bands))

    def value(x: np.ndarray) -> float:
        columns = factor(x)
        assert columns is not None
        return objective(columns)[0]

    columns = factor(x)
    assert columns is not None
    found, s = objective(columns)
    if w is not None:
        c = to_dense(columns)
        assert found == pytest.approx(np.trace(w @ np.linalg.inv(c.T @ c)))
    rng = np.random.default_rng(4)
    for _ in range(5):
        direction = cut(rng.normal(size=x.shape))
        h = 1e-5
        slope = (value(x + h * direction) - value(x - h * direction)) / (2 * h)
        weight = np.where(np.arange(bands) == 0, 1.0, 2.0)  # an entry below the diagonal stands for two
        assert slope == pytest.approx(-float((weight * s * direction).sum()), rel=1e-5, abs=1e-5 * abs(found))


def test_a_high_norm_is_close_to_the_largest_error() -> None:
    steps, bands = 50, 3
    columns = columns_of(steps, bands)
    largest = Banded("example", columns.T).max_se() ** 2
    objective = Errors(steps, bands, workload_filter(Workload(), steps), power=500.0)
    assert largest <= objective(columns)[0] <= largest * 50 ** (1 / 500)
    value, factor_ = objective.largest(columns)
    assert value == pytest.approx(largest) and 0.0 < factor_ <= 1.0


class TestStrategy:
    @pytest.mark.parametrize(("steps", "bands"), SHAPES)
    def test_against_dense(self, steps: int, bands: int) -> None:
        s = Banded("example", columns_of(steps, bands).T)
        c = s.dense()
        assert s.bands == bands and s.vectors_stored == bands - 1 and s.vectors_regenerated == 0
        z = np.random.default_rng(5).normal(size=(steps, 2))
        np.testing.assert_allclose(c @ streamed(s, z), z, atol=1e-12)
        np.testing.assert_allclose(s.inverse() @ c, np.eye(steps), atol=1e-11)
        np.testing.assert_allclose(s.columns(steps // 2, steps), c[:, steps // 2 :])
        for workload in (Workload(), Workload(0.9), Workload(0.0, 0.0), Workload(0.5, 0.99)):
            product = workload.dense(steps) @ np.linalg.inv(c)
            np.testing.assert_allclose(s.error_rows(workload), np.square(product).sum(axis=1), rtol=1e-9)

    @pytest.mark.parametrize("seed", range(8))
    def test_sensitivity_is_a_bound_and_as_good_as_the_dense_one(self, seed: int) -> None:
        n, bands = 9, (1, 2, 3, 5, 9, 4, 3, 2)[seed]
        rng = np.random.default_rng(seed)
        entries = rng.random((bands, n)) if seed % 2 == 0 else rng.normal(size=(bands, n))
        if seed == 4:  # the conditions of the leftmost columns
            entries = np.tile(np.sort(entries[:, :1], axis=0)[::-1], (1, n))
        entries[0] = np.abs(entries[0]) + (0.0 if seed == 4 else 0.5)
        s = Banded("example", entries)
        routes = set()
        for p in participations(n):
            bound, dense, truth = s.sensitivity_bound(p), sensitivity_of(s.dense(), p), brute_force(s.dense(), p, rng)
            routes.add(bound.route)
            assert bound.value >= truth * (1 - 1e-12), p
            assert bound.value <= dense.value * (1 + 1e-12), p
            assert bound.exact or not dense.exact
            if bound.exact:
                assert bound.value == pytest.approx(truth, rel=1e-10), p
        assert seed != 4 or "leftmost columns; conditions on CᵀC checked" in routes
        assert len(routes) >= (1 if bands == 1 else 3)

    def test_unit_columns_at_least_p_steps_apart_have_sensitivity_root_k(self) -> None:
        columns = columns_of(60, 5)
        s = Banded("example", (columns / np.linalg.norm(columns, axis=1, keepdims=True)).T)
        for k, b in ((12, 5), (6, 10), (1, 60)):
            for fixed in (True, False):
                bound = s.sensitivity_bound(Participation(60, k, b, fixed))
                assert bound.exact and bound.value == pytest.approx(np.sqrt(k))
        assert s.sensitivity(Participation(60, 15, 4)) > np.sqrt(15)  # they overlap

    def test_long_runs_are_linear(self) -> None:
        steps, bands = 50_000, 8
        s = Banded("example", columns_of(steps, bands).T)
        start = time.process_time()
        s.max_se()
        s.row_norm(steps - 1)
        s.multiply(s.solve(np.ones(steps)))
        for p in (Participation(steps, 100, 500), Participation(steps, 10, 3), Participation(steps, 100, 3, True)):
            assert s.sensitivity(p) > 0
        assert time.process_time() - start < 10.0
