"""Taking up a run: everything is read and checked first, then everything changes.

A step done again under an old state, an old journal or another run's key could be
released twice under one noise. So key, journal and state must be of one run (keyed
tags), the journal may not be shorter than any save knew it, and the state must lie
on the way that the noise has taken: no row before it may have been re-keyed since.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..budget import SordinoWarning
from ..errors import SordinoError, StateError
from ..journal import ForeignJournal, Journal
from ..noise import CorrelatedNoise, KeyLock, Keys
from ..plan import Plan
from .folder import (
    FORMAT,
    Damaged,
    Folder,
    Generation,
    erase_key,
    generations,
    leftovers,
    read,
    read_seal,
    sealed_with,
)
from .matrix import restored_plan
from .saving import check_objects, configuration, digest
from .values import unpack

if TYPE_CHECKING:
    from ..private import Private


def load(private: Private, folder: Path, objects: Mapping[str, Any]) -> None:
    """Take up the newest whole generation. Nothing of `private` changes if it is refused."""
    check_objects(objects)
    if private.folder is not None:
        private.folder.check()
    if private.step or private.folder is not None or private.journal.entries or private.journal.closed:
        raise StateError("load into a fresh run: this one has made steps, lives in a folder or was closed")
    with contextlib.ExitStack() as held:
        names = generations(folder)
        lock = _lock(folder, names)
        if lock is not None:
            held.callback(lock.release)
            names = generations(folder)  # the run that held the lock may have saved until now
        keys, journal = _key_and_journal(folder, names) if lock is not None else (None, None)
        if journal is not None:
            held.callback(journal.close)
        saved, damage = _newest(folder, names, keys)
        if saved is None:
            raise StateError(f"no save in {folder} can be used ({damage[0]}); restore it from a copy")
        content = _content(saved, folder, keys is not None, damage)
        before = saved.state["configuration"]
        plan = restored_plan(private, content["matrix"], _number(before), folder / saved.name)
        _same_configuration(before, configuration(private, plan))
        _check_fits(private, plan, folder / saved.name, content, objects)
        if content["complete"]:
            journal = None
        else:
            assert keys is not None and journal is not None
            _same_seed(private, keys)
            _check_lineage(saved.name, content, journal)
            journal.resume()
        for text in _warnings(private, saved, content, damage):
            warnings.warn(text, SordinoWarning, stacklevel=3)
        private.folder = Folder(folder)
        private.folder.broken = f"loading {folder} failed half-way, so this run cannot be used; call make_private again"
        try:
            _change(private, plan, saved, content, objects, keys, journal)
        except Exception as error:
            raise StateError(
                f"loading {folder} failed half-way ({_one_line(error)}), so this run cannot be used; call make_private "
                "again"
            ) from error
        if content["complete"] and leftovers(folder):  # a crash came between the last save and this
            erase_key(folder)
        held.pop_all()
        private.folder = Folder(folder, None if content["complete"] else lock, saved.name)
        private.folder.complete = content["complete"]
        if content["complete"]:
            private.destroy()
            if lock is not None:
                lock.release()


# -- reading -------------------------------------------------------------------------------------


def _lock(folder: Path, names: list[str]) -> KeyLock | None:
    if not names:
        if (folder / "starting").exists():
            raise StateError(f"the first save in {folder} was cut short, nothing was saved; start a new run there")
        what = "" if folder.is_dir() else " (it is not a folder)" if folder.exists() else " (no such folder)"
        raise StateError(f"no saved run in {folder}{what}; name the folder that was given to save")
    return Keys.lock(folder / "key") if (folder / "key").exists() else None


def _key_and_journal(folder: Path, names: list[str]) -> tuple[Keys | None, Journal | None]:
    """The key and its journal, each known to be of this run."""
    seals: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        with contextlib.suppress(Damaged):
            seals.append((name, read_seal(folder, name)))
    try:
        keys = Keys.load(folder / "key")
    except StateError:
        if _complete(folder, names):  # a crash came while the key was erased
            return None, None
        raise
    key = keys.subkey("journal")
    ours = [(name, sealed) for name, sealed in seals if sealed_with(sealed, key)]
    journal = Journal(key)
    try:
        journal.read(folder / "journal", [(*sealed["journal"], name) for name, sealed in ours])
    except ForeignJournal:
        if not ours and seals:
            raise StateError(
                f"{folder / 'key'} is not the key of this run; put the right one back, or start a new run"
            ) from None
        raise
    except StateError:
        if not (folder / "journal").exists() and _complete(folder, names):
            return keys, None  # likewise
        raise
    return keys, journal


def _complete(folder: Path, names: list[str]) -> bool:
    try:
        return read(folder, names[0]).state.get("complete") is True
    except Damaged:
        return False


def _newest(folder: Path, names: list[str], keys: Keys | None) -> tuple[Generation | None, list[str]]:
    """The newest generation that is whole and of this run; what is wrong with newer ones."""
    damage: list[str] = []
    for name in names:
        try:
            found = read(folder, name)
            if keys is not None and not sealed_with(found.seal, keys.subkey("journal")):
                raise Damaged(f"{folder / name} is of another run")
            return found, damage
        except Damaged as error:
            damage.append(str(error))
    return None, damage


def _content(saved: Generation, folder: Path, has_key: bool, damage: list[str]) -> dict[str, Any]:
    """What was saved, with its kinds checked: a run that ended has no key to vouch for it."""
    place = folder / saved.name
    state = saved.state
    if state.get("format") != FORMAT:
        raise StateError(f"{place} is not of this version of sordino; load it with the version that saved it")
    try:
        content = unpack(state["content"], saved.tensors)
        named = state["configuration"]["noise"]  # all there was to say before strategies were optimised
        content.setdefault("matrix", {"asked": named, "name": named, "definition": {}})
        complete, step, released = state["complete"], state["step"], content["released"]
        kinds: list[tuple[Any, Any]] = [(complete, bool), (step, int), (released, int), (state["configuration"], dict)]
        kinds += [(content[name], dict) for name in ("model", "optimizer", "objects", "rng", "noise", "engine")]
        matrix = content["matrix"]
        kinds += [(matrix["asked"], str), (matrix["name"], str), (matrix["definition"], dict)]
        kinds += [(array, np.ndarray) for array in matrix["definition"].values()]
        kinds += [(content["geometry"], dict), (content["remarks"], list), (state["parameters_sha256"], str)]
        kinds += [(content["rng"]["cpu"], Tensor), (content["physical_batch_size"], (int, type(None)))]
        kinds += [(content["check"], (dict, type(None))), (content["zero_snapshot"], (dict, type(None)))]
        if content["check"] is not None:
            kinds += [(content["check"]["losses"], list), (content["check"]["unchecked"], bool)]
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError):
        raise StateError(
            f"{place} is damaged: its content is not that of a saved run; restore it from a copy"
        ) from None
    if not complete and not has_key:
        after = f" ({damage[0]})" if damage else ""
        raise StateError(
            f"no key file at {folder / 'key'}; a run without its key cannot go on{after}: restore it, or start a new "
            "run"
        )
    return {**content, "complete": complete, "step": step, "parameters_sha256": state["parameters_sha256"]}


# -- checking ------------------------------------------------------------------------------------


def _same_configuration(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**now, **saved}:
        if saved.get(key) != now.get(key):
            old, new = _shown(saved.get(key), now.get(key)), _shown(now.get(key), saved.get(key))
            raise StateError(f"{key} was {old} when the run was saved and is {new} now; resume with what was saved")


def _number(configuration: Mapping[str, Any]) -> float:
    try:
        return float.fromhex(configuration["noise_multiplier"])
    except (KeyError, TypeError, ValueError):
        return -1.0  # which no run has: the comparison says so


def _shown(value: Any, other: Any) -> str:
    if isinstance(value, str) and "0x" in value:
        with contextlib.suppress(ValueError):
            return f"{float.fromhex(value):.8g}"
    if isinstance(value, list):
        rest = [line for line in value if not isinstance(other, list) or line not in other]
        return f"{len(value)} tensors" + (f" (one of them {rest[0]})" if rest else "")
    return str(value)


def _same_seed(private: Private, keys: Keys) -> None:
    if private.keys.seeded and private.keys.subkey("journal") != keys.subkey("journal"):
        raise StateError("seed is not the one that the run was saved with; resume with that one")


def _check_fits(
    private: Private, plan: Plan, place: Path, content: Mapping[str, Any], objects: Mapping[str, Any]
) -> None:
    """Everything that can be known before anything is changed."""
    missing = sorted(set(content["objects"]) ^ set(objects))
    if missing:
        verb = "was saved with" if missing[0] in content["objects"] else "was saved without"
        raise StateError(f"the run {verb} {missing[0]!r}; pass the same objects to save and load")
    now = private.model.state_dict()
    for name in [*now, *content["model"]]:
        mine, theirs = (_kind(state, name) for state in (now, content["model"]))
        if mine != theirs:
            raise StateError(
                f"the model's {name!r} was {theirs} when the run was saved and is {mine} now; build the model that was "
                "saved"
            )
    if len(content["rng"]["cpu"]) != len(torch.get_rng_state()):
        raise StateError("torch's random state had another format when the run was saved; use that version of torch")
    noise = CorrelatedNoise(Keys.from_seed(0), plan.strategy)
    noise.load_state_dict(content["noise"])
    if not 0 <= content["step"] <= private.steps or (content["step"] == private.steps) != content["complete"]:
        raise StateError(f"{place} is damaged: it was made after step {content['step']} of {private.steps}")


def _kind(state: Mapping[str, Any], name: str) -> str:
    if name not in state:
        return "absent"
    value = state[name]
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_lineage(name: str, content: Mapping[str, Any], journal: Journal) -> None:
    """Rows before the state must be replayed as they were drawn."""
    saved, known = content["noise"]["first_steps"], journal.first_steps
    if known[: len(saved)] != saved:
        raise StateError(f"the journal and {name} differ about the noise; restore the journal, or start a new run")
    redone = [first for first in known[len(saved) :] if first < content["step"]]
    if redone:
        raise StateError(
            f"{name} was left behind when step {min(redone)} was done again with fresh noise; restore a later save, or "
            "start a new run"
        )


def _warnings(private: Private, saved: Generation, content: Mapping[str, Any], damage: list[str]) -> Iterator[str]:
    if damage:
        yield f"{damage[0]}; going on from the save before, {saved.name}: if you have a copy, restore it and load again"
    before, now = content["physical_batch_size"], private.physical_batch_size
    if not private.halve and before != now:
        yield (
            f"physical_batch_size was {before} when the run was saved and is {now} now: steps that are done again will "
            "differ in rounding and take fresh noise"
        )


# -- changing ------------------------------------------------------------------------------------


def _change(
    private: Private,
    plan: Plan,
    saved: Generation,
    content: Mapping[str, Any],
    objects: Mapping[str, Any],
    keys: Keys | None,
    journal: Journal | None,
) -> None:
    private.plan = plan
    if journal is not None:
        assert keys is not None
        private.adopt(keys, journal)
    private.noise.load_state_dict(content["noise"])
    if journal is not None:
        private.noise.first_steps = list(journal.first_steps)
    private.released_before = content["released"]
    private.model.load_state_dict(content["model"])
    private.optimizer.load_state_dict(content["optimizer"])
    for name, thing in objects.items():
        thing.load_state_dict(content["objects"][name])
    private.geometry.load_state_dict(content["geometry"])
    private.engine.load_state_dict(content["engine"])
    if private.halve:
        private.physical_batch_size = content["physical_batch_size"]
    private.remarks = list(content["remarks"])
    private.checks.load_state_dict(content["check"], content["zero_snapshot"])
    if digest(private.parameters) != content["parameters_sha256"]:
        raise SordinoError("the parameters are not those that were saved")
    private._step = content["step"]
    torch.set_rng_state(content["rng"]["cpu"].cpu())
    if journal is not None and plan.noise_multiplier:
        private.noise.catch_up(content["step"], private.parameters)
    if "cuda" in content["rng"] and private.engine.recorder.device.type == "cuda":
        torch.cuda.set_rng_state(content["rng"]["cuda"].cpu(), private.engine.recorder.device)


def _one_line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0] if text else type(error).__name__
