"""Runs with a spectrum: what is taken from the optimizer, what is refused, what the guarantee says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import Budget, PrivacyError, Private, Public, SordinoError, make_private
from sordino.cli import main
from sordino.curvature import CurvatureWorkload, Spectrum, estimate_spectrum
from sordino.data import load

RUN: dict[str, Any] = {"budget": Budget(8, 1e-4), "batch_size": 20, "epochs": 2, "sampling": "cyclic-poisson"}


@pytest.fixture(scope="module")
def data() -> tuple[TensorDataset, TensorDataset]:
    torch.manual_seed(0)
    x = torch.randn(240, 6)
    y = (x[:, 0] > 0).long()
    return TensorDataset(x[:40]), TensorDataset(x[40:], y[40:])


def losses_of(model: nn.Module) -> Any:
    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets, reduction="none")

    return losses


@pytest.fixture(scope="module")
def spectrum(data: tuple[TensorDataset, TensorDataset]) -> Spectrum:
    model = nn.Linear(6, 2)
    return estimate_spectrum(model, Public(data[0], losses_of(model), labels="random"), show=False)


def private(dataset: Any, spectrum: Any, rate: float = 0.5, noise: str = "noise-curve:4", **options: Any) -> Private:
    model = nn.Linear(6, 2)
    sgd = {key: options.pop(key) for key in ("momentum", "weight_decay", "nesterov") if key in options}
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **sgd)
    return make_private(model, optimizer, dataset, noise=noise, spectrum=spectrum, **{**RUN, **options})


def test_a_run_trains_and_its_guarantee_says_what_was_public(
    data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum, tmp_path: Path
) -> None:
    run = private(data[1], spectrum.save(tmp_path / "s.npz"))
    for batch in run.batches():
        run.backward(losses_of(run.model), batch)
        run.optimizer.step()
    said = run.guarantee()
    assert said.epsilon <= 8 and said.noise == "noise-curve:4" and "cyclic Poisson" in said.sampling
    text = next(r for r in said.remarks if "shaped by the curvature" in r)
    assert "40 public examples" in text and "learning rate 0.5" in text and "does not cover" in text
    assert "allow_overlap" not in text


def test_the_matrix_is_that_of_the_plan_and_of_the_optimizers_rate_and_momentum(
    data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum
) -> None:
    run = private(data[1], spectrum, momentum=0.5, weight_decay=0.1)
    workload = CurvatureWorkload(spectrum, 0.5, momentum=0.5, weight_decay=0.1)
    planned = sordino.plan(
        RUN["budget"], examples=200, batch_size=20, epochs=2, noise="noise-curve:4", sampling="cyclic-poisson",
        spectrum=workload, parameters=14,
    )  # fmt: skip
    assert np.array_equal(run.plan.strategy.dense(), planned.strategy.dense())
    assert run.plan.noise_multiplier == planned.noise_multiplier
    assert np.array_equal(private(data[1], workload).plan.strategy.dense(), planned.strategy.dense())


def test_best_lambda_by_curvature_is_said_too(data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum) -> None:
    run = private(data[1], spectrum, noise="lambda-cgd", sampling="fixed-order")
    assert any("shaped by the curvature" in r for r in run.guarantee().remarks)
    run = private(data[1], spectrum, noise="band-inv-mf:3", sampling="fixed-order")
    assert any("shaped by the curvature" in r for r in run.guarantee().remarks)
    given = private(data[1], spectrum, noise="lambda-cgd:0.5", sampling="fixed-order")
    assert not any("shaped by the curvature" in r for r in given.guarantee().remarks)


def test_public_examples_that_are_private_are_refused(
    data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum, tmp_path: Path
) -> None:
    x, y = data[1].tensors
    both = TensorDataset(torch.cat([x[:10], data[0].tensors[0][:1]]).repeat(3, 1), torch.zeros(33, dtype=torch.long))
    with pytest.raises(PrivacyError, match="allow_overlap=True"):
        private(both, spectrum, batch_size=5)
    with pytest.raises(PrivacyError, match="allow_overlap=True"):  # a file knows as well
        private(both, spectrum.save(tmp_path / "s.npz"), batch_size=5)
    allowed = private(both, spectrum, batch_size=5, allow_overlap=True)
    text = next(r for r in allowed.guarantee().remarks if "shaped by" in r)
    assert "(allow_overlap), and those get no protection" in text
    unknown = Spectrum.given(spectrum.eigenvalues)
    private(both, unknown, batch_size=5)  # nothing is known about its data
    public = Public(TensorDataset(both.tensors[0][:1]), losses_of(nn.Linear(6, 2)))
    with pytest.raises(PrivacyError, match="1 of 1 public examples"):
        private(both, unknown, batch_size=5, public=public)


def test_what_is_refused(data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum) -> None:
    with pytest.raises(SordinoError, match="--spectrum FILE --learning-rate"):
        private(data[1], None)
    with pytest.raises(SordinoError, match="above 2: such steps diverge"):
        private(data[1], spectrum, rate=3 / spectrum.largest)
    with pytest.raises(SordinoError, match="no spectrum at"):
        private(data[1], "nowhere.npz")
    with pytest.raises(SordinoError, match="without nesterov"):
        private(data[1], spectrum, momentum=0.9, nesterov=True)
    model = nn.Linear(6, 3)
    with pytest.raises(SordinoError, match="another set of trainable parameters"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        make_private(model, sgd, data[1], noise="noise-curve:4", spectrum=spectrum, **RUN)
    model = nn.Linear(6, 2)
    with pytest.raises(SordinoError, match="for SGD, whose steps"):
        adam = torch.optim.Adam(model.parameters())
        make_private(model, adam, data[1], noise="noise-curve:4", spectrum=spectrum, **RUN)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    with pytest.raises(SordinoError, match="groups differ"):
        make_private(model, torch.optim.SGD(groups), data[1], noise="noise-curve:4", spectrum=spectrum, **RUN)


def test_a_saved_run_goes_on_with_the_very_same_matrix(
    data: tuple[TensorDataset, TensorDataset], spectrum: Spectrum, tmp_path: Path
) -> None:
    run = private(data[1], spectrum)
    for batch in run.batches():
        run.backward(losses_of(run.model), batch)
        run.optimizer.step()
        if run.step == 5:
            break
    run.save(tmp_path / "run")
    entries = run.plan.strategy.definition()["entries"]
    remarks = run.guarantee().remarks
    run.close()
    other = Spectrum.given(spectrum.eigenvalues * 0.9)  # another machine's last digits, and worse
    again = private(data[1], other)
    assert not np.array_equal(again.plan.strategy.definition()["entries"], entries)
    again.load(tmp_path / "run")
    assert np.array_equal(again.plan.strategy.definition()["entries"], entries)
    assert set(remarks) <= set(again.guarantee().remarks)
    for batch in again.batches():
        again.backward(losses_of(again.model), batch)
    assert again.step == again.steps


class TestShell:
    small = ("--batch-size", "250", "--epochs", "2", "--model", "logistic", "--learning-rate", "0.2")
    budget = ("--epsilon", "8", "--delta", "1e-5", "--sampling", "cyclic-poisson", "--noise", "noise-curve:3")

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """From public data that is not the digits that are trained on."""
        rng = np.random.default_rng(0)
        np.savez(tmp_path / "public.npz", x=rng.integers(0, 255, (100, 1, 8, 8), dtype=np.uint8))
        asked = ("--public", str(tmp_path / "public.npz"), "--classes", "10", "--model", "logistic")
        assert main(["spectrum", *asked, "--out", str(tmp_path / "s.npz"), "--preparation-epochs", "1"]) == 0
        return tmp_path / "s.npz"

    def test_train(self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        asked = ("train", *self.small, *self.budget, "--spectrum", str(path))
        assert main([*asked, "--out", str(tmp_path / "run"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert "shaped by the curvature of the loss on public data" in told["statement"]
        planned = json.loads((tmp_path / "run" / "plan.json").read_text())
        assert planned["curvature_score"] > 0 and planned["noise"] == "noise-curve:3"
        assert Spectrum.load(tmp_path / "run" / "spectrum.npz").largest == Spectrum.load(path).largest

    def test_private_examples_among_the_public_are_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        digits = load("digits")
        assert digits is not None
        np.savez(tmp_path / "public.npz", x=digits.inputs[:100].numpy())
        asked = ("--public", str(tmp_path / "public.npz"), "--classes", "10", "--model", "logistic")
        assert main(["spectrum", *asked, "--out", str(tmp_path / "s.npz"), "--preparation", "none"]) == 0
        run = ("train", *self.small, *self.budget, "--spectrum", str(tmp_path / "s.npz"), "--out", str(tmp_path / "r"))
        assert main([*run]) == 2
        assert "public examples are among" in capsys.readouterr().err and not (tmp_path / "r").exists()
        assert main([*run, "--set", "allow_overlap=true", "--json"]) == 0
        assert "allow_overlap" in capsys.readouterr().out
