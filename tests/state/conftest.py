"""The server that runs and kills trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sordino


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Server:
    """Runs functions of trainer.py, each in a process of its own that is forked once torch is imported."""

    def __init__(self) -> None:
        trainer = Path(__file__).with_name("trainer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(trainer), str(Path(sordino.__file__).parents[1]), str(trainer.parents[2])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, function: str, kill_after: float | None = None, **arguments: Any) -> dict[str, Any]:
        """What the function returned, with `killed`: whether it ended by SIGKILL, and `seconds`."""
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        request = {"function": function, "kill_after": kill_after, "arguments": arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self.process.communicate("", timeout=20)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()
