"""The demo runs, and shows what it says it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, DEMO, "--out", tmp_path, "--runs", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    mean = {name: sum(runs) / len(runs) for name, runs in result["accuracy"].items()}
    assert mean["λCGD"] > mean["DP-SGD"] > 0.85
    assert all(sentence.startswith("(8.00, 1e-05)-DP") for sentence in result["guarantee"].values())
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
