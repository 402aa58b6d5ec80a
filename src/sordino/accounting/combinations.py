"""Which noise goes with which sampling, asked of the accountants themselves.

Nothing here is a list that could fall behind: every sampler is tried with the strategy at hand, and the
sampler at hand with one strategy of each kind (independent, banded, any).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import Unsupported
from ..sampling import SAMPLERS, Sampling, make_sampling
from ..strategies import STRATEGIES, Strategy

Supported = Callable[[Strategy, Sampling], bool]


class Kind(Strategy):
    """Some C of which only the name and the number of bands (None: not banded) is known: all an accountant asks."""

    def __init__(self, steps: int, bands: int | None, name: str = "any", identity: bool = False) -> None:
        super().__init__(name, steps)
        self.bands, self.is_identity = bands, identity

    def dense(self) -> np.ndarray:
        raise Unsupported("there is no matrix of this kind, it is only asked about")

    def terms(self, step: int) -> list[tuple[int, float]]:
        raise Unsupported("there is no noise of this kind, it is only asked about")


def samplings_for(strategy: Strategy, sampling: Sampling, supported: Supported) -> list[str]:
    """The samplers, as one writes them, that have an accountant for this strategy and schedule."""
    bands = 1 if strategy.is_identity else strategy.bands
    found = []
    for text in [name for e in SAMPLERS for name in (e.name, f"{e.name}:{e.optional}" if e.optional else "") if name]:
        try:
            if supported(strategy, make_sampling(text, sampling.schedule, bands)):
                found.append(text)
        except Unsupported:
            continue
    # An argument that changes nothing (a number of parts) is not another choice.
    return [text for text in found if text.partition(":")[0] not in found or ":" not in text or text.endswith(":fresh")]


def noises_for(sampling: Sampling, supported: Supported) -> str:
    """In words, the noises that have an accountant with this sampler."""
    steps = sampling.schedule.steps
    if supported(Kind(steps, None), sampling):
        return "any noise"
    banded = [e.name for e in STRATEGIES if e.capabilities.get("bands") == "argument"]
    if supported(Kind(steps, 1), sampling):
        return f"banded noise ({', '.join(['identity', *banded])})"
    return "noise='identity'"


def instead(strategy: Strategy, sampling: Sampling, supported: Supported) -> str:
    """What each half of a combination goes with, to add to the reason why they do not go together."""
    samplings = " or ".join(repr(text) for text in samplings_for(strategy, sampling, supported))
    kinds = noises_for(sampling, supported)
    return f"noise={strategy.name!r} goes with sampling={samplings}; sampling={sampling.name!r} goes with {kinds}"
