"""About how much noise balls in bins will need: to choose by, never to report. Kept on disk like the answers."""

from __future__ import annotations

import numpy as np

from ..budget import Budget
from ..sampling import BallsInBins
from ..strategies import Strategy
from ..strategies.cache import cached

VERSION = 2


def estimated_noise(strategy: Strategy, sampling: BallsInBins, budget: Budget, parameters: int | None = None) -> float:
    """`monte_carlo.estimate_noise`, or what it said before."""
    from .bins_gram import bins_gram
    from .monte_carlo import estimate_noise

    gram = bins_gram(strategy, sampling.bins, strategy.steps)
    found = cached(
        "bins-estimate",
        {
            "version": VERSION,
            "gram": gram.gram,
            "totals": gram.totals,
            "largest": gram.largest,
            "steps": strategy.steps,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "parameters": parameters or 0,
        },
        lambda: {"noise": np.array(estimate_noise(strategy, sampling, budget, parameters))},
    )
    return float(found["noise"])
