"""Where the past that correlated noise needs lives: nowhere, on the device, or on the host.

``noise_storage`` is one option with four values. `regenerate` keeps nothing and draws past
rows of Z again; `device` keeps vectors beside the model; `host` keeps them in main memory
and streams them past a GPU. `auto` regenerates where the strategy can, else takes the device
if half of its free memory is enough, else the host. No choice changes a bit of the noise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import SordinoError
from .boxmuller import TILE
from .gpu import has_kernels

NOISE_STORAGE = ("auto", "regenerate", "device", "host")
SHARE = 0.5  # of the free memory: activations and the optimizer's own vectors want the rest


class Past(Protocol):
    """What is needed of a strategy: how many past vectors each step reads."""

    @property
    def name(self) -> str: ...

    @property
    def vectors_regenerated(self) -> int: ...

    @property
    def vectors_stored(self) -> int: ...


@dataclass(frozen=True)
class Storage:
    """A choice made for one model."""

    kind: str  # regenerate, device or host
    vectors: int  # kept, each as large as the model; 0 if none
    numbers: int  # of one vector, in whole tiles
    device: torch.device  # the model's
    redrawn: int  # past rows drawn again at each step

    @property
    def bytes(self) -> int:
        return 4 * self.vectors * self.numbers

    @property
    def home(self) -> torch.device:
        return self.device if self.kind == "device" else torch.device("cpu")

    def describe(self) -> str:
        """
        >>> Storage("device", 15, 10_000_384, torch.device("cuda"), 0).describe()
        '15 past vectors kept on the device (600 MB)'
        """
        if self.kind == "regenerate" or not self.vectors:
            return f"{_count(self.redrawn, 'past row')} drawn again at each step" if self.redrawn else "nothing kept"
        where = "in memory" if self.device.type == "cpu" else f"on the {self.kind}"
        return f"{_count(self.vectors, 'past vector')} kept {where} ({size(self.bytes)})"


def check_storage(wanted: str, strategy: Past) -> str:
    """`wanted` if it is a value, and one that the strategy allows."""
    if wanted not in NOISE_STORAGE:
        raise SordinoError(f"noise_storage={wanted!r} is not known; choose one of: {', '.join(NOISE_STORAGE)}")
    if wanted == "regenerate" and strategy.vectors_stored:
        raise SordinoError(
            f"noise_storage='regenerate': each step of noise={strategy.name!r} depends on all before it, which cannot "
            "be drawn again at every step; use 'auto', 'device' or 'host'"
        )
    return wanted


def choose(wanted: str, strategy: Past, tensors: Mapping[str, Tensor]) -> Storage:
    """Where the noise for tensors like these is to live."""
    check_storage(wanted, strategy)
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    numbers = sum(TILE * -(-t.numel() // TILE) for t in tensors.values())
    vectors = strategy.vectors_stored or strategy.vectors_regenerated
    if wanted == "regenerate" or not vectors or (wanted == "auto" and not strategy.vectors_stored):
        return Storage("regenerate", 0, numbers, device, strategy.vectors_regenerated)
    kind = wanted
    if kind == "auto":
        kind = "device" if 4 * vectors * numbers <= SHARE * free_memory(device) else "host"
    if device.type != "cpu" and not (device.type == "cuda" and has_kernels()):
        kind = "host"  # the noise is made on the CPU
    found = Storage(kind, vectors, numbers, device, 0)
    if found.home.type == "cpu" and found.bytes > main_memory():
        raise SordinoError(
            f"noise={strategy.name!r} keeps {vectors} vectors of the model's size, {size(found.bytes)}, more than this "
            f"machine's {size(main_memory())}; use a strategy with fewer, or one that is drawn again"
        )
    return found


def free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")  # on a CPU there is nowhere else
    return float(torch.cuda.mem_get_info(device)[0])


def main_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def size(count: float) -> str:
    """
    >>> size(6_000_000_000), size(2_500_000), size(8192)
    ('6.0 GB', '2.5 MB', '8.2 kB')
    """
    unit = next((u for u in ("kB", "MB", "GB") if count < 1000 ** (("kB", "MB", "GB").index(u) + 2)), "TB")
    value = count / 1000 ** (("kB", "MB", "GB", "TB").index(unit) + 1)
    return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
