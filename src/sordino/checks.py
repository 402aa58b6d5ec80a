"""Which losses the sensitivity check has looked at, what it found, and what is still to be looked at.

The check itself is `gradients.check`. Losses are known by their identity, and across a
save by a digest of their code; a gradient that was exactly zero when the check ran
(LoRA's A) is looked at again once its partners have moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .code import digest_of, key_of
from .gradients.check import CheckReport
from .gradients.engine import Losses
from .gradients.findings import still_zero


class Checks:
    """The bookkeeping of one run."""

    def __init__(self, wanted: bool, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self.wanted, self._model, self._parameters = wanted, model, parameters
        self.report: CheckReport | None = None
        self._checked: set[Any] = set()  # every `losses` that was checked, and
        self.code: set[str] = set()  # digests of their code, those of a loaded run included
        self._unchecked: set[Any] = set()  # those released without
        self.unchecked_before = False  # whether a loaded run had any
        self.zero_first: set[str] = set()
        self.zero_snapshot: dict[str, Tensor] | None = None

    def known(self, losses: Losses) -> bool:
        """Whether these losses, or in a loaded run losses of the same code, were checked."""
        if key_of(losses) in self._checked:
            return True
        if self.code and digest_of(losses, self._model) in self.code:
            self._checked.add(key_of(losses))
            return True
        return False

    def met(self, losses: Losses) -> bool:
        """Whether these losses made a release before they could be checked."""
        return key_of(losses) in self._unchecked

    def passed(self, losses: Losses, report: CheckReport) -> None:
        self._checked.add(key_of(losses))
        self._unchecked.discard(key_of(losses))
        digest = digest_of(losses, self._model)
        if digest is not None:
            self.code.add(digest)
        if self.report is not None:
            self.report.numbers.update(report.numbers)
            self.report.complete &= report.complete
            return
        self.report = report
        if report.zero:
            self.zero_first = set(report.zero)
            self.zero_snapshot = {name: p.detach().clone() for name, p in self._parameters.items()}

    def released(self, losses: Losses) -> None:
        """A sum of these losses' gradients leaves, checked or not."""
        if key_of(losses) not in self._checked:
            self._unchecked.add(key_of(losses))

    @property
    def unchecked(self) -> bool:
        """Whether anything was released by losses that no check has looked at."""
        return bool(self._unchecked) or self.unchecked_before

    # -- gradients that were exactly zero --------------------------------------------------

    def moved(self) -> bool:
        """Whether any parameter moved since a gradient of exactly zero was met."""
        if not self.zero_first or self.zero_snapshot is None:
            return False
        return any(not torch.equal(p, self.zero_snapshot[name]) for name, p in self._parameters.items())

    def look_again(self, count: int) -> None:
        """After a batch of `count` with moved parameters: what was zero must not be so any more."""
        if not count:
            return
        if self.zero_first and len(self.zero_first) < len(self._parameters):
            raise still_zero(sorted(self.zero_first))
        self.zero_first, self.zero_snapshot = set(), None

    # -- what is said and saved ------------------------------------------------------------

    def remarks(self, released: int) -> list[str]:
        """For the guarantee."""
        if not self.wanted:
            return ["the sensitivity check was switched off"]
        if self.report is None:
            nothing = "the sensitivity check has not run: no batch so far had two examples to compare"
            return [nothing] if released else []
        whole = "" if self.report.complete else ", in part: the model draws random numbers of its own"
        found = [f"the sensitivity check passed on the first batch{whole}"]
        if self.unchecked:
            found.append("not for all losses: some met no batch of two examples to compare")
        return found

    def state_dict(self) -> dict[str, Any] | None:
        if self.report is None:
            return None
        return {
            "complete": self.report.complete,
            "zero": sorted(self.zero_first),
            "losses": sorted(self.code),
            "unchecked": self.unchecked,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, snapshot: dict[str, Tensor] | None) -> None:
        """What was checked is not checked again after a resume, so that a resumed run does what the first did."""
        if state is not None:
            self.code, self.unchecked_before = set(state["losses"]), state["unchecked"]
            self.report = CheckReport(True, complete=state["complete"])
            self.zero_first = set(state["zero"])
            self.zero_snapshot = snapshot
