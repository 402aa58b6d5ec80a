"""Counts and densities against known spectra, and error bars that hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sordino import SordinoError
from sordino.curvature.lanczos import Lanczos
from sordino.curvature.operators import Dense
from sordino.curvature.quadrature import Quadrature, quadrature

D = 300
VALUES = np.r_[10.0 * np.arange(1, 101) ** -1.2, np.zeros(100), -np.linspace(0, 0.5, 100)]


def diagonal(values: np.ndarray = VALUES) -> Dense:
    return Dense(torch.diag(torch.from_numpy(values)))


def test_counts_and_their_deviation() -> None:
    """Over many seeds the estimate is unbiased and its error has the stated size: √(2c(d−c)/(d+2)/probes)."""
    true = float((VALUES >= 0.02).sum())
    errors = []
    for seed in range(60):
        count = quadrature(diagonal(), probes=4, steps=60, seed=seed).count(0.02)
        assert count.low <= count.value <= count.high
        errors.append((count.value - true) / count.deviation)
    assert abs(np.mean(errors)) < 3 / np.sqrt(60)
    assert 0.75 < np.std(errors) < 1.25


def test_the_nodes_bounds_hold_for_every_probe() -> None:
    """Chebyshev, Markov and Stieltjes: one probe's own count lies between, however few the steps."""
    for steps in (4, 7, 15):
        for seed in range(10):
            found = quadrature(diagonal(), probes=1, steps=steps, seed=seed)
            v = torch.randn(D, generator=torch.Generator().manual_seed((seed << 20) + 2**19)).numpy()
            own = D * v.astype(np.float64) ** 2 / (v.astype(np.float64) ** 2).sum()
            for threshold in (-0.3, -1e-6, 1e-6, 0.05, 0.2, 3.0, 11.0):
                true, count = own[VALUES >= threshold].sum(), found.count(threshold)
                assert count.low - 1e-9 <= true <= count.high + 1e-9


def test_enough_steps_are_exact_for_the_probe() -> None:
    found = quadrature(diagonal(np.repeat([3.0, 1.0, -2.0], 20)), probes=3, steps=50)
    assert found.nodes.shape == (3, 50)
    np.testing.assert_allclose(found.nodes[:, :3], [[-2, 1, 3]] * 3, atol=1e-12)
    assert not found.weights[:, 3:].any()
    np.testing.assert_allclose(found.weights.sum(1), 1)
    assert found.count(0.5).low == pytest.approx(60 * found.weights[:, 2].mean())
    assert found.least == pytest.approx(-2)


def test_known_eigenvalues_are_taken_out() -> None:
    """Their count is exact, their vectors are avoided, and the error of the rest is of the rest."""
    operator = diagonal()
    top = Lanczos(operator, 40).run(vectors=True)
    assert top.vectors is not None
    found = quadrature(operator, probes=5, steps=60, known=(top.values, top.vectors))
    assert found.size == D - 40 and found.nodes.max() == pytest.approx(10 * 41**-1.2, rel=1e-2)
    assert found.count(float(top.values[19])).value == 20
    count = found.count(0.1)
    true = float((VALUES >= 0.1).sum())
    assert abs(count.value - true) < 4 * count.deviation
    assert count.deviation < quadrature(operator, probes=5, steps=60).count(0.1).deviation
    assert found.trace == pytest.approx(VALUES.sum(), abs=4 * np.sqrt(2 * np.square(VALUES[40:]).sum() / 5))


def test_the_bulk_density_and_its_error_bar() -> None:
    points, width = np.linspace(-0.4, 0.6, 11), 0.05
    true = np.exp(-0.5 * ((points[:, None] - VALUES) / width) ** 2).sum(1) / (width * np.sqrt(2 * np.pi))
    outside = []
    for seed in range(10):
        mean, deviation = quadrature(diagonal(), probes=10, steps=60, seed=seed).density(points, width)
        outside.append(np.abs(mean - true) > 2.5 * deviation)
    assert np.mean(outside) < 0.1  # Student's t with nine degrees: 3.4 %
    assert np.isnan(quadrature(diagonal(), probes=1, steps=9).density(points, width)[1]).all()


def test_probes_are_seeded_and_a_stopped_run_goes_on() -> None:
    operator = diagonal()
    whole = quadrature(operator, probes=12, steps=10, seed=3)
    saved: list[Quadrature] = []

    def stop(so_far: Quadrature) -> None:
        saved.append(so_far)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quadrature(operator, probes=12, steps=10, seed=3, saved=stop)
    before = operator.products
    again = quadrature(operator, probes=12, steps=10, seed=3, done=saved[-1])
    assert saved[-1].probes == 10 and operator.products - before == 20
    np.testing.assert_array_equal(again.nodes, whole.nodes)
    np.testing.assert_array_equal(again.weights, whole.weights)
    assert not np.array_equal(quadrature(operator, probes=12, steps=10, seed=4).nodes, whole.nodes)
    told: list[tuple[int, int]] = []
    quadrature(operator, probes=6, steps=2, progress=lambda done, total: told.append((done, total)))
    assert told == [(5, 12), (10, 12), (11, 12), (12, 12)]


def test_bad_requests() -> None:
    with pytest.raises(SordinoError, match="probes=0"):
        quadrature(diagonal(), probes=0)
    with pytest.raises(SordinoError, match="nothing left to count"):
        quadrature(diagonal(np.ones(3)), known=(torch.ones(3), torch.eye(3, dtype=torch.float64)))
