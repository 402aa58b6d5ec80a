"""DP-λCGD, Theorem 4: the best diagonal with full batches, and the bound no factorisation is below."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.errors import SordinoError
from sordino.strategies import make_strategy
from sordino.strategies.diagonal import Diagonal
from sordino.strategies.sensitivity import fixed_order


@pytest.mark.parametrize("n", [1, 2, 7, 60])
def test_theorem_4(n: int) -> None:
    every = Participation(steps=n, epochs=n, separation=1)
    s = Diagonal(n)
    reached = s.rmse() * s.sensitivity(every)
    assert s.sensitivity_bound(every).exact
    assert reached == pytest.approx(np.sqrt(np.arange(1, n + 1)).sum() / math.sqrt(n))
    independent = make_strategy("identity", n)
    assert independent.rmse() * independent.sensitivity(every) == pytest.approx(math.sqrt(n * (n + 1) / 2))
    lowest = math.sqrt((n + 1) * (2 * n + 1) / 6)
    assert lowest <= reached * (1 + 1e-12) <= math.sqrt(n * (n + 1) / 2) * (1 + 1e-9)


def test_no_other_diagonal_is_better_and_nothing_is_below_the_lower_bound() -> None:
    n = 9
    every = Participation(steps=n, epochs=n, separation=1)
    reached = Diagonal(n).rmse() * Diagonal(n).sensitivity(every)
    lowest = math.sqrt((n + 1) * (2 * n + 1) / 6)
    rng = np.random.default_rng(0)
    a = np.tril(np.ones((n, n)))
    for _ in range(200):
        d = Diagonal(n).dense().diagonal() * np.exp(0.1 * rng.normal(size=n))
        other = np.linalg.norm(a / d) / math.sqrt(n) * math.sqrt(fixed_order(np.diag(d**2), n, 1).value ** 2)
        assert other > reached
        c = np.tril(rng.normal(size=(n, n)))  # any signs: the bound is a lower bound for all of them
        c[np.diag_indices(n)] = np.exp(rng.normal(size=n))
        value = np.linalg.norm(a @ np.linalg.inv(c)) / math.sqrt(n) * np.linalg.norm(c.sum(axis=1))
        assert value >= lowest * (1 - 1e-12)


def test_the_lower_bound_is_approached_without_the_restriction_to_diagonals() -> None:
    """The construction in Lemma 10's proof: B nearly of rank one."""
    n = 6
    a = np.tril(np.ones((n, n)))
    first = a.sum(axis=1) / np.linalg.norm(a.sum(axis=1))
    r = np.linalg.qr(np.column_stack([first, np.eye(n)[:, : n - 1]]))[0].T
    r[0] *= np.sign(r[0] @ first)
    for small in (1e-2, 1e-4):
        d = np.diag([1.0] + [small] * (n - 1))
        c, b = np.linalg.inv(d) @ r @ a, r.T @ d
        np.testing.assert_allclose(b @ c, a, atol=1e-8)
        reached = np.linalg.norm(b) / math.sqrt(n) * np.linalg.norm(c.sum(axis=1))
        assert reached == pytest.approx(math.sqrt((n + 1) * (2 * n + 1) / 6), rel=10 * small)


def test_every_draw_is_independent_and_early_steps_get_less_noise() -> None:
    s = Diagonal(50)
    assert s.vectors_stored == s.vectors_regenerated == 0 and s.bands == 1
    norms = [s.row_norm(t) for t in range(50)]
    assert norms == sorted(norms) and s.terms(49) == [(49, 1.0)]


def test_it_takes_no_time() -> None:
    s = make_strategy("diagonal", 200_000)
    assert s.max_se() >= s.rmse() > 0
    assert s.sensitivity(Participation(200_000, 100, 2000)) > 0


def test_bad_steps() -> None:
    with pytest.raises(SordinoError, match="steps=0"):
        Diagonal(0)
    with pytest.raises(SordinoError, match="takes no argument"):
        make_strategy("diagonal:3", 10)
