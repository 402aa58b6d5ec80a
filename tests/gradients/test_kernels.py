"""The GPU kernels, run without a GPU by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def interpreted(script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, str(here / script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here.parents[1] / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_kernels_agree_with_float64() -> None:
    done = interpreted("kernel_cases.py")
    assert done.returncode == 0, done.stderr


def test_a_step_the_gpus_way_is_the_cpus() -> None:
    """Kernels for many layers at once, small parameters side by side: nothing of that changes the sums."""
    done = interpreted("gpu_path.py")
    assert done.returncode == 0, done.stderr
