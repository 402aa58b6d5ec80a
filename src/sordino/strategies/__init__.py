"""The matrices C: which noise is added at which step, and how much of it later steps take back.

``STRATEGIES`` is the registry of the choice ``noise``; `make_strategy` builds one from
the text a user writes.
"""

from __future__ import annotations

from ..registry import Entry, Registry
from .base import Strategy
from .identity import Identity
from .lambda_cgd import LambdaCGD, NormalizedLambdaCGD, parse_lambda
from .sensitivity import Sensitivity

STRATEGIES: Registry[Strategy] = Registry("noise")
STRATEGIES.add(
    Entry(
        "identity",
        lambda argument, steps: Identity(steps),
        "independent noise at every step (DP-SGD)",
        paper="Abadi et al. 2016, Deep Learning with Differential Privacy",
        capabilities={"regenerates": True, "identity": True},
    )
)
STRATEGIES.add(
    Entry(
        "lambda-cgd",
        lambda argument, steps: LambdaCGD(parse_lambda(argument, "lambda-cgd"), steps),
        "takes back λ times the previous step's noise, drawn again rather than stored",
        paper="DP-λCGD",
        argument="0.95",
        capabilities={"regenerates": True, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "lambda-cgd-normalized",
        lambda argument, steps: NormalizedLambdaCGD(parse_lambda(argument, "lambda-cgd-normalized"), steps),
        "the same, with every column of C scaled to norm 1",
        paper="DP-λCGD, column normalisation",
        argument="0.95",
        capabilities={"regenerates": True, "identity": False},
    )
)


def make_strategy(text: str, steps: int) -> Strategy:
    """The strategy a user means by ``text`` over `steps` steps.

    >>> make_strategy("lambda-cgd:0.9", 100).terms(3)
    [(3, 1.0), (2, -0.9)]
    """
    entry, argument = STRATEGIES.parse(text)
    return entry.build(argument, steps)


__all__ = [
    "STRATEGIES",
    "Identity",
    "LambdaCGD",
    "NormalizedLambdaCGD",
    "Sensitivity",
    "Strategy",
    "make_strategy",
]
