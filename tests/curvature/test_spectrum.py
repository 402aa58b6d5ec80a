"""Spectra as values and files, whose they are, and the way from a model to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.curvature.common import build, exact, losses
from torch import nn
from torch.utils.data import TensorDataset

import sordino
from sordino import PrivacyError, SordinoError, StateError
from sordino.curvature.estimate import estimate_spectrum
from sordino.curvature.overlap import content, overlap, refuse_overlap
from sordino.curvature.picture import draw_spectrum
from sordino.curvature.spectrum import Spectrum, model_fingerprint


def true_values(model: nn.Module, public: Any) -> np.ndarray:
    return np.maximum(torch.linalg.eigvalsh(exact(model, public.dataset.tensors)).flip(0).numpy(), 0)


def larger() -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    data = TensorDataset(torch.randn(60, 8) * torch.logspace(0, -1.5, 8), torch.randint(6, (60,)))
    return model, sordino.Public(data, losses(model), "given", batch_size=60)


# -- values and files -------------------------------------------------------------------------------------------------


def test_order_and_negative_ones() -> None:
    spectrum = Spectrum.given([1, -3, 5, 0])
    assert spectrum.eigenvalues.tolist() == [5, 1, 0, 0] and len(spectrum) == 4
    assert spectrum.largest == 5 and spectrum.trace == 6 and not spectrum.eigenvalues.flags.writeable
    assert spectrum.describe() == "4 eigenvalues as given; the largest 5"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([-1.0, 0.0], "all eigenvalues are ≤ 0.*prepare the model"),
        ([1.0, np.nan], "eigenvalue 1 is not a finite number"),
        ([[1.0]], r"shape \(1, 1\)"),
        ([], r"shape \(0,\)"),
        (["a"], "must be real numbers"),
    ],
)
def test_what_is_no_spectrum(values: Any, text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        Spectrum.given(values)


def test_there_and_back(tmp_path: Path) -> None:
    one = Spectrum(np.array([3.0, 1.0]), "exact", 2, 9, "m", "d", "words, α", ("note",), {"tail": {"c": 1.5}})
    two = Spectrum.load(one.save(tmp_path / "deep" / "spectrum.npz"))
    assert (two.eigenvalues == one.eigenvalues).all()
    for name in ("source", "computed", "size", "model", "data", "description", "notes", "details"):
        assert getattr(one, name) == getattr(two, name), name
    with np.load(tmp_path / "deep" / "spectrum.npz") as plain:
        assert plain["eigenvalues"].tolist() == [3, 1]


def test_anybodys_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", eigenvalues=np.array([1, 4], dtype=np.int32), metadata=np.array("other"))
    spectrum = Spectrum.load(tmp_path / "a.npz")
    assert spectrum.eigenvalues.tolist() == [4, 1] and spectrum.source == "given"
    cases = {"b": {"x": np.ones(3)}, "c": {"eigenvalues": np.ones((2, 2))}, "d": {"eigenvalues": np.ones(2, complex)}}
    texts = {"b": r"no array 'eigenvalues' \(arrays: x\)", "c": "shape", "d": "complex128; real numbers"}
    for name, arrays in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(SordinoError, match=texts[name]):
            Spectrum.load(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "e.npz", eigenvalues=np.array([object()]))
    np.save(tmp_path / "f.npy", np.ones(3))
    (tmp_path / "g.npz").write_bytes(b"nonsense")
    for name in ("e.npz", "g.npz"):
        with pytest.raises(SordinoError, match="not an .npz of plain numbers"):
            Spectrum.load(tmp_path / name)
    with pytest.raises(SordinoError, match="one array without a name"):
        Spectrum.load(tmp_path / "f.npy")
    with pytest.raises(SordinoError, match="no spectrum at .*nowhere.npz"):
        Spectrum.load(tmp_path / "nowhere.npz")


def test_whose_it_is() -> None:
    model, public = build("mlp")
    spectrum = estimate_spectrum(model, public, show=False)
    spectrum.check_model(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    spectrum.check_model(model)  # other values are the same parameter set
    model[0].weight.requires_grad_(False)
    with pytest.raises(SordinoError, match="of another set of trainable parameters.*3 tensors with 27 numbers"):
        spectrum.check_model(model)
    assert model_fingerprint(build("cnn")[0]) != model_fingerprint(build("mlp")[0]) == spectrum.model
    with pytest.raises(SordinoError, match="has 30 eigenvalues, and the model 27"):
        Spectrum.given(np.ones(30)).check_model(model)
    Spectrum.given(np.ones(27)).check_model(model)


# -- from a model to a spectrum ---------------------------------------------------------------------------------------


def test_all_eigenvalues() -> None:
    model, public = build("cnn")
    spectrum = estimate_spectrum(model, public, dtype=torch.float64, show=False)
    np.testing.assert_allclose(spectrum.eigenvalues, true_values(model, public), atol=1e-12)
    assert spectrum.source == "exact" and spectrum.size == spectrum.computed == len(spectrum)
    assert spectrum.details["products"] == len(spectrum) and "negative eigenvalues" in spectrum.notes[0]
    assert spectrum.description == "12 public examples, labels 'given'"


def test_lanczos_a_count_and_a_tail() -> None:
    model, public = larger()
    true = true_values(model, public)
    spectrum = estimate_spectrum(
        model, public, 30, method="lanczos", dtype=torch.float64, smallest=1e-4, probes=20, upper=True, show=False
    )
    np.testing.assert_allclose(spectrum.eigenvalues[:30], true[:30], rtol=1e-4)
    count = int((true >= 1e-4).sum())
    deviation = float(np.sqrt(2 * (count - 30) / 20))
    assert spectrum.source == "lanczos + tail" and spectrum.computed == 30
    assert abs(len(spectrum) - count) < 4 * deviation
    assert spectrum.eigenvalues[-1] == pytest.approx(1e-4) and (np.diff(spectrum.eigenvalues) <= 0).all()
    assert "bounds the computed eigenvalues beyond 15 from above" in spectrum.notes[1]
    assert spectrum.notes[0].startswith("p₊ = ") and spectrum.details["residual"] <= 1e-4
    again = estimate_spectrum(
        model, public, 30, method="lanczos", dtype=torch.float64, smallest=1e-4, probes=20, upper=True, show=False
    )
    assert (again.eigenvalues == spectrum.eigenvalues).all()


def test_the_numbers_of_the_first_version_are_options() -> None:
    model, public = larger()
    spectrum = estimate_spectrum(model, public, 20, method="lanczos", tail=(90, 1e-5), show=False)
    assert len(spectrum) == 90 and spectrum.eigenvalues[-1] == pytest.approx(1e-5)
    assert spectrum.notes[0] == "p₊ and the smallest eigenvalue as given"
    bare = estimate_spectrum(model, public, 20, method="lanczos", tail="none", show=False)
    assert len(bare) == 20 and (bare.eigenvalues == spectrum.eigenvalues[:20]).all() and bare.source == "lanczos"


def test_float32_does_not_count_what_it_cannot_see() -> None:
    model, public = larger()
    spectrum = estimate_spectrum(model, public, 30, method="lanczos", smallest=1e-9, show=False)
    rounding = 30 * torch.finfo(torch.float32).eps * spectrum.largest
    assert "float32 cannot tell eigenvalues from 0; dtype=torch.float64 can" in spectrum.notes[0]
    assert spectrum.eigenvalues[-1] == pytest.approx(rounding)


def test_a_tail_that_falls_short_is_reported() -> None:
    """p₊ given too small: the curve must drop to μ there, and the quadrature knows better."""
    model, public = larger()
    spectrum = estimate_spectrum(model, public, 40, method="lanczos", dtype=torch.float64, tail=(60, 1e-5), show=False)
    assert "falls short of a computed eigenvalue beyond 20 by up to" in spectrum.notes[1]


def test_few_positive_eigenvalues_are_all_there_is() -> None:
    """Squares of one output: rank one."""
    torch.manual_seed(0)
    model = nn.Linear(40, 1, bias=False)
    data = TensorDataset(torch.randn(12, 40))
    public = sordino.Public(data, lambda x: model(x)[:, 0].square(), "given")
    spectrum = estimate_spectrum(model, public, 12, method="lanczos", dtype=torch.float64, show=False)
    x = data.tensors[0].double().numpy()
    np.testing.assert_allclose(spectrum.eigenvalues, np.linalg.eigvalsh(2 * x @ x.T / 12)[::-1], rtol=1e-6)
    with pytest.raises(SordinoError, match="top=13 eigenvalues from 12 public examples with 1 outputs each"):
        estimate_spectrum(model, public, 13, method="lanczos", show=False)
    extra = sordino.Public(data, lambda x: model(x)[:, 0].square() + model.weight.square().sum(), "given")
    with pytest.raises(SordinoError, match="ask for top=12 at most"):
        estimate_spectrum(model, extra, 20, method="lanczos", show=False)


def test_no_curvature_at_all() -> None:
    model = nn.Linear(5, 1)
    public = sordino.Public(build("mlp")[1].dataset, lambda x, y: -model(x)[:, 0].square(), "given")
    with pytest.raises(SordinoError, match="all eigenvalues are ≤ 0"):
        estimate_spectrum(model, public, show=False)


def test_bad_requests() -> None:
    model, public = larger()
    for options, text in [
        ({"method": "power"}, "method='power' is not known"),
        ({"tail": "guess"}, "tail='guess' is not known"),
        ({"tail": (1.5, 1e-6)}, "must be a whole number"),
        ({"top": 0}, "top=0"),
        ({"top": 4, "method": "lanczos"}, "a tail is fitted to at least 8"),
        ({"top": 1000, "method": "lanczos"}, "top=1000 eigenvalues, and the model has 186 trainable parameters"),
    ]:
        with pytest.raises(SordinoError, match=text):
            estimate_spectrum(model, public, **{"show": False, **options})  # type: ignore[arg-type]


def test_a_stopped_estimate_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.curvature import estimate, lanczos

    model, public = larger()
    options: dict[str, Any] = {"method": "lanczos", "dtype": torch.float64, "probes": 12, "steps": 20, "show": False}
    whole = estimate_spectrum(model, public, 20, **options)
    step, stop = lanczos.Lanczos.step, [25]

    def stopping(self: lanczos.Lanczos) -> None:
        stop[0] -= 1
        if stop[0] == 0:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(lanczos.Lanczos, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        estimate_spectrum(model, public, 20, resume=tmp_path, **options)
    count = []
    run = estimate.quadrature

    def counting(*args: Any, **more: Any) -> Any:
        save = more["saved"]

        def saved(so_far: Any) -> None:
            save(so_far)
            count.append(so_far.probes)
            if len(count) == 1:
                raise KeyboardInterrupt

        return run(*args, **{**more, "saved": saved})

    monkeypatch.setattr(estimate, "quadrature", counting)
    with pytest.raises(KeyboardInterrupt):
        estimate_spectrum(model, public, 20, resume=tmp_path, **options)
    done = estimate_spectrum(model, public, 20, resume=tmp_path, **options)
    assert (done.eigenvalues == whole.eigenvalues).all() and count == [5, 10, 12]
    assert done.details["products"] < whole.details["products"]
    with pytest.raises(StateError, match="of another model, public set or set of options"):
        estimate_spectrum(model, public, 21, resume=tmp_path, **options)
    (tmp_path / "lanczos.pt").write_bytes(b"nonsense")
    with pytest.raises(StateError, match=r"lanczos.pt cannot be read .*delete it"):
        estimate_spectrum(model, public, 20, resume=tmp_path, **options)


# -- whose data -------------------------------------------------------------------------------------------------------


def test_overlap_is_found_whatever_the_labels_and_the_form() -> None:
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    private = TensorDataset(x, y)
    public = sordino.Public(TensorDataset(torch.cat([torch.randn(5, 4), x[[3, 11]]])), lambda x: x)
    found = overlap(public, private)
    assert (found.count, found.public, found.private, found.pairs) == (2, 7, 30, ((5, 3), (6, 11)))
    with pytest.raises(PrivacyError, match=r"2 of 7 public examples .*\(public 5 is private 3\).*allow_overlap=True"):
        refuse_overlap(public, private)
    assert refuse_overlap(public, private, allow=True).count == 2
    assert refuse_overlap(TensorDataset(torch.randn(5, 4)), private).count == 0
    dicts = [{"input_ids": [1, 2, i], "labels": 0} for i in range(4)]
    others = [{"labels": 1, "input_ids": torch.tensor([1, 2, 3])}]
    assert overlap(others, dicts).pairs == ((0, 3),)
    assert content({"text": "a"}) != content({"text": "b"})
    assert content((torch.zeros(2), 1)) == content(-torch.zeros(2))


def test_overlap_of_the_librarys_own_sets() -> None:
    from sordino.data import load

    train, test = load("digits"), load("digits", "test")
    assert train is not None and test is not None
    assert overlap(test, train).count == 0
    assert overlap(train.subset(list(range(5, 9))), train).pairs == ((0, 5), (1, 6), (2, 7), (3, 8))


def test_the_fingerprint_is_of_the_examples_in_any_order() -> None:
    model, public = build("mlp")
    spectrum = estimate_spectrum(model, public, show=False)
    x, y = public.dataset.tensors
    shuffled = sordino.Public(TensorDataset(x.flip(0), y), losses(model))
    assert estimate_spectrum(model, shuffled, show=False).data == spectrum.data
    fewer = estimate_spectrum(model, public, examples=6, show=False)
    assert fewer.data != spectrum.data and fewer.description == "6 public examples, labels 'given'"


def test_the_picture(tmp_path: Path) -> None:
    model, public = larger()
    spectrum = estimate_spectrum(model, public, 30, method="lanczos", tail=(150, 1e-5), show=False)
    drawn = draw_spectrum(spectrum, tmp_path / "new" / "s.png", true_values(model, public))
    assert drawn.stat().st_size > 10_000
    assert draw_spectrum(Spectrum.given([2, 1]), tmp_path / "t.png").exists()
    with pytest.raises(SordinoError, match="cannot be written"):
        draw_spectrum(spectrum, tmp_path / "s.nonsense")
