"""Users' own data: what is read, and what is said when it cannot be."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sordino.data import Arrays, load
from sordino.data.base import labelled
from sordino.errors import SordinoError


def loaded(*args: object, **kwargs: object) -> Arrays:
    data = load(*args, **kwargs)  # type: ignore[arg-type]
    assert data is not None
    return data


def test_digits_are_embedded_and_split_once() -> None:
    train, test = loaded("digits"), loaded("digits", "test")
    assert (len(train), len(test)) == (1500, 297)
    x, y = train[[0, 1, 2]]
    assert x.shape == (3, 1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    every = torch.cat([train.inputs, test.inputs]).flatten(1)
    assert every.float().sum() == pytest.approx(561718 * 255 / 16, rel=1e-3)  # the sum of scikit-learn's 1,797 images
    assert -1 == train[:][0].min() and train[:][0].max() == 1
    assert (torch.bincount(test.targets, minlength=10) > 15).all()
    assert torch.equal(loaded("digits").inputs, train.inputs)


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels")])
def test_npz(tmp_path: Path, names: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (5, 8, 6, 3), dtype=np.uint8), np.array([0, 2, 1, 0, 2])
    path = tmp_path / "a.npz"
    np.savez(path, **{names[0]: x, names[1]: y, f"{names[0]}_test": x[:2], f"{names[1]}_test": y[:2]})
    data = loaded(path)
    assert data.input_shape == (3, 8, 6) and len(data.classes) == 3
    inputs, target = data[1]
    assert int(target) == 2
    np.testing.assert_allclose(inputs.numpy(), x[1].transpose(2, 0, 1) / 127.5 - 1, rtol=1e-6, atol=1e-6)
    assert len(loaded(path, "test")) == 2
    np.savez(path, x=x, y=y)
    assert load(path, "test") is None


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((4, 7), (7,)),
        ((4, 8, 8), (1, 8, 8)),
        ((4, 1, 8, 8), (1, 8, 8)),
        ((4, 8, 8, 3), (3, 8, 8)),
        ((4, 3, 8, 3), (3, 8, 3)),
    ],
)
def test_npz_shapes(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(shape), y=np.arange(4))
    data = loaded(tmp_path / "a.npz")
    assert data.input_shape == expected and data[0][0].dtype == torch.float32


def test_test_labels_are_numbered_as_in_training(tmp_path: Path) -> None:
    x = np.zeros((3, 2))
    np.savez(tmp_path / "a.npz", x=x, y=["ant", "bee", "cat"], x_test=x[:1], y_test=["cat"])
    assert loaded(tmp_path / "a.npz", "test").targets.tolist() == [2]
    (tmp_path / "train.csv").write_text("f,label\n1,ant\n2,bee\n3,cat\n")
    (tmp_path / "test.csv").write_text("f,label\n1,cat\n")
    train = loaded(tmp_path / "train.csv")
    assert loaded(tmp_path / "test.csv", classes=train.classes).targets.tolist() == [2]


def test_labels() -> None:
    assert labelled("a", np.array([0, 3]))[1] == ["0", "1", "2", "3"]
    assert labelled("a", np.array([-1, 1, 10, -1]))[0].tolist() == [0, 1, 2, 0]
    assert labelled("a", np.array([[1.0], [0.0]]))[0].tolist() == [1, 0]
    assert labelled("a", np.array([True, False]))[1] == ["0", "1"]
    assert labelled("a", np.array([-1, 1]), ["-1", "1"])[0].tolist() == [0, 1]
    assert labelled("a", np.array([1, 0]), ["cat", "dog"])[0].tolist() == [1, 0]
    for labels, classes, message in [
        (np.array([0.5]), None, "fractions or missing"),
        (np.array([np.nan]), None, "fractions or missing"),
        (np.zeros((3, 2)), None, "labels have shape"),
        (np.array([0, 5]), ["cat", "dog"], "label 0 is not one of the 2 classes: cat, dog"),
        (np.array(["cow"]), ["cat", "dog"], "label 'cow' is not one of the 2 classes"),
    ]:
        with pytest.raises(SordinoError, match=message):
            labelled("a", labels, classes)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,kind,income\n30,b,1e3\n\n40,a,2.5\n", encoding="utf-8-sig")
    data = loaded(path, label="kind")
    assert data.input_shape == (2,) and data.classes == ["a", "b"] and data.targets.tolist() == [1, 0]
    assert data[0][0].tolist() == [30, 1000]
    path.write_text("x,label\n1,0\n2,1\n")
    assert loaded(path).classes == ["0", "1"]


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"f": [1.5, 2.5], "n": [1, 2], "label": ["x", "y"]}), path)
    data = loaded(path)
    assert data[:][0].tolist() == [[1.5, 1], [2.5, 2]] and data.targets.tolist() == [0, 1]
    for table, message in [
        ({"f": ["a", "b"], "label": [0, 1]}, "column 'f' is .*string, not a number"),
        ({"f": [1.0, None], "label": [0, 1]}, "column 'f' lacks 1 values"),
        ({"f": [1.0, 2.0], "label": [0, None]}, "column 'label' lacks 1 values"),
        ({"f": [1.0, 2.0]}, "no column label='label'"),
        ({"f": [], "label": []}, "no rows"),
        ({"label": [1]}, "nothing else"),
    ]:
        pq.write_table(pa.table(table), path)
        with pytest.raises(SordinoError, match=message):
            load(path)
    path.write_bytes(b"not parquet at all")
    with pytest.raises(SordinoError, match="cannot be read as Parquet"):
        load(path)


def image(path: Path, value: int, size: int = 8, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size), value if mode == "L" else (value, 0, 0)).save(path)


def test_folder(tmp_path: Path) -> None:
    for i in range(3):
        image(tmp_path / "dog" / f"{i}.png", 10 * i)
        image(tmp_path / "cat" / "deep" / f"{i}.png", 255)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    data = loaded(tmp_path)
    assert data.input_shape == (1, 8, 8) and data.classes == ["cat", "dog"]
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1] and data[0][0].min() == 1
    assert load(tmp_path, "test") is None
    image(tmp_path / "dog" / "colour.png", 7, mode="RGB")
    assert loaded(tmp_path).input_shape == (3, 8, 8)
    image(tmp_path / "dog" / "large.png", 7, size=16)
    with pytest.raises(SordinoError, match="large.png has 16×16 pixels and 0.png 8×8; give a size"):
        load(tmp_path)
    assert loaded(tmp_path, size=12).input_shape == (3, 12, 12)


def test_folder_with_splits(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        image(tmp_path / "train" / name / "0.png", 1)
    image(tmp_path / "test" / "cat" / "0.png", 1)
    assert loaded(tmp_path).classes == ["ant", "bee", "cat"]
    assert loaded(tmp_path, "test").targets.tolist() == [2]
    image(tmp_path / "test" / "dog" / "0.png", 1)
    with pytest.raises(SordinoError, match="dog is not one of the 3 classes"):
        load(tmp_path, "test")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    count = itertools.count()

    def npz(**arrays: object) -> Path:
        path = tmp_path / f"{next(count)}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        return path

    def text(content: bytes, suffix: str = ".csv") -> Path:
        path = tmp_path / f"{next(count)}{suffix}"
        path.write_bytes(content)
        return path

    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "bad" / "cat").mkdir(parents=True)
    (tmp_path / "bad" / "cat" / "0.png").write_bytes(b"no png")
    x = np.zeros((3, 2))
    for path, message in [
        (tmp_path / "missing.npz", "no such file or folder"),
        ("digit", "did you mean 'digits'"),
        (text(b"", ".xlsx"), "ends in .xlsx; known are .npz, .csv"),
        (text(b"PK", ".npz"), "cannot be read as .npz"),
        (npz(x=x), "holds x; needed are 'x' and 'y'"),
        (npz(x=x, y=np.arange(4)), "3 examples but 4 labels"),
        (npz(x=np.array([{}, 1, 2]), y=np.arange(3)), "Python objects"),
        (npz(x=np.full((3, 2), np.nan), y=np.arange(3)), "3 examples hold NaN.*row 0"),
        (npz(x=np.array([["a"], ["b"]]), y=np.arange(2)), "numbers are needed"),
        (npz(x=np.zeros((2, 5, 5, 5)), y=np.arange(2)), "no axis of 1, 3 or 4 channels"),
        (npz(x=np.zeros(3), y=np.arange(3)), "the first axis must run over examples"),
        (text(b""), "no column label='label'"),
        (text(b"a,lable\n1,2\n"), "did you mean 'lable'"),
        (text(b"a,a,label\n1,2,3\n"), "appears twice"),
        (text(b"a,label\n"), "no rows"),
        (text(b"label\n1\n"), "nothing else"),
        (text(b"a,label\n1,0\nx,0\n"), "line 3: a='x' is not a number"),
        (text(b"a,label\n1,0,7\n"), "line 2: 3 fields under 2 column names"),
        (text(b"a,label\n\xff,0\n"), "not UTF-8"),
        (text(b"a,label\nnan,0\n"), "hold NaN"),
        (empty, "no images in sub-folders"),
        (tmp_path / "bad", "cannot be read as an image"),
    ]:
        with pytest.raises(SordinoError, match=message) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(SordinoError, match="split='val'"):
        load("digits", "val")
