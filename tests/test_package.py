"""The public names: few, lazy and cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sordino


def test_importing_sordino_is_cheap() -> None:
    """Nothing heavy may come with ``import sordino``, torch included."""
    heavy = ["torch", "scipy", "matplotlib", "dp_accounting", "pydantic", "typer", "triton", "cryptography", "sklearn"]
    code = f"import sys, sordino; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_has_a_home() -> None:
    from sordino import _HOME

    assert set(sordino.__all__) == {"__version__", *_HOME}


def test_the_plan_file_does_not_hide_the_plan_function() -> None:
    pytest.importorskip("sordino.plan")
    code = "import sordino.plan, sordino; assert callable(sordino.plan); from sordino.plan import Plan"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sordino.nonsense
