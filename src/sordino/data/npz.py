"""Arrays from an ``.npz``: ``x``, ``y`` or ``images``, ``labels``; test arrays, if any, end in ``_test``."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SordinoError
from .base import Arrays, finite, labelled

_INPUTS, _LABELS = ("x", "images", "inputs", "data"), ("y", "labels", "targets", "target")


def _channels_first(source: Path, x: np.ndarray) -> np.ndarray:
    """(N, C, H, W) for images, whichever way the file has them."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        return x
    few = (1, 3, 4)
    if x.shape[1] in few and x.shape[3] not in few:
        return x
    if x.shape[3] in few and x.shape[1] not in few:
        return x.transpose(0, 3, 1, 2)
    if x.shape[1] in few:
        return x  # as torch has them, where both ends could be channels
    raise SordinoError(f"{source}: images of shape {x.shape[1:]} have no axis of 1, 3 or 4 channels, first or last")


def load_npz(path: Path, split: str, classes: Sequence[str] | None = None, unlabelled: bool = False) -> Arrays | None:
    """The examples of `split`, or None if the file has no test arrays and those are asked for.

    If they may be `unlabelled`, a file without labels gives label 0 everywhere and no classes.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if _wanted(name, split)}
            held = list(file.files)
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, KeyError) as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else "it is damaged or of another format"
        raise SordinoError(
            f"{path} cannot be read as .npz: {reason}; write it with numpy.savez(path, x=…, y=…)"
        ) from error
    suffix = "" if split == "train" else "_test"
    x = next((arrays[name + suffix] for name in _INPUTS if name + suffix in arrays), None)
    y = next((arrays[name + suffix] for name in _LABELS if name + suffix in arrays), None)
    if split != "train" and x is None and y is None:
        return None
    if unlabelled and x is not None and x.ndim > 1 and y is None:
        return Arrays(finite(path, _channels_first(path, x)), np.zeros(len(x), np.int64), [])
    if x is None or y is None:
        raise SordinoError(
            f"{path} holds {', '.join(held) or 'nothing'}; needed are 'x' and 'y' (or 'images' and 'labels')"
        )
    if x.ndim < 2:
        raise SordinoError(f"{path}: inputs have shape {x.shape}; the first axis must run over examples")
    if classes is None and "classes" in arrays:
        classes = [str(c) for c in arrays["classes"]]
    if classes is None and split != "train":  # numbered as in training
        train = load_npz(path, "train")
        classes = train.classes if train is not None else None
    targets, names = labelled(path, y, classes)
    return Arrays(finite(path, _channels_first(path, x)), targets, names)


def _wanted(name: str, split: str) -> bool:
    return name == "classes" or name.endswith("_test") == (split != "train")
