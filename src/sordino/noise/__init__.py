"""The noise room: (C⁻¹Z)_t, drawn as needed from one secure stream.

`Keys` holds the run's secret and hands out a sub-key per purpose; a `Stream` is a pure
function of (key, step, name, offset, length); `CorrelatedNoise` adds a row of C⁻¹Z.
"""

from __future__ import annotations

from .boxmuller import R_MAX
from .correlate import CorrelatedNoise
from .keys import PURPOSES, KeyLock, Keys
from .stream import Stream, Term, add_many_normals_, add_normals_, check_names

__all__ = [
    "PURPOSES",
    "R_MAX",
    "CorrelatedNoise",
    "KeyLock",
    "Keys",
    "Stream",
    "Term",
    "add_many_normals_",
    "add_normals_",
    "check_names",
]
