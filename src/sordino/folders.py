"""Where files that can be made again are kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """``sordino`` in the user's cache folder, wherever the system keeps that."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sordino"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "sordino"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sordino"
