"""Who is in the batch. ``SAMPLERS`` is the registry of the choice ``sampling``."""

from __future__ import annotations

from ..budget import Schedule
from ..errors import SordinoError
from ..registry import Entry, Registry
from .balls_in_bins import BallsInBins
from .base import Sampling, Words
from .cyclic_poisson import CyclicPoisson, parse_parts
from .fixed_order import FixedOrder
from .fresh_bins import FreshBins
from .poisson import Poisson

SAMPLERS: Registry[Sampling] = Registry("sampling")
SAMPLERS.add(
    Entry(
        "poisson",
        lambda argument, schedule, bands: Poisson(schedule),
        "every example in every batch independently, at rate B/N",
        paper="Abadi et al. 2016",
        capabilities={"adjacency": Poisson.adjacency.value, "amplifies": True},
    )
)
SAMPLERS.add(
    Entry(
        "cyclic-poisson",
        lambda argument, schedule, bands: CyclicPoisson(schedule, parse_parts(argument, bands)),
        "parts take turns, each sampled independently at rate bB/N; as many parts as the noise has bands, or :b",
        paper="Choquette-Choo et al. 2023",
        optional="16",
        capabilities={"adjacency": CyclicPoisson.adjacency.value, "amplifies": True},
    )
)
SAMPLERS.add(
    Entry(
        "fixed-order",
        lambda argument, schedule, bands: FixedOrder(schedule),
        "a permutation drawn once, cut into batches, the same every epoch",
        capabilities={"adjacency": FixedOrder.adjacency.value, "amplifies": False},
    )
)
SAMPLERS.add(
    Entry(
        "balls-in-bins",
        lambda argument, schedule, bands: _balls_in_bins(argument, schedule),
        "each example draws its batch of the epoch once, independently and uniformly (fresh: anew every epoch)",
        paper="Chua et al. 2024; Choquette-Choo et al. 2024",
        optional="fresh",
        capabilities={"adjacency": BallsInBins.adjacency.value, "amplifies": True},
    )
)


def _balls_in_bins(argument: str, schedule: Schedule) -> Sampling:
    if argument not in ("", "fresh"):
        raise SordinoError(
            f"sampling='balls-in-bins:{argument}' is not known; write 'balls-in-bins' (bins drawn once) or "
            "'balls-in-bins:fresh' (anew every epoch)"
        )
    return FreshBins(schedule) if argument else BallsInBins(schedule)


def make_sampling(text: str, schedule: Schedule, bands: int | None = None) -> Sampling:
    """The sampler a user means by `text`, for noise with so many bands (None: not banded).

    >>> make_sampling("poisson", Schedule(examples=1000, batch_size=10, epochs=1)).rate
    0.01
    """
    entry, argument = SAMPLERS.parse(text)
    return entry.build(argument, schedule, bands)


__all__ = [
    "SAMPLERS",
    "BallsInBins",
    "CyclicPoisson",
    "FixedOrder",
    "FreshBins",
    "Poisson",
    "Sampling",
    "Words",
    "make_sampling",
]
