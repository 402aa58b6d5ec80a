"""Writing a run down: `save`, and what a resumed run must share with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import StateError
from ..noise import Keys
from ..plan import Plan
from .folder import FORMAT, Folder, erase_key, forget_old, generations, remove, sync, write, write_text
from .matrix import matrix_state
from .values import pack

if TYPE_CHECKING:
    from ..private import Private


def save(private: Private, folder: Path, objects: Mapping[str, Any]) -> Path:
    """Write one generation. If that fails, the ones before are untouched and the run can go on."""
    check_objects(objects)
    _check_usable(private, folder)
    tensors: dict[str, Tensor] = {}
    content = pack(_content(private, objects), tensors, "state")
    first = private.folder is None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            _take(private, folder)
        key = None if private.folder.complete else private.keys.subkey("journal")
        whole = {
            "format": FORMAT,
            "step": private.step,
            "complete": private.step == private.steps,
            "configuration": configuration(private),
            "parameters_sha256": digest(private.parameters),
            "content": content,
        }
        name = write(folder, private.step, json.dumps(whole), tensors, private.journal, key)
    except BaseException as error:
        if first and private.folder is not None:
            _give_back(private, folder)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise StateError(
                f"cannot save to {folder}: {reason}; what was saved before is untouched: make room or choose another "
                "folder, then save again"
            ) from None
        raise
    remove(folder / "starting")
    forget_old(folder, {name, private.folder.last or name})
    private.folder.last = name
    if private.step == private.steps and not private.folder.complete:
        finish(private, folder)
    return folder / name


def check_objects(objects: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise StateError(
                f"{name}={type(thing).__name__} has no state_dict and load_state_dict, so it cannot be saved or loaded"
            )


def _check_usable(private: Private, folder: Path) -> None:
    if private.folder is None:
        if private.step < private.steps:
            private.journal.check()
        return
    private.folder.check(private.journal)
    if private.folder.path.resolve() != folder.resolve():
        raise StateError(
            f"this run lives in {private.folder.path}; saving it to {folder} too would put one key in two places"
        )
    if not private.folder.complete:
        private.journal.check()


def _content(private: Private, objects: Mapping[str, Any]) -> dict[str, Any]:
    rng = {"cpu": torch.get_rng_state()}
    device = private.engine.recorder.device
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    return {
        "model": dict(private.model.state_dict()),
        "optimizer": private.optimizer.state_dict(),
        "objects": {name: thing.state_dict() for name, thing in objects.items()},
        "rng": rng,
        "noise": private.noise.state_dict(),
        "matrix": matrix_state(private),
        "noise_storage": private.noise_storage,  # for the record: another place gives the same noise
        "geometry": private.geometry.state_dict(),
        "engine": private.engine.state_dict(),
        "released": max(private.step, private.journal.steps, private.released_before),
        "physical_batch_size": private.physical_batch_size,
        "check": private.checks.state_dict(),
        "zero_snapshot": private.checks.zero_snapshot,
        "remarks": list(private.remarks),
    }


def configuration(private: Private, plan: Plan | None = None) -> dict[str, Any]:
    """What a resumed run must share with the saved one."""
    p, s = plan or private.plan, private.plan.schedule
    optimizer = private.optimizer
    return {
        "batch_size": s.batch_size,
        "epochs": s.epochs,
        "examples": s.examples,
        "dataset size": len(private.source),
        "noise": p.strategy.name,
        "sampling": p.sampling.name,
        "epsilon": p.budget.epsilon.hex(),
        "delta": p.budget.delta.hex(),
        "noise_multiplier": float(p.noise_multiplier).hex(),
        "accountant": p.accountant,
        "clip_norm": float(private.clipping.bound).hex(),
        "clipping": json.dumps(asdict(private.clipping), sort_keys=True),
        "geometry": private.geometry.describe(),
        "denoising": json.dumps(private.denoiser.options(), sort_keys=True),
        "augmentations": private.source.augmentations,
        "check": private.checks.wanted,
        "seed": "given" if private.keys.seeded else None,
        "optimizer": f"{type(optimizer).__name__} of {[len(group['params']) for group in optimizer.param_groups]}",
        "trainable parameters": [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in private.parameters.items()],
    }


def digest(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of the trainable parameters' names, shapes and bits."""
    found = hashlib.sha256()
    for name, p in parameters.items():
        found.update(f"{name} {tuple(p.shape)} {p.dtype}\n".encode())
        found.update(p.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- the folder is taken by the first save, and let go by the last ---------------------------------


def _take(private: Private, folder: Path) -> None:
    """The key gets its file and its lock, the journal its file."""
    _clear_for(folder)
    taken = Folder(folder)
    private.folder = taken
    write_text(folder / "starting", "a first save that is not whole yet; if this stays, the folder can be used again\n")
    sync(folder)
    if private.step == private.steps:  # the key is destroyed already, nothing is left to journal
        taken.complete = True
        return
    private.keys.save(folder / "key")
    taken.lock = Keys.lock(folder / "key")
    private.journal.begin(folder / "journal")
    sync(folder)


def _clear_for(folder: Path) -> None:
    """Refuse a folder with a run in it; clear away a first save that was cut short."""
    there = [name for name in ("key", "journal") if (folder / name).exists()]
    if generations(folder) or (there and not (folder / "starting").exists()):
        raise StateError(f"{folder} holds another run; choose an empty folder, or load it to go on with it")
    if (folder / "key").exists():
        with Keys.lock(folder / "key"):
            erase_key(folder)
    remove(folder / "journal")
    remove(folder / "starting")


def _give_back(private: Private, folder: Path) -> None:
    """The first save failed: the run goes on in memory, as before."""
    taken, private.folder = private.folder, None
    private.journal.forget_file()
    if taken.lock is not None:
        remove(folder / "journal")
        Keys.erase(folder / "key")
        taken.close()
    if not (folder / "key").exists():  # else somebody else took the folder at the same moment
        remove(folder / "starting")


def finish(private: Private, folder: Path) -> None:
    """The run is complete and saved."""
    try:
        erase_key(folder)
    finally:
        private.journal.close()
        private.folder.close()
        private.folder.complete = True
        private.destroy()
