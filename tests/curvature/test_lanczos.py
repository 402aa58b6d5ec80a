"""The top of known spectra, residual bounds, copies of repeated eigenvalues, and what is asked in vain."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from sordino import SordinoError, StateError
from sordino.curvature import basis
from sordino.curvature.lanczos import Eigenvalues, Lanczos
from sordino.curvature.operators import Dense

D = 240
PLACE = np.arange(1, D + 1)
SPECTRA = {
    "power law": 10 * PLACE**-1.5,
    "exponential": 10 * 0.9**PLACE,
    "as many negative": np.r_[1 / PLACE[: D // 2], -(PLACE[: D // 2] ** -0.7)],
    "repeated": np.r_[[5.0] * 7, [4.0] * 7, [3.0] * 7, np.linspace(2, 0, D - 21)],
    "every one ten times": np.repeat(10 * np.arange(1, D // 10 + 1) ** -1.2, 10),
    "cluster": np.r_[5 + 1e-6 * np.arange(10), np.linspace(2, 0, D - 10)],
    "rank three": np.r_[[1.0] * 3, np.zeros(D - 3)],
    "none positive": -PLACE / D,
}


def matrix(values: np.ndarray, dtype: torch.dtype = torch.float64, seed: int = 0) -> Dense:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    a = (q * torch.from_numpy(np.asarray(values, np.float64))) @ q.T
    return Dense(((a + a.T) / 2).to(dtype))


def check(found: Eigenvalues, operator: Dense, top: int) -> None:
    true = torch.linalg.eigvalsh(operator.matrix.double()).flip(0)[:top]
    assert bool((found.values.diff() <= 0).all())
    assert bool(((found.values - true).abs() <= found.residuals).all()), (found.values - true, found.residuals)
    assert found.vectors is not None
    u = found.vectors.double()
    residuals = torch.linalg.vector_norm(u @ operator.matrix.double() - found.values[:, None] * u, dim=1)
    assert bool((residuals <= found.residuals).all())
    assert float((u @ u.T - torch.eye(top)).abs().max()) < (1e-12 if operator.dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kept", [None, 30], ids=["roomy", "restarted"])
def test_the_top_of_a_spectrum(name: str, dtype: torch.dtype, kept: int | None) -> None:
    operator = matrix(SPECTRA[name], dtype)
    found = Lanczos(operator, 20, basis=kept).run(vectors=True)
    check(found, operator, 20)
    assert found.products == operator.products and found.rounds >= 1
    if name == "power law":
        assert found.products < 110 and (found.restarts > 0) == (kept == 30)


@pytest.mark.parametrize("top", [1, 39, 40])
def test_up_to_all_eigenvalues(top: int) -> None:
    operator = matrix(np.r_[np.linspace(3, 1, 20), [1.0] * 5, np.linspace(-1, -2, 15)])
    check(Lanczos(operator, top).run(vectors=True), operator, top)


def test_a_tight_tolerance_and_what_it_costs() -> None:
    operator = matrix(SPECTRA["power law"])
    loose = Lanczos(operator, 10, tolerance=1e-2, repeats=False).run()
    tight = Lanczos(operator, 10, tolerance=1e-9, repeats=False).run()
    assert float((tight.residuals / tight.values).max()) <= 1e-9
    assert loose.products < tight.products and loose.rounds == 0


def test_without_a_search_for_copies_they_are_missed() -> None:
    """The search is what finds them: in float64 a Krylov space shows each eigenvalue once."""
    operator = matrix(SPECTRA["repeated"])
    once = Lanczos(operator, 3, tolerance=1e-2, repeats=False).run()
    assert float((once.values - torch.tensor([5, 4, 3])).abs().max()) < 1e-3
    assert float((Lanczos(operator, 3, tolerance=1e-2).run().values - 5).abs().max()) < 1e-3


def test_bad_requests() -> None:
    operator = matrix(SPECTRA["power law"])
    with pytest.raises(SordinoError, match="top=241 eigenvalues of a matrix with 240 rows; ask for at most 240"):
        Lanczos(operator, 241)
    with pytest.raises(SordinoError, match="top=0 must be a whole number"):
        Lanczos(operator, 0)
    with pytest.raises(SordinoError, match="basis=20 vectors are too few for top=20; use 24 or more"):
        Lanczos(operator, 20, basis=20)
    with pytest.raises(SordinoError, match="tolerance=0"):
        Lanczos(operator, 20, tolerance=0)
    with pytest.raises(SordinoError, match="of the top 20 eigenvalues converged in 25 products"):
        Lanczos(operator, 20, most=25).run()
    operator.matrix[3, 3] = torch.nan
    with pytest.raises(SordinoError, match="not finite"):
        Lanczos(operator, 20).run()


def test_a_search_goes_on_where_it_was_saved() -> None:
    operator = matrix(SPECTRA["repeated"], torch.float32)
    whole = Lanczos(operator, 12, basis=20).run(vectors=True)
    for stop in (3, 25, whole.products - 1):
        first = Lanczos(operator, 12, basis=20)
        seen: list[int] = []

        def stopped(*_: Any, first: Lanczos = first, stop: int = stop, seen: list[int] = seen) -> None:
            seen.append(first.products)
            if first.products >= stop:
                raise KeyboardInterrupt

        try:
            first.run(stopped)
        except KeyboardInterrupt:
            pass
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = Lanczos(operator, 12, basis=20)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.products == first.products
        done = second.run(vectors=True)
        assert torch.equal(done.values, whole.values) and torch.equal(done.residuals, whole.residuals)
        assert torch.equal(done.vectors, whole.vectors) and done.products == whole.products  # type: ignore[arg-type]
    with pytest.raises(StateError, match="for top=12 of 240 rows with seed=0, this one for top=11"):
        Lanczos(operator, 11).load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="keeps 20 vectors, and 16 fit"):
        Lanczos(operator, 12, basis=16).load_state_dict(first.state_dict())


def test_a_basis_in_pieces_is_the_same_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = matrix(SPECTRA["repeated"])
    whole = Lanczos(operator, 12, basis=20).run(vectors=True)
    monkeypatch.setattr(basis, "PIECE", 7 * D * 8)
    monkeypatch.setattr(basis, "COLUMNS", 100)
    pieces = Lanczos(operator, 12, basis=20)
    found = pieces.run(vectors=True)
    assert pieces.Q.rows == 7 and len(pieces.Q.pieces) == 3
    check(found, operator, 12)
    assert bool(((found.values - whole.values).abs() <= found.residuals + whole.residuals).all())


def test_the_basis_goes_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller basis on the device, else main memory, else an error with the numbers."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    free = {"cuda": 50 * 8000, "cpu": 500 * 8000}
    monkeypatch.setattr(basis, "free_bytes", lambda device: free[device.type])
    assert basis.placed(1000, 90, 45, torch.float64, gpu) == (50, gpu)
    assert basis.placed(1000, 30, 20, torch.float64, gpu) == (30, gpu)
    assert basis.placed(1000, 90, 60, torch.float64, gpu) == (90, cpu)
    with pytest.raises(SordinoError, match="600 vectors of 1,000 numbers need 0.0 GiB.*fewer eigenvalues"):
        basis.placed(1000, 900, 600, torch.float64, gpu)
