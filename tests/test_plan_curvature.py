"""Plans with a spectrum: the curvature score, what is chosen by it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino import Budget, SordinoError, plan
from sordino.cli import main
from sordino.compare import compare, decide
from sordino.curvature import CurvatureWorkload, Spectrum, curvature_score, curvature_workload
from sordino.strategies import Workload, make_strategy

RUN: dict[str, Any] = {"examples": 2000, "batch_size": 100, "epochs": 3}  # E = 20, T = 60
BUDGET = Budget(8, 1e-5)
SPECTRUM = Spectrum.given(2.0 / np.arange(1, 400) ** 1.3)
CURVED: dict[str, Any] = {"spectrum": SPECTRUM, "learning_rate": 0.3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return SPECTRUM.save(tmp_path / "spectrum.npz")


@pytest.mark.parametrize("noise", ["identity", "lambda-cgd:0.8", "band-mf:4", "noise-curve:8"])
def test_the_score_is_of_the_matrix_and_the_noise_the_budget_needs(noise: str) -> None:
    p = plan(BUDGET, **RUN, noise=noise, sampling="fixed-order", **CURVED)
    c, w = p.strategy.dense(), CurvatureWorkload(SPECTRUM, 0.3).dense(60)
    told = json.loads(json.dumps(p.as_dict(), allow_nan=False))
    expected = p.noise_multiplier**2 * np.trace(w @ np.linalg.inv(c.T @ c))
    assert told["curvature_score"] == pytest.approx(expected, rel=1e-9)
    assert told["curvature_score"] == pytest.approx(curvature_score(p.strategy, SPECTRUM, 0.3, p.noise_multiplier))
    assert told["curvature"]["learning_rate"] == 0.3 and told["curvature"]["capped"] == 0
    assert told["objective"] == "curvature"
    assert (told["optimality"] or 0.0) <= (1e-4 if noise.startswith("noise-curve") else 1.0)


def test_without_a_spectrum_there_is_no_score() -> None:
    told = plan(BUDGET, **RUN).as_dict()
    assert told["curvature_score"] is None and told["curvature"] is None and told["objective"] == "rmse"


def test_noise_curve_has_the_least_score_of_as_many_bands_and_a_file_does_as_well(path: Path) -> None:
    for sampling in ("fixed-order", "cyclic-poisson"):
        scores = {
            noise: plan(BUDGET, **RUN, noise=f"{noise}:4", sampling=sampling, **CURVED).curvature_score or 0.0
            for noise in ("noise-curve", "band-mf", "bsr")
        }
        assert scores["noise-curve"] < min(scores["band-mf"], scores["bsr"])
    one = plan(BUDGET, **RUN, noise="noise-curve:4", sampling="cyclic-poisson", spectrum=path, learning_rate=0.3)
    assert one.curvature_score == pytest.approx(scores["noise-curve"], rel=1e-12)
    assert (
        one.noise_multiplier
        == plan(BUDGET, **RUN, noise="band-mf-general:4", sampling="cyclic-poisson").noise_multiplier
    )


def test_the_noise_multiplier_does_not_depend_on_the_spectrum() -> None:
    other = {"spectrum": Spectrum.given([1.0]), "learning_rate": 0.9}
    both = [plan(BUDGET, **RUN, noise="noise-curve:4", sampling="fixed-order", **c) for c in (CURVED, other)]
    assert both[0].noise_multiplier == pytest.approx(both[1].noise_multiplier, rel=1e-6)
    assert not np.allclose(both[0].strategy.dense(), both[1].strategy.dense(), atol=1e-3)


def test_lambda_is_chosen_by_the_score() -> None:
    p = plan(BUDGET, **RUN, noise="lambda-cgd", sampling="fixed-order", **CURVED)
    by_rmse = plan(BUDGET, **RUN, noise="lambda-cgd", sampling="fixed-order", **CURVED, objective="rmse")
    told = p.as_dict()
    assert told["lambda"] == told["lambda_curvature"] != by_rmse.as_dict()["lambda"] == told["lambda_rmse"]
    assert (p.curvature_score or 0.0) < (by_rmse.curvature_score or 0.0) and by_rmse.rmse < p.rmse


def test_momentum_and_a_schedule_are_those_of_the_workload() -> None:
    rates = tuple(np.linspace(2.0, 0.0, 61)[:-1])
    p = plan(BUDGET, **RUN, noise="noise-curve:4", sampling="fixed-order", workload=Workload(0.5, 1.0, rates), **CURVED)
    assert p.curvature is not None and p.curvature.momentum == 0.5
    np.testing.assert_allclose(p.curvature.rates(60), 0.15 * np.array(rates))
    decayed = curvature_workload(SPECTRUM, 0.5, workload=Workload(shrink=0.95))
    assert decayed.weight_decay == pytest.approx(0.1)


def test_comparing_by_the_score() -> None:
    noises = ["identity", "lambda-cgd", "band-mf:4", "noise-curve:4"]
    rows = compare(BUDGET, **RUN, noises=noises, samplings=["fixed-order"], **CURVED)
    scores = [row.plan.curvature_score or 0.0 for row in rows if row.plan is not None]
    assert scores == sorted(scores) and len(scores) == 4
    rows, chosen = decide(BUDGET, rows, "curvature")
    assert chosen is not None and chosen.reason.startswith("curvature score ")
    by_rmse = compare(BUDGET, **RUN, noises=noises, samplings=["fixed-order"], **CURVED, objective="rmse")
    errors = [row.plan.rmse for row in by_rmse if row.plan is not None]
    assert errors == sorted(errors)


def test_matrices_of_ones_own_are_scored_too() -> None:
    p = plan(BUDGET, **RUN, noise=make_strategy("bisr:4", 60), sampling="fixed-order", **CURVED)
    assert p.curvature_score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spectrum": SPECTRUM}, "without the learning rate"),
        ({"learning_rate": 0.1}, "go with spectrum="),
        ({"exact_curvature": True}, "go with spectrum="),
        ({"spectrum": SPECTRUM, "learning_rate": 1.1}, "is 2.2, above 2: such steps diverge"),
        ({"spectrum": [1.0]}, "must be a Spectrum or the path"),
        ({"spectrum": "nowhere.npz", "learning_rate": 0.1}, "no spectrum at nowhere.npz"),
        ({"spectrum": CurvatureWorkload(SPECTRUM, 0.1), "learning_rate": 0.1}, "leave out learning_rate"),
        ({**CURVED, "workload": Workload(momentum=0.9, shrink=0.9)}, "no curvature score yet"),
        ({"noise": "noise-curve:4"}, "--spectrum FILE --learning-rate"),
        ({**CURVED, "noise": "noise-curve:61"}, "above the 60 steps"),
        ({**CURVED, "noise": "noise-curve:21"}, "come back after 20; use 'noise-curve:20'"),
        ({"objective": "curvature"}, "objective='curvature' needs"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SordinoError, match=message) as caught:
        plan(BUDGET, **{**RUN, "noise": "lambda-cgd:0.5", "sampling": "fixed-order", **options})
    assert "\n" not in str(caught.value)


class TestShell:
    schedule = ("--examples", "2000", "--batch-size", "100", "--epochs", "3", "--epsilon", "8", "--delta", "1e-5")

    def test_plan(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        noise = ("--noise", "noise-curve:4", "--sampling", "fixed-order")
        asked = ("plan", *self.schedule, *noise, "--spectrum", str(path), "--learning-rate", "0.3")
        assert main([*asked, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        theirs = plan(BUDGET, **RUN, noise="noise-curve:4", sampling="fixed-order", **CURVED)
        assert told["curvature_score"] == pytest.approx(theirs.curvature_score, rel=1e-9)
        assert main([*asked]) == 0
        said = capsys.readouterr().out
        assert "curvature score" in said and "399 eigenvalues as given" in said and "optimum" in said

    def test_any_npz_with_eigenvalues(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez(tmp_path / "mine.npz", eigenvalues=SPECTRUM.eigenvalues)
        asked = (*self.schedule, "--noise", "lambda-cgd", "--sampling", "fixed-order", "--json")
        assert main(["plan", *asked, "--spectrum", str(tmp_path / "mine.npz"), "--learning-rate", "0.3"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["lambda"] == told["lambda_curvature"]

    def test_account(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        schedule = (*self.schedule[:6], "--delta", "1e-5", "--noise-multiplier", "3", "--sampling", "fixed-order")
        more = ("--noise", "noise-curve:4", "--spectrum", str(path), "--learning-rate", "0.3", "--json")
        assert main(["account", *schedule, *more]) == 0
        assert json.loads(capsys.readouterr().out)["curvature_score"] > 0

    def test_comparison(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import sordino.compare as module

        monkeypatch.setattr(module, "candidates", lambda s, spectrum: ["identity", "noise-curve:4"] if spectrum else [])
        asked = ("plan", *self.schedule, "--sampling", "fixed-order", "--spectrum", str(path), "--learning-rate", "0.3")
        assert main([*asked, "--picture", str(tmp_path / "p.png")]) == 0
        said = capsys.readouterr().out
        assert "score" in said and "Recommended: --noise noise-curve:4" in said and (tmp_path / "p.png").exists()
        assert main([*asked, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["objective"] == "curvature"
        assert [row["noise"] for row in told["plans"]] == ["noise-curve:4", "identity"]

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--spectrum", "nowhere.npz", "--learning-rate", "0.3"), "no spectrum at nowhere.npz"),
            (("--spectrum", "nowhere.npz"), "--spectrum needs --learning-rate"),
            (("--exact-curvature",), "goes with --spectrum"),
            (("--objective", "curvature"), "--spectrum FILE --learning-rate"),
        ],
    )
    def test_what_is_refused(self, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", *self.schedule, "--noise", "lambda-cgd:0.5", "--sampling", "fixed-order", *more]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
