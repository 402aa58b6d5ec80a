"""``sordino spectrum``: public data in, eigenvalues and a picture out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.curvature import Spectrum
from sordino.data import load
from sordino.models import build


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Public images without labels."""
    digits = load("digits")
    assert digits is not None
    np.savez(tmp_path / "public.npz", x=digits.inputs[:200].numpy())
    return tmp_path / "public.npz"


def test_a_small_model_is_done_exactly_and_shapes_noise(run: Any, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "spectrum.npz"
    asked = ("--public", images, "--classes", 10, "--model", "logistic", "--out", path, "--preparation-epochs", 3)
    code, out, err = run("spectrum", *asked, "--json")
    assert code == 0 and err == "" and out.count("\n") == 1
    told = json.loads(out)
    found = Spectrum.load(path)
    found.check_model(build("logistic", (1, 8, 8), 10))
    assert told["eigenvalues"] == len(found) == 650 and told["source"] == found.source == "exact"
    assert told["largest"] == found.largest and told["stable_learning_rate"] == 2.0 / found.largest
    assert Path(told["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "random-labels" in found.description and "200 public examples" in found.description
    assert not list(path.parent.glob("*.partial"))
    schedule = ("--examples", 1500, "--batch-size", 100, "--epochs", 4, "--epsilon", 8, "--delta", "1e-5")
    noise = ("--noise", "noise-curve:4", "--sampling", "cyclic-poisson", "--spectrum", path, "--learning-rate", 0.2)
    assert json.loads(run("plan", *schedule, *noise, "--json")[1])["curvature_score"] > 0
    code, out, err = run("spectrum", *asked)  # not over what is there
    assert code == 2 and "is there already" in err and err.count("\n") == 1


def test_a_runs_toml_gives_model_public_data_and_seed(run: Any, images: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'noise = "noise-curve:4"\nseed = 3\n[model]\nname = "mlp"\nhidden = [8]\n[public]\npath = "{images}"\n'
    )
    path = tmp_path / "s.npz"
    code, out, _ = run("spectrum", config, "--classes", 3, "--out", path, "--preparation", "none", "--dtype", "float64")
    assert code == 0 and "all 547 eigenvalues computed" in out.replace("\n", " ") and "Next: sordino plan" in out
    found = Spectrum.load(path)
    assert found.details["asked"]["seed"] == 3 and found.details["asked"]["model"]["hidden"] == [8]
    found.check_model(build("mlp", (1, 8, 8), 3, hidden=[8]))


def test_after_a_stop_it_goes_on(run: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sordino.cli.spectrum as verb

    path, prepared = tmp_path / "s.npz", []
    real_prepare, real_estimate = verb.prepare, verb.estimate_spectrum

    def counted(model: Any, public: Any, method: Any, **options: Any) -> Any:
        prepared.append(method)
        return real_prepare(model, public, method, **options)

    def stopped(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    asked = ("spectrum", "--public", images, "--classes", 10, "--model", "mlp", "--set", "model.hidden=[40]")
    more = ("--top", 10, "--out", path, "--preparation-epochs", 2)
    monkeypatch.setattr(verb, "prepare", counted)
    monkeypatch.setattr(verb, "estimate_spectrum", stopped)
    code, _, err = run(*asked, *more)
    assert code == 130 and "goes on from there" in " ".join(err.split()) and not path.exists()
    monkeypatch.setattr(verb, "estimate_spectrum", real_estimate)
    assert run(*asked, *more)[0] == 0
    assert prepared == ["random-labels", "none"]  # what was prepared is taken up
    first = Spectrum.load(path)
    assert first.computed == 10 and first.source == "lanczos + tail"
    path.unlink()
    assert run(*asked, *more)[0] == 0
    np.testing.assert_allclose(Spectrum.load(path).eigenvalues[:10], first.eigenvalues[:10], rtol=1e-3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--public missing"),
        (("--public", "PATH"), "say how many classes the private data has: --classes 10"),
        (("--public", "PATH", "--classes", 10, "--preparation", "labels"), "--preparation 'labels' is not known"),
        (("--public", "PATH", "--classes", 10, "--dtype", "half"), "--dtype 'half' is not known"),
        (("--public", "PATH", "--classes", 10, "--model", "mpl"), "did you mean 'mlp'"),
        (("--public", "nowhere.npz"), "no such file"),
        (("--public", "PATH", "--classes", 10, "--top", 5000), "top=5000"),
    ],
)
def test_what_is_refused(run: Any, images: Path, tmp_path: Path, more: tuple[Any, ...], message: str) -> None:
    more = tuple(images if word == "PATH" else word for word in more)
    code, out, err = run("spectrum", *more, "--out", tmp_path / "s.npz", "--preparation-epochs", 1)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
