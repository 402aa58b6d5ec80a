"""One of b bins for every example, uniformly and independently: a pure function of (key, step, name, i)."""

from __future__ import annotations

import numpy as np

from .base import Words, uniform64


def draw_bins(stream: Words, step: int, name: str, population: int, bins: int) -> np.ndarray:
    """``⌊W·b / 2⁶⁴⌋``, W a uniform 64-bit integer: each bin has probability 1/b to within 2⁻⁶⁴."""
    w = uniform64(stream, step, name, 0, population)
    high, low, b = w >> np.uint64(32), w & np.uint64(0xFFFFFFFF), np.uint64(bins)
    return ((high * b + ((low * b) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)
