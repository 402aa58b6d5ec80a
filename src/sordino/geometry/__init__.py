"""The space in which gradients are clipped and noised.

>>> GEOMETRIES.names()
['euclidean', 'adadps']
"""

from __future__ import annotations

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


def geometry(choice: str | Geometry) -> Geometry:
    """The geometry meant by a name or given as an object."""
    if isinstance(choice, Geometry):
        return choice
    if not isinstance(choice, str):
        raise SordinoError(f"geometry={choice!r} must be a name or a geometry such as sordino.AdaDPS()")
    entry, _ = GEOMETRIES.parse(choice)
    return entry.build()


__all__ = ["GEOMETRIES", "AdaDPS", "Euclidean", "Geometry", "geometry"]
