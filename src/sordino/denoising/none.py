"""No denoising: the noisy sum goes to the optimizer as it is."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

from torch import Tensor

from ..registry import Entry
from .base import DENOISERS, Denoiser


class NoDenoising(Denoiser):
    """The identity.

    >>> NoDenoising().options()
    {'name': 'none'}
    """

    name = "none"

    def __call__(self, updates: MutableMapping[str, Tensor], noise_std: float, matrices: Collection[str]) -> None:
        return None


DENOISERS.add(
    Entry(
        "none",
        NoDenoising,
        "the noisy gradient as it is",
        capabilities={"white_noise": False, "correlated_noise": "fine"},
    )
)
