"""The folder of one run.

    config.toml         what was asked, all of it
    plan.json           the noise it needs and what that costs
    spectrum.npz        what shaped the noise, if anything did
    privacy.json        the guarantee for what has been released
    metrics.jsonl       one line an epoch; only what may be published
    model.safetensors   the trained weights
    checkpoints/        to go on from, and the key
    private/            computed from private data without noise: not covered, not to be published

A line is added to metrics.jsonl after its checkpoint is whole, so that it never tells of a step that is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SordinoError, StateError
from .output import to_json

if TYPE_CHECKING:
    from torch import Tensor

_PRIVATE = """\
What lies here was computed from the private data without noise: training loss, clip fractions, batch sizes, the
numbers of the sensitivity check, accuracy on held-out private data. The guarantee does not cover it. Do not publish it,
and know that every choice made by looking at it is not covered either.
"""

# What there may be before the first checkpoint is whole.
_FIRST = {
    "config.toml",
    "plan.json",
    "metrics.jsonl",
    "spectrum.npz",
    "checkpoints",
    "private",
    ".config.toml",
    ".plan.json",
}


class RunFolder:
    """Where a run is written. Nothing is made before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def never_begun(self) -> bool:
        """Whether a run was started here that was cut short before its first save: nothing of it was released."""
        from ..noise import Keys
        from ..state import has_save

        if not (self.path / "config.toml").is_file() or has_save(self.checkpoints):
            return False
        private, metrics, key = self.path / "private", self.path / "metrics.jsonl", self.checkpoints / "key"
        if {p.name for p in self.path.iterdir()} - _FIRST or (metrics.exists() and metrics.stat().st_size):
            return False  # it did begin, and its checkpoints were removed
        if private.exists() and {p.name for p in private.iterdir()} - {"README"}:
            return False
        if key.exists():
            Keys.lock(key).release()  # refuses if a process is about its first save
        return True

    def refuse_if_used(self) -> None:
        if self.never_begun():
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            resumable = (self.path / "config.toml").exists()
            hint = "go on with it (--resume) or choose" if resumable else "choose"
            raise SordinoError(f"--out {str(self.path)!r} is not empty; {hint} another folder")

    def create(self, config: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        import tomli_w

        with _written(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "private").mkdir(mode=0o700, exist_ok=True)
            (self.path / "private" / "README").write_text(_PRIVATE, encoding="utf-8")
            (self.path / "metrics.jsonl").touch()
        self._write("plan.json", to_json(plan) + "\n")
        self._write("config.toml", tomli_w.dumps(config))

    @property
    def spectrum(self) -> Path:
        return self.path / "spectrum.npz"

    def config(self) -> dict[str, Any]:
        from .config import read_toml

        path = self.path / "config.toml"
        if not path.is_file():
            raise StateError(f"--out {str(self.path)!r} holds no run to resume: config.toml is missing")
        return read_toml(path)

    def write_privacy(self, guarantee: Mapping[str, Any]) -> None:
        self._write("privacy.json", to_json(guarantee) + "\n")

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", line)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far; one that a crash cut short is dropped from the file."""
        path = self.path / "metrics.jsonl"
        lines = []
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        self._write("metrics.jsonl", "".join(to_json(line) + "\n" for line in lines))
        return lines

    def add_private(self, name: str, line: Mapping[str, Any]) -> None:
        self._append(f"private/{name}.jsonl", line)

    def write_model(self, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        from safetensors.torch import save

        path = self.path / "model.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        content = save(tensors, metadata={"sordino": to_json(about)})
        with _written(self.path):
            _replace(path, content)
        return path

    def _write(self, name: str, text: str) -> None:
        with _written(self.path):
            _replace(self.path / name, text.encode())

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with _written(self.path), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")


def _replace(path: Path, content: bytes) -> None:
    """All of it or what was there before."""
    half = path.with_name(f".{path.name}")
    with half.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SordinoError(
            f"--out {str(path)!r} cannot be written ({error.strerror or error}); the last checkpoint is untouched: "
            "free some space or choose another folder"
        ) from error
