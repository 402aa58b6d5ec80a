"""A folder of images, one sub-folder a class; ``train/`` and ``test/`` above the classes, if there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SordinoError
from .base import Arrays

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def load_folder(path: Path, split: str, size: int | None = None, classes: Sequence[str] | None = None) -> Arrays | None:
    """Grey if every image is grey, else RGB; all of one size, or resized to `size`×`size`."""
    from PIL import Image, UnidentifiedImageError

    root = path / split
    if not root.is_dir():
        if split != "train":
            return None
        root = path
    of_training = path / "train" if (path / "train").is_dir() else path
    known = list(classes) if classes is not None else _sub_folders(of_training)
    for name in _sub_folders(root):
        if name not in known:
            raise SordinoError(f"{root / name} is not one of the {len(known)} classes: {', '.join(known[:12])}")
    files = [
        (file, number)
        for number, name in enumerate(known)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    ]
    if not files:
        raise SordinoError(f"{root} holds no images in sub-folders; it must hold one folder a class")
    images: list[np.ndarray] = []
    for file, _ in files:
        try:
            with Image.open(file) as opened:
                image = opened.convert("L" if opened.mode in ("1", "L", "I;16") else "RGB")
                if size is not None and image.size != (size, size):
                    image = image.resize((size, size), Image.Resampling.BILINEAR)
                images.append(np.asarray(image))
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise SordinoError(f"{file} cannot be read as an image; remove or repair it") from error
        if images[-1].shape[:2] != images[0].shape[:2]:
            a, b = images[0].shape[:2], images[-1].shape[:2]
            raise SordinoError(
                f"{file} has {b[1]}×{b[0]} pixels and {files[0][0].name} {a[1]}×{a[0]}; give a size to resize them to"
            )
    if any(image.ndim == 3 for image in images):
        stacked = np.stack([i if i.ndim == 3 else np.repeat(i[..., None], 3, -1) for i in images])
        x = stacked.transpose(0, 3, 1, 2)
    else:
        x = np.stack(images)[:, None]
    return Arrays(x, np.array([number for _, number in files]), known)


def _sub_folders(folder: Path) -> list[str]:
    return sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
