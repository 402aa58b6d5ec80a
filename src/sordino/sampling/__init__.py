"""Who is in the batch. ``SAMPLERS`` is the registry of the choice ``sampling``."""

from __future__ import annotations

from ..budget import Schedule
from ..registry import Entry, Registry
from .balls_in_bins import BallsInBins
from .base import Sampling, Words
from .fixed_order import FixedOrder
from .poisson import Poisson

SAMPLERS: Registry[Sampling] = Registry("sampling")
SAMPLERS.add(
    Entry(
        "poisson",
        lambda argument, schedule: Poisson(schedule),
        "every example in every batch independently, at rate B/N",
        paper="Abadi et al. 2016",
        capabilities={"adjacency": Poisson.adjacency.value, "amplifies": True},
    )
)
SAMPLERS.add(
    Entry(
        "fixed-order",
        lambda argument, schedule: FixedOrder(schedule),
        "a permutation drawn once, cut into batches, the same every epoch",
        capabilities={"adjacency": FixedOrder.adjacency.value, "amplifies": False},
    )
)
SAMPLERS.add(
    Entry(
        "balls-in-bins",
        lambda argument, schedule: BallsInBins(schedule),
        "each example draws its batch of the epoch once, independently and uniformly",
        paper="Chua et al. 2024; Choquette-Choo et al. 2024",
        capabilities={"adjacency": BallsInBins.adjacency.value, "amplifies": True},
    )
)


def make_sampling(text: str, schedule: Schedule) -> Sampling:
    """The sampler a user means by `text`.

    >>> make_sampling("poisson", Schedule(examples=1000, batch_size=10, epochs=1)).rate
    0.01
    """
    entry, argument = SAMPLERS.parse(text)
    return entry.build(argument, schedule)


__all__ = ["SAMPLERS", "BallsInBins", "FixedOrder", "Poisson", "Sampling", "Words", "make_sampling"]
