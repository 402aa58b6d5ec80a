"""Borrowed randomness: seed every ordinary generator for a while, then give all of them back as they were.

Dropout, augmentation and datasets draw from torch's, numpy's and Python's own
generators. Inside `seeded` these are a pure function of the seed; outside, nobody
can tell that it was ever entered. (The noise does not come from here: see noise/.)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Every generator seeded, `device`'s too, and restored afterwards, whatever happens.

    >>> before = torch.get_rng_state()
    >>> with seeded(7):
    ...     a = torch.rand(2)
    >>> with seeded(7):
    ...     b = torch.rand(2)
    >>> bool((a == b).all()), bool((torch.get_rng_state() == before).all())
    (True, True)
    """
    cuda = device if device is not None and device.type == "cuda" else None
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_state = None if cuda is None else torch.cuda.get_rng_state(cuda)
    try:
        seed_all(seed, device)
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, cuda)


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators; of the GPUs only `device`, so that no other's state is touched."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def derived_seed(token: bytes, what: str, index: int = 0) -> int:
    """64 bits out of a step's secret token: for one example, one chunk, one purpose."""
    digest = hashlib.blake2b(f"{what} {index}".encode(), key=token, digest_size=8).digest()
    return int.from_bytes(digest, "little")
