"""The GPU kernel, run without a GPU by Triton's interpreter: RFC 8439, and the CPU's normals to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .reference import VECTORS, words

pytest.importorskip("triton")


def interpreted(script: str, given: str = "") -> dict[str, Any]:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        input=given,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    vectors = [(key.hex(), counter, nonce.hex()) for key, counter, nonce, _ in VECTORS]
    return interpreted("interpreted.py", json.dumps(vectors))


def test_rfc_8439_vectors(found: dict[str, Any]) -> None:
    expected = [words(text) for *_, text in VECTORS for _ in range(2)]  # both ways to write the rounds
    assert found["vectors"] == expected


def test_the_keystream_is_the_cpus(found: dict[str, Any]) -> None:
    assert found["keystream"]


def test_the_normals_are_the_cpus_to_the_bit(found: dict[str, Any]) -> None:
    assert len(found["same"]) == 10 and [name for name, same in found["same"].items() if not same] == []


def test_the_faster_mode_agrees_to_rounding(found: dict[str, Any]) -> None:
    assert found["fused differs by"] < 1e-5


def test_kept_noise_and_many_terms_are_the_cpus_to_the_bit() -> None:
    triton = pytest.importorskip("triton", minversion="3.3")
    found = interpreted("interpreted_moves.py")
    assert len(found) == 13 and [name for name, same in found.items() if not same] == [], triton.__version__


def test_keys_never_choose_a_kernel() -> None:
    """Nothing secret is among the arguments that Triton specialises (and caches, and names) a kernel by."""
    code = """
import json
from sordino.noise import triton_kernel as k, triton_moves as m
kernels = (k._add_one, k._add_many, m._add_terms, m._move)
print(json.dumps({f.fn.__name__: [p.name for p in f.params if not p.do_not_specialize] for f in kernels}))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    constants = ["TERMS", "BLOCK", "MODE", "UNROLL"]
    assert json.loads(done.stdout) == {
        "_add_one": ["out", *constants],
        "_add_many": ["table", "owner", *constants],
        "_add_terms": ["table", "owner", "plan", "KEYS", "UNROLL"],
        "_move": ["table", "owner", "kept", "plan", "REPLAY", "ADDS", "D", "UNROLL"],
    }
