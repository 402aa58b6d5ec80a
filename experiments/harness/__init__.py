"""Many small runs on one machine: a list of runs in order of importance, and a folder of what came out.

A run is a mapping of plain values that says everything about it (`Run`); its result is a JSON file named by the run's
content. `work` does what is on the list and not in the folder, until it is done or the time is up.
"""

from __future__ import annotations

from .pool import Summary, work
from .results import Results, Run, name_of
from .tuning import next_trials

__all__ = ["Results", "Run", "Summary", "name_of", "next_trials", "work"]
