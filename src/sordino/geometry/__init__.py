"""The space in which gradients are clipped and noised.

>>> GEOMETRIES.names()
['euclidean', 'adadps']
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from ..errors import SordinoError
from ..registry import Entry, Registry
from .adadps import AdaDPS
from .base import Geometry
from .euclidean import Euclidean

GEOMETRIES: Registry[Geometry] = Registry("geometry")
GEOMETRIES.add(
    Entry("euclidean", Euclidean, "clip and add noise to the gradient as it is", "DP-SGD (Abadi et al. 2016)")
)
GEOMETRIES.add(
    Entry(
        "adadps",
        AdaDPS,
        "divide each coordinate by the root of its public second moment before clipping",
        "AdaDPS (Li et al. 2022)",
        capabilities={"needs_public": True, "options": "AdaDPS(epsilon=1e-3, examples=None)"},
    )
)


def geometry(choice: str | Geometry | Mapping[str, Any]) -> Geometry:
    """The geometry meant by a name, by a table of its name and options, or given as an object.

    >>> geometry({"name": "adadps", "epsilon": 0.01}).epsilon
    0.01
    >>> geometry({"name": "adadps", "epsilom": 0.01})
    Traceback (most recent call last):
    ...
    sordino.errors.SordinoError: geometry='adadps' has no option 'epsilom'; known: epsilon, examples
    """
    if isinstance(choice, Geometry):
        return copy.copy(choice)  # what it learns belongs to one run
    if isinstance(choice, Mapping):
        options = dict(choice)
        name = options.pop("name", None)
        if name is None:
            raise SordinoError(f"geometry={dict(choice)!r} needs a name, such as {{'name': 'adadps'}}")
        entry, _ = GEOMETRIES.parse(name)
        known = list(inspect.signature(entry.build).parameters)
        for option in options:
            if option not in known:
                raise SordinoError(f"geometry={name!r} has no option {option!r}; known: {', '.join(known) or '(none)'}")
        return entry.build(**options)
    if not isinstance(choice, str):
        raise SordinoError(
            f"geometry must be a name ({', '.join(GEOMETRIES.names())}) or an object such as sordino.AdaDPS(), not a "
            f"{type(choice).__name__}"
        )
    entry, _ = GEOMETRIES.parse(choice)
    return entry.build()


__all__ = ["GEOMETRIES", "AdaDPS", "Euclidean", "Geometry", "geometry"]
