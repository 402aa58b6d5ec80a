from __future__ import annotations

from collections.abc import Callable

import pytest

from sordino.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line; the exit code, stdout and stderr."""
    import warnings

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # restored afterwards

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
