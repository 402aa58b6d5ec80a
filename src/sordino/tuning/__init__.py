"""Choosing settings by trials, and saying whether one method is better than another.

`split` holds a part of the private data out, `tune` looks for settings by their scores on it, and the `TuningRecord` it
returns has the remark that the guarantee then needs: none of this is covered by ε. `paired_t_test` and
`permutation_test` compare runs of two methods.
"""

from __future__ import annotations

from .records import Trial, TuningRecord
from .search import tune
from .significance import Significance, paired_t_test, permutation_test
from .space import SPACE, Choice, Range
from .split import Split, split

__all__ = [
    "SPACE",
    "Choice",
    "Range",
    "Significance",
    "Split",
    "Trial",
    "TuningRecord",
    "paired_t_test",
    "permutation_test",
    "split",
    "tune",
]
