"""The embedded default: scikit-learn's 1,797 digits of 8×8 pixels. Nothing is fetched."""

from __future__ import annotations

import numpy as np

from .base import Arrays

TRAIN = 1500


def load_digits(split: str) -> Arrays:
    """The first 1,500 of one fixed permutation are for training, the other 297 for testing."""
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    order = order[:TRAIN] if split == "train" else order[TRAIN:]
    # 0…16 as bytes, so that the grey levels lie in [−1, 1] as those of every other image.
    images = np.round(bunch.images[order, None] * (255 / 16)).astype(np.uint8)
    return Arrays(images, bunch.target[order], [str(i) for i in range(10)])
