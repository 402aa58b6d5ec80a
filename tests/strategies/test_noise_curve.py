"""NoiseCurve: P1 against a generic convex solver, a certificate that holds, λ by the curvature score."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sordino.budget import Participation
from sordino.curvature import CurvatureWorkload, Spectrum
from sordino.errors import SordinoError, StateError, Unsupported
from sordino.strategies import NoiseCurve, Problem, make_strategy
from sordino.strategies.banded import Banded
from sordino.strategies.banded_algebra import to_dense
from sordino.strategies.noise_curve import RIDGE, condition, optimise, question
from sordino.strategies.optimizing import Optimum
from sordino.strategies.toeplitz_optimizing import curvature_form

from .test_banded_optimizing import reference

SPECTRA = {
    "one": np.array([0.8]),
    "power": 1.0 / np.arange(1, 2001) ** 1.2,
    "head and tail": np.concatenate([[4.0, 2.0, 1.0], 1e-3 / np.arange(1, 500)]),
}


def curved(name: str = "power", rate: float = 0.4, **options: object) -> CurvatureWorkload:
    return CurvatureWorkload(Spectrum.given(SPECTRA[name]), rate, **options)  # type: ignore[arg-type]


def ridged(work: CurvatureWorkload, steps: int) -> np.ndarray:
    """W + τ tr W/T · I, from the dense W."""
    w = work.dense(steps)
    return np.asarray(w + RIDGE * np.trace(w) / steps * np.eye(steps))


def cost(w: np.ndarray, c: np.ndarray) -> float:
    return float(np.trace(w @ np.linalg.inv(c.T @ c)))


def built(steps: int, bands: int, work: CurvatureWorkload | None = None) -> NoiseCurve:
    found = make_strategy(f"noise-curve:{bands}", Problem(steps, curvature=work or curved()))
    assert isinstance(found, NoiseCurve)
    return found


@pytest.mark.parametrize("equation", ["loss", "gradient"])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (4, 2), (6, 6), (12, 3)])
def test_the_optimum_is_that_of_a_generic_solver(name: str, equation: str, steps: int, bands: int) -> None:
    work = curved(name, equation=equation)
    w, s = ridged(work, steps), built(steps, bands, work)
    c, least = s.dense(), reference(ridged(work, steps), bands)
    np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1.0, rtol=1e-14)
    assert cost(w, c) <= least * (1 + 1e-5)
    assert cost(w, c) * (1 - s.certificate["optimality"]) <= least * (1 + 1e-9)  # the certificate holds
    assert s.certificate["optimality"] <= 1e-4


@pytest.mark.parametrize("name", SPECTRA)
def test_what_the_certificate_says(name: str) -> None:
    for steps, bands in ((20, 4), (130, 8)):
        work = curved(name)
        s, w = built(steps, bands, work), work.dense(steps)
        c = s.dense()
        said = s.certificate
        assert said["curvature_score"] == pytest.approx(cost(w, c), rel=1e-9)  # without the ridge
        assert said["condition"] == pytest.approx(np.linalg.cond(c.T @ c), rel=1e-3)
        assert said["largest_row_norm"] == pytest.approx(np.linalg.norm(np.linalg.inv(c), axis=1).max(), rel=1e-9)
        assert said["optimality"] <= 1e-4 and said["ridge"] == RIDGE


@pytest.mark.parametrize("name", SPECTRA)
def test_the_optimum_beats_other_noise_and_perturbations_of_itself(name: str) -> None:
    work, steps, bands = curved(name), 60, 6
    s, w = built(steps, bands, work), ridged(work, steps)
    least = cost(w, s.dense())
    for other in ("identity", f"band-mf:{bands}", f"band-mf-general:{bands}", f"bsr:{bands}"):
        rival = make_strategy(other, steps)
        unit = rival.dense() / rival.column_norm()  # both then need the same noise
        assert least < cost(w, unit)
        assert work.score(s) < cost(work.dense(steps), unit)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            moved = s.entries * (1.0 + size * rng.normal(size=s.entries.shape))
            moved /= np.linalg.norm(moved, axis=0)
            assert cost(w, Banded("moved", moved).dense()) >= least * (1 - s.certificate["optimality"])


def test_the_ridge_bounds_the_noise_at_a_small_price() -> None:
    work, steps, bands = curved(), 100, 20
    with_it, w = built(steps, bands, work), work.dense(steps)
    without = to_dense(optimise(work, steps, bands, ridge=1e-9, target=1e-2).columns)
    assert cost(w, without) < work.score(with_it) < 1.1 * cost(w, without)
    largest = np.linalg.norm(np.linalg.inv(without), axis=1).max()
    assert largest > 5 * with_it.certificate["largest_row_norm"]


def test_capped_curvature_gives_no_negative_entries() -> None:
    assert built(40, 8, curved("head and tail", 0.45)).nonnegative
    assert not built(40, 8, curved("head and tail", 0.45, cap=False)).nonnegative  # ημ is 1.8


def test_momentum_and_a_schedule() -> None:
    steps, bands = 40, 6
    for options in ({"momentum": 0.9}, {"schedule": tuple(np.linspace(1.0, 0.0, steps + 1)[:-1])}):
        work = curved("power", 0.1, **options)
        s, plain = built(steps, bands, work), built(steps, bands, curved("power", 0.1))
        assert work.score(s) < work.score(plain)
        assert cost(ridged(work, steps), s.dense()) < cost(ridged(work, steps), plain.dense())


def test_sensitivity_is_the_root_of_the_participations() -> None:
    for k, b in ((1, 24), (3, 8), (6, 4)):
        participation = Participation(steps=24, epochs=k, separation=b)
        s = make_strategy("noise-curve:4", Problem(24, participation, curvature=curved()))
        assert s.sensitivity(participation) == pytest.approx(np.sqrt(k), rel=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(SordinoError, match="--spectrum FILE --learning-rate"):
        make_strategy("noise-curve:4", 24)
    with pytest.raises(Unsupported, match="above the 24 steps"):
        built(24, 25)
    with pytest.raises(Unsupported, match="come back after 4; use 'noise-curve:4'"):
        make_strategy("noise-curve:5", Problem(24, Participation(24, 6, 4), curvature=curved()))
    with pytest.raises(SordinoError, match="objective='curvature' needs"):
        Problem(24, objective="curvature")
    with pytest.raises(Unsupported, match="use equation='loss'"):
        optimise(curved(equation="gradient"), 2500, 16)
    with pytest.raises(StateError, match="4×24"):
        make_strategy("noise-curve:4", 24, {"entries": np.ones((4, 23))})


def test_an_optimum_is_kept_and_known_by_its_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def counted(*args: object) -> Optimum:
        asked.append(args)
        return optimise(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["sordino.strategies.noise_curve"], "optimise", counted)
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    first, again = built(50, 5), built(50, 5)
    assert len(asked) == 1 and np.array_equal(first.entries, again.entries)
    assert first.certificate == again.certificate
    one = question(curved(), 50, 5)
    for other in (
        curved("one"),
        curved(rate=0.3),
        curved(equation="gradient"),
        curved(momentum=0.5),
        curved(weight_decay=0.1),
        curved(cap=False),
        curved(schedule=(1.0,) * 49 + (0.5,)),
    ):
        two = question(other, 50, 5)
        assert any(not np.array_equal(one[key], two[key]) for key in one)


def test_a_definition_needs_no_spectrum() -> None:
    s = built(30, 4)
    again = make_strategy(s.name, 30, s.definition())
    assert np.array_equal(again.dense(), s.dense())


def test_condition_is_that_of_the_dense_matrix() -> None:
    columns = built(200, 7).entries.T
    c = to_dense(columns)
    assert condition(columns) == pytest.approx(np.linalg.cond(c.T @ c), rel=1e-3)


class TestLambdaByCurvature:
    participation = Participation(steps=60, epochs=3, separation=20)

    @pytest.mark.parametrize("name", ["lambda-cgd", "lambda-cgd-normalized"])
    def test_it_is_the_best_of_a_grid(self, name: str) -> None:
        work = curved()
        problem = Problem(60, self.participation, objective="curvature", curvature=work)
        s = make_strategy(name, problem)
        least = work.score(s, s.sensitivity(self.participation))
        assert problem.loss(s) ** 2 == pytest.approx(least)
        for lam in np.linspace(0.0, 1.0, 101):
            other = make_strategy(f"{name}:{lam:.2f}", 60)
            assert least <= work.score(other, other.sensitivity(self.participation)) * (1 + 1e-9)
        assert s.certificate["lambda_curvature"] == s.lam != s.certificate["lambda_rmse"]  # type: ignore[attr-defined]

    def test_it_depends_on_the_curvature(self) -> None:
        lams = []
        for name in ("one", "power"):
            problem = Problem(60, self.participation, objective="curvature", curvature=curved(name))
            lams.append(make_strategy("lambda-cgd", problem).certificate["lambda_curvature"])
        assert abs(lams[0] - lams[1]) > 0.01

    def test_other_noise_is_optimised_for_the_rmse(self) -> None:
        problem = Problem(60, self.participation, objective="curvature", curvature=curved())
        for name in ("band-mf:4", "band-mf-general:4", "blt:2"):
            rmse = make_strategy(name, Problem(60, self.participation))
            assert np.array_equal(make_strategy(name, problem).dense(), rmse.dense())


class TestInverseBands:
    @pytest.mark.parametrize("name", SPECTRA)
    def test_the_form_is_that_of_the_dense_matrix(self, name: str) -> None:
        q = curved(name).factor(30)
        loss, rng = curvature_form(q), np.random.default_rng(0)
        for bands in (1, 2, 7, 30):
            w = rng.normal(size=bands)
            inverse = sum(w[l] * np.eye(30, k=-l) for l in range(bands))
            value, gradient = loss(w)
            assert value == pytest.approx(np.square(inverse.T @ q).sum() / np.square(q).sum(), rel=1e-9)
            for l in range(bands):
                up, down = (loss(w + sign * 1e-5 * np.eye(bands)[l])[0] for sign in (1, -1))
                assert gradient[l] == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-7)

    @pytest.mark.parametrize("participation", [None, Participation(60, 3, 20), Participation(60, 3, 20, fixed=True)])
    @pytest.mark.parametrize("name", SPECTRA)
    def test_coefficients_by_the_score(self, name: str, participation: Participation | None) -> None:
        work = curved(name)
        problem = Problem(60, participation, objective="curvature", curvature=work)
        s = make_strategy("band-inv-mf:4", problem)
        for other in ("band-inv-mf:4", "bisr:4", "lambda-cgd"):
            rival = make_strategy(other, problem if other == "lambda-cgd" else Problem(60, participation))
            assert problem.loss(s) <= problem.loss(rival) * (1 + 1e-9)
        w = s.definition()["inverse_coefficients"]
        rng = np.random.default_rng(0)
        for size in (1e-3, 1e-2, 0.1):
            for _ in range(5):
                moved = w + size * np.concatenate([[0.0], rng.normal(size=len(w) - 1)])
                other_one = make_strategy("band-inv-mf:4", 60, {"inverse_coefficients": moved})
                assert problem.loss(s) <= problem.loss(other_one) * (1 + 1e-6)


def test_strategies_load_without_the_curvature_room() -> None:
    code = "import sys, sordino.strategies; assert 'sordino.curvature' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "bands", "seconds"), [(2000, 16, 10.0), (10_000, 20, 60.0)])
def test_long_runs_in_seconds(steps: int, bands: int, seconds: float) -> None:
    values = 2.0 * np.exp(-0.8 * np.log(np.arange(1, 30_001)) ** 1.15)
    work = CurvatureWorkload(Spectrum.given(values), 0.4)
    began = time.process_time()
    found = optimise(work, steps, bands)
    assert found.optimality <= 1e-4
    assert time.process_time() - began <= seconds
