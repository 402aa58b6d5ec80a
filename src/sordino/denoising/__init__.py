"""Denoising: what is done to the noisy gradient before it reaches the optimizer.

``none`` and ``shrinkage``; an option set is also an object, ``Shrinkage(kappa=1.02)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import SordinoError
from .base import DENOISERS, Denoiser, check
from .none import NoDenoising
from .shrinkage import Shrinkage

__all__ = ["DENOISERS", "Denoiser", "NoDenoising", "Shrinkage", "build", "check", "denoise"]


def build(choice: str | Denoiser | Mapping[str, Any] | None) -> Denoiser:
    """A denoiser from its name, its options (``{"name": "shrinkage", "kappa": 1.05}``) or itself.

    >>> build("shrinkage").options()["kappa"]
    1.02
    >>> build({"name": "shrinkage", "kapa": 2})
    Traceback (most recent call last):
    ...
    sordino.errors.SordinoError: denoising='shrinkage' has no option 'kapa'; known: kappa, rescale
    """
    if isinstance(choice, Denoiser):
        return choice
    if choice is None:
        return NoDenoising()
    if not isinstance(choice, Mapping):
        return DENOISERS.parse(choice)[0].build()
    options = dict(choice)
    name = options.pop("name", None)
    if name is None:
        raise SordinoError(f"denoising={dict(choice)!r} needs a name, such as {{'name': 'shrinkage'}}")
    entry = DENOISERS.parse(name)[0]
    known = [key for key in entry.build().options() if key != "name"]
    for option in options:
        if option not in known:
            raise SordinoError(f"denoising={name!r} has no option {option!r}; known: {', '.join(known) or '(none)'}")
    return entry.build(**options)


def denoise(choice: str | Denoiser, matrix: Tensor, s: float) -> Tensor:
    """One matrix, for looking at what a denoiser does; the argument is left as it is."""
    updates = {"matrix": matrix.clone()}
    build(choice)(updates, s, {"matrix"})
    return updates["matrix"]
