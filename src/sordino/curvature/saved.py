"""What a long computation leaves in a folder, so that it can be stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import StateError


class Saved:
    """States of stages in a folder, for one question."""

    def __init__(self, folder: str | Path | None, question: str) -> None:
        self.folder, self.question = None if folder is None else Path(folder), question

    def load(self, stage: str) -> dict[str, Any] | None:
        path = None if self.folder is None else self.folder / f"{stage}.pt"
        if path is None or not path.exists():
            return None
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # whatever a broken file makes torch raise
            raise StateError(f"{path} cannot be read ({str(error).splitlines()[0][:80]}); delete it") from None
        if state.pop("question", None) != self.question:
            raise StateError(
                f"{path} is of another model, public set or set of options; delete it, or choose another folder"
            )
        return state

    def save(self, stage: str, state: dict[str, Any]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{stage}.pt.partial"
        torch.save({**state, "question": self.question}, partial)
        partial.replace(self.folder / f"{stage}.pt")
