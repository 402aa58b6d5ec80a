"""The GPU kernels, run without a GPU by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("case", ["gram", "convolution", "sums"])
def test_kernels_agree_with_float64(case: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernel_cases.py")), case],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
