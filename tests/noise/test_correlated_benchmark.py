"""The benchmark of correlated noise runs, keeps what it measured when it is cut short, and fills its tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    found = {}
    for name in ("correlated", "table"):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found


def test_both_parts_are_measured_and_written_down_row_by_row(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    bench, table = modules["correlated"], modules["table"]
    path = tmp_path / "correlated-cpu.json"
    result = bench.Result(path, "cpu")
    noises = [("identity", "regenerate"), ("bisr:4", "regenerate"), ("bisr:4", "device"), ("bsr:999", "device")]
    bench.noise_rows("cpu", [5000, 9000], noises, 2, result)
    written = json.loads(path.read_text())["noise"]
    assert [(row["noise"], row["count"]) for row in written[:2]] == [("torch.randn", 5000), ("identity", 5000)]
    assert len(written) == 10 and all(row["ms"] > 0 for row in written if row["noise"] != "bsr:999")
    kept = {(row["noise"], row["storage"]): row["kept_bytes"] for row in written if "kept_bytes" in row}
    assert kept["bisr:4", "device"] == 3 * 5 * 2048 * 4 and kept["bisr:4", "regenerate"] == 0
    assert "bandwidth of 999" in written[-1]["failed"]

    def tiny() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 10))

    def cases(device: str) -> dict[str, Any]:
        return {"tiny": bench.Case("tiny", tiny, bench.steps_of.images(8, 2), bench.steps_of.classify, 4)}

    bench.cases = cases
    bench.step_rows("cpu", [], [("bisr:4", "regenerate"), ("bsr:4", "device"), ("bsr:4", "host")], 2, result, [])
    steps = json.loads(path.read_text())["steps"]
    assert [row["noise"] for row in steps] == ["identity", "bisr:4", "bsr:4"]
    assert steps[2]["kept_bytes"] == 3 * 2 * 2048 * 4 and steps[2]["ratio"] > 0
    assert steps[0]["batch"] == 8 and steps[0]["at_once"] == 4

    again = bench.Result(path, "cpu", ("noise",)).content
    assert again["steps"] == steps and "noise" not in again  # what is not measured now stays

    text = table.correlated_noise(folder=tmp_path)
    assert "| `bisr:4` | on the device | " in text and text.count("\n| `") == 5 and "fails" in text
    text = table.correlated_steps(folder=tmp_path)
    assert "tiny, 0.00013M parameters, batch 8 by 4" in text and "| 49.2 kB |" in text and " | 1.00 | " in text
    assert "No figures are recorded" in table.correlated_steps(folder=tmp_path / "none")
    assert table.read(tmp_path) == {}  # no other table takes it for its own
