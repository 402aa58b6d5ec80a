"""Correlated noise: row t of C⁻¹Z added to sums, its past drawn again from the keystream or kept.

Z has independent standard normal rows; row j is drawn under the sub-key of the
*generation* that covers it. A step that has to be redone differently, with nothing
of the first attempt released, takes a new generation from that row on; rows before
it are still replayed under the old key, so (C⁻¹Z)_t keeps its law.

Where the past lives (`storage`) changes no bit, and no kept vector is ever saved:
what is missing is made anew from the key.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from torch import Tensor

from ..budget import SordinoWarning
from ..errors import SordinoError, StateError
from .chunks import Part
from .cipher import STEPS, check_step
from .kept import Kept, layout
from .keys import PURPOSES, Keys
from .memory import Outputs, Rows, Step, Work, generation
from .progress import Bar
from .storage import Past, Storage, check_storage, choose, size
from .stream import add_many_normals_, check_names, flattened


class RowSource(Past, Protocol):
    """What is needed of a strategy (strategies/ has them)."""

    @property
    def steps(self) -> int: ...

    def terms(self, step: int) -> list[tuple[int, float]]:
        """Row `step` of C⁻¹ as (row of Z, coefficient)."""
        ...

    def recurrence(self, step: int) -> Step:
        """The same from kept vectors, where such a row is long."""
        ...


class CorrelatedNoise:
    """Adds ``scale * (C⁻¹Z)_step`` to sums, by name.

    `first_steps[g]` is the first row that generation g covers: row j belongs to the
    *latest* generation g with ``first_steps[g] <= j``.
    """

    def __init__(self, keys: Keys, strategy: RowSource, purpose: str = "noise", storage: str = "auto") -> None:
        if not PURPOSES.get(purpose, False):
            raise SordinoError(f"purpose={purpose!r} is not one for noise; use 'noise' or another that may be re-keyed")
        if not 0 < strategy.steps <= STEPS:
            raise SordinoError(f"steps={strategy.steps} must be from 1 to {STEPS}")
        self._keys, self._strategy, self._purpose = keys, strategy, purpose
        self._wanted = check_storage(storage, strategy)
        self._checked: frozenset[str] = frozenset()
        self._process = os.getpid()
        self._kept: Kept | None = None
        self._memory: Rows | Outputs | None = None
        self.storage: Storage | None = None  # once it is known what the sums are
        self.first_steps: list[int] = [0]
        _alive.add(self)

    def generation(self, row: int) -> int:
        """Which generation of the key covers row `row` of Z."""
        return generation(self.first_steps, row)

    def rekey(self, step: int) -> None:
        """Rows from `step` on get a fresh key. Only sound if nothing computed from their first attempt was released."""
        check_step(step)
        if step >= self._strategy.steps:
            raise SordinoError(f"step={step} is past the last of {self._strategy.steps} steps; nothing to draw anew")
        self.first_steps.append(int(step))

    def prepare(self, tensors: Mapping[str, Tensor]) -> Storage:
        """Decide where the past is to live, for sums of the shapes and the device of `tensors`."""
        self.storage = choose(self._wanted, self._strategy, tensors)
        return self.storage

    def add_(
        self, sums: Mapping[str, Tensor], step: int, scale: float, offsets: Mapping[str, int] | None = None
    ) -> None:
        """``sums[name] += scale * (C⁻¹Z)_step[name]`` for every name, in place, without a temporary of their size.

        A sum may be a shard: `offsets` says with which element of its tensor it begins. If this raises, the sums may
        be half done; the same step can be asked for again.
        """
        self._check(step, scale)
        if self._checked != sums.keys():
            check_names(sums)
            self._checked = frozenset(sums)
        if scale == 0:
            return
        if self.storage is None:
            self.prepare(sums)
        assert self.storage is not None
        if self.storage.vectors:
            self._carry_out(sums, step, scale, offsets)
            return
        subkey = self._subkeys()
        terms = [(subkey(self.generation(row)), row, c * scale) for row, c in self._terms(step)]
        add_many_normals_(sums, terms, offsets)

    def catch_up(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Make what the noise of `step` needs of the past, for sums like `tensors`: after a load, in one go."""
        self._check(step, 0.0)
        if (self.storage or self.prepare(tensors)).vectors:
            self._carry_out(tensors, step, None, None)

    # -- kept vectors --------------------------------------------------------------------------------------------------

    def _carry_out(
        self, tensors: Mapping[str, Tensor], step: int, scale: float | None, offsets: Mapping[str, int] | None
    ) -> None:
        if os.getpid() != self._process:
            raise StateError("kept noise stays in the process that made it; call make_private in the one that trains")
        if len({t.device for t in tensors.values()}) > 1:
            raise SordinoError("kept noise is for sums on one device; use noise_storage='regenerate', or one device")
        kept = self._room(layout(tensors, offsets))
        if self._memory is None:
            name, stored = self._strategy.name, self._strategy.vectors_stored
            vectors = len(kept.vectors)
            self._memory = Outputs(name, self._strategy.recurrence) if stored else Rows(name, self._terms, vectors)
        work = self._memory.work(step, self.first_steps, self._subkeys(), scale)
        self._memory.begin(work)  # from here on, until it is done, what it changes is not to be relied on
        if scale is None:
            self._run(kept, work, None)
        else:
            with flattened(tensors, offsets) as flat:
                self._run(kept, work, flat)
        self._memory.done(work)

    def _run(self, kept: Kept, work: Work, flat: Mapping[str, Tensor] | None) -> None:
        if len(work.moves) < 3:
            kept.run(work.moves, flat, work.anew, None)
            return
        with Bar("replaying the noise so far", len(work.moves) * kept.tiles) as bar:
            kept.run(work.moves, flat, work.anew, bar.tick)

    def _room(self, parts: tuple[Part, ...]) -> Kept:
        """The kept vectors for these tensors; they are given up where the tensors are others than before."""
        assert self.storage is not None
        if self._kept is not None and self._kept.parts == parts:
            return self._kept
        self.wipe()
        try:
            self._kept = Kept(parts, self.storage)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not self._leave_the_device(error):
                raise
            self._kept = Kept(parts, self.storage)
        return self._kept

    def _leave_the_device(self, error: RuntimeError) -> bool:
        storage = self.storage
        assert storage is not None
        if storage.device.type != "cuda" or "out of memory" not in str(error):
            return False
        need = f"{storage.vectors} past vectors of the noise need {size(storage.bytes)}"
        if self._wanted != "auto" or storage.kind == "host":
            other = "host" if storage.kind == "device" else "device"
            raise SordinoError(f"{need}, more than the {storage.kind} has left; use noise_storage={other!r}") from None
        warnings.warn(f"{need}, more than the device has left; they are kept on the host", SordinoWarning, stacklevel=6)
        self.storage = Storage("host", storage.vectors, storage.numbers, storage.device, storage.redrawn)
        return True

    def _terms(self, step: int) -> list[tuple[int, float]]:
        """Row `step` of C⁻¹, the newest first: products are added up in this order."""
        return sorted(((row, c) for row, c in self._strategy.terms(step) if c != 0.0), reverse=True)

    def _subkeys(self) -> Any:
        return functools.lru_cache(maxsize=None)(functools.partial(self._keys.subkey, self._purpose))

    def _check(self, step: int, scale: float) -> None:
        check_step(step)
        if step >= self._strategy.steps:
            raise StateError(
                f"step={step}: the noise was planned for {self._strategy.steps} steps (0 to "
                f"{self._strategy.steps - 1}); plan a longer run"
            )
        if isinstance(scale, bool) or not math.isfinite(scale) or scale < 0:
            raise SordinoError(f"scale={scale!r} must be a finite number from 0 on: clip norm times noise multiplier")

    def wipe(self) -> None:
        """Overwrite the kept vectors and let go of them; the next step would make them anew from the key."""
        kept, self._kept = self._kept, None
        if self._memory is not None:
            self._memory.forget()
        if kept is not None:
            kept.wipe()

    # -- what is saved -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: no secrets, only which rows go with which generation."""
        return {
            "purpose": self._purpose,
            "strategy": self._strategy.name,
            "steps": self._strategy.steps,
            "first_steps": list(self.first_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for field in ("purpose", "strategy", "steps"):
            if state.get(field) != mine[field]:
                raise StateError(
                    f"the saved noise has {field}={state.get(field)!r}, this run {mine[field]!r}; "
                    "resume with the configuration that was saved"
                )
        first = state.get("first_steps")
        whole = isinstance(first, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in first)
        if not whole or not first or first[0] != 0 or not all(0 <= s < mine["steps"] for s in first):
            raise StateError(f"the saved noise has first_steps={first!r}; the checkpoint is damaged, use an older one")
        self.first_steps = list(first)

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("noise is not pickled or copied: two of one key would hide two sums; make it from the key")

    __copy__ = __deepcopy__ = __reduce_ex__


_alive: weakref.WeakSet[CorrelatedNoise] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child (a loader's worker, say): what is kept is the parent's."""
    for noise in list(_alive):
        kept, noise._kept = noise._kept, None
        if kept is not None:
            kept.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
