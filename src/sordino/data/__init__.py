"""Data for the examples, the experiments and ``sordino train``.

``load("digits")`` is embedded, ``load("cifar10")`` is what ``fetch`` brought, and a path is the user's own: an
``.npz``, a folder of images, CSV or Parquet.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..errors import SordinoError
from .base import Arrays
from .fetch import data_folder, fetch, fetched
from .npz import load_npz
from .sets import SOURCES

__all__ = ["SOURCES", "Arrays", "data_folder", "fetch", "fetched", "load"]

BUILT_IN = ("digits", *SOURCES)


def load(
    source: str | Path,
    split: str = "train",
    *,
    label: str = "label",
    size: int | None = None,
    classes: Sequence[str] | None = None,
    unlabelled: bool = False,
) -> Arrays | None:
    """The examples of `split` ("train" or "test"); None if `source` has no test part.

    `label` names the label column of CSV and Parquet; `size` is what images of a folder are resized to; `classes` is
    the complete list of classes where this file may lack some, as a test set may. Where data may be `unlabelled`, an
    .npz without labels has label 0 everywhere, and no classes.

    >>> train, test = load("digits"), load("digits", "test")
    >>> len(train), len(test), train.input_shape, len(train.classes)
    (1500, 297, (1, 8, 8), 10)
    """
    if split not in ("train", "test"):
        raise SordinoError(f"split={split!r} is not known; choose 'train' or 'test'")
    name = str(source)
    if name == "digits":
        from .digits import load_digits

        return load_digits(split)
    if name in SOURCES:
        here = fetched(name)
        if here is None:
            raise SordinoError(f"{name} has not been fetched yet; run: sordino data {name}")
        return load_npz(here, split, SOURCES[name].classes)
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if not path.exists():
        near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SordinoError(f"data {name!r}: no such file or folder; {hint}built in: {', '.join(BUILT_IN)}")
    if path.is_dir():
        from .folder import load_folder

        return load_folder(path, split, size, classes)
    if suffix == ".npz":
        return load_npz(path, split, classes, unlabelled)
    if suffix in (".csv", ".parquet", ".pq"):
        from .tables import load_csv, load_parquet

        if split != "train":
            return None
        return (load_csv if suffix == ".csv" else load_parquet)(path, label, classes)
    known = ".npz, .csv, .parquet and a folder of images"
    raise SordinoError(f"data {name!r} ends in {suffix or 'nothing'}; known are {known}")
