"""No test writes into the cache of whoever runs it; what one test has optimised, the next may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("SORDINO_CACHE")
    os.environ["SORDINO_CACHE"] = str(tmp_path_factory.mktemp("cache"))  # seen by the processes that tests start
    yield
    if before is None:
        del os.environ["SORDINO_CACHE"]
    else:
        os.environ["SORDINO_CACHE"] = before
