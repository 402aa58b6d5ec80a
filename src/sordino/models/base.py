"""The models that examples and experiments train, by name: ``build(name, input_shape, classes, **options)``.

All are plain ``torch.nn`` modules without batch normalisation, which would mix examples.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import SordinoError
from ..registry import Entry, Registry

Shape = tuple[int, ...]

MODELS: Registry[nn.Module] = Registry("model")


def images(name: str, shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """`shape` as (channels, height, width), or an error that says what to do with other data."""
    if len(shape) != 3:
        raise SordinoError(
            f"model={name!r} needs images of shape (channels, height, width), and one example has shape {shape}; "
            "use model='mlp' or 'logistic'"
        )
    if min(shape[1:]) < smallest:
        raise SordinoError(f"model={name!r} needs images of at least {smallest}×{smallest} pixels, not {shape}")
    return shape[0], shape[1], shape[2]


def positive(name: str, value: Any) -> int:
    """`value` as a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SordinoError(f"{name}={value!r} must be a whole number of at least 1")
    return value


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """GroupNorm with at most `groups` groups, as many as divide the channels.

    >>> group_norm(64, 16).num_groups, group_norm(24, 16).num_groups
    (16, 8)
    """
    return nn.GroupNorm(math.gcd(channels, positive("groups", groups)), channels)


def options_of(entry: Entry[nn.Module]) -> dict[str, Any]:
    """The options a model takes, with their defaults."""
    parameters = list(inspect.signature(entry.build).parameters.values())[2:]
    return {p.name: p.default for p in parameters}


def build(name: str, input_shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """The model called `name` for examples of `input_shape` (without the batch) and `classes` outputs.

    >>> sum(p.numel() for p in build("logistic", (1, 8, 8), 10).parameters())
    650
    >>> build("mlp", (64,), 10, hiden=[32])
    Traceback (most recent call last):
    ...
    sordino.errors.SordinoError: model='mlp' has no option 'hiden'; did you mean 'hidden'? known: hidden
    """
    entry, _ = MODELS.parse(name)
    shape = tuple(positive("input_shape", int(size)) for size in input_shape)
    known = options_of(entry)
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SordinoError(f"model={name!r} has no option {option!r}; {hint}known: {', '.join(known) or '(none)'}")
    return entry.build(shape, positive("classes", classes), **options)
