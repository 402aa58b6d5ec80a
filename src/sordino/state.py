"""A run on disk: whole generations, the key and the journal.

    folder/
      key            the secret, mode 0600; erased when the run is complete
      journal        what was about to be released, mode 0600
      current        the name of the last whole generation
      step-00000123-1/
        tensors.safetensors
        state.json   everything else, with the digest of the tensors and of the trainable parameters

A generation is written under another name, synced, and only then named in
`current`, so a crash in the middle leaves the one before. It holds model,
optimizer, further objects, torch's random states, the ledger (steps, σ, clip
norm, sampler), and where the noise stands. It never holds the key.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import StateError
from .noise import KeyLock, Keys

if TYPE_CHECKING:
    from .private import Private

FORMAT = 1
KEPT = 2  # generations


class Folder:
    """A run's folder, held by this process: its key is locked until `close`."""

    def __init__(self, path: Path, lock: KeyLock | None) -> None:
        self.path, self.lock = path, lock

    def check(self) -> None:
        """Before every step: a run whose key is gone cannot be resumed, so it says so now."""
        if self.lock is not None and not (self.path / "key").exists():
            raise StateError(
                f"the key file {self.path / 'key'} is gone; nothing was released: restore it, or start a new run"
            )

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


# -- values ------------------------------------------------------------------------------------


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """A nested state as JSON, its tensors moved to `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().to("cpu").contiguous().clone()
        return {"tensor": path, "device": str(value.device)}
    if isinstance(value, Mapping):
        items = [
            [pack(k, tensors, f"{path}.k{i}"), pack(v, tensors, f"{path}.{i}")]
            for i, (k, v) in enumerate(value.items())
        ]
        return {"map": items}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()} if math.isfinite(value) else {"float": str(value)}
    raise StateError(
        f"cannot save a {type(value).__name__} at {path}; a state_dict may hold tensors, numbers, strings, None, lists, "
        "tuples and dicts"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = ((k, v) for k, v in value.items() if k != "device")
    if kind == "tensor":
        return tensors[inner].to(value.get("device", "cpu") if torch.cuda.is_available() else "cpu")
    if kind == "map":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    if kind == "float":
        return float.fromhex(inner) if "0x" in inner else float(inner)
    out = [unpack(v, tensors) for v in inner]
    return out if kind == "list" else tuple(out)


def digest(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of the trainable parameters' names, shapes and bits."""
    found = hashlib.sha256()
    for name, p in parameters.items():
        found.update(f"{name} {tuple(p.shape)} {p.dtype}\n".encode())
        found.update(p.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def configuration(private: Private) -> dict[str, Any]:
    """What a resumed run must share with the saved one."""
    p, s = private.plan, private.plan.schedule
    return {
        "batch_size": s.batch_size,
        "epochs": s.epochs,
        "examples": s.examples,
        "dataset size": len(private.source),
        "noise": p.strategy.name,
        "sampling": p.sampling.name,
        "noise_multiplier": p.noise_multiplier.hex(),
        "epsilon": p.budget.epsilon.hex(),
        "delta": p.budget.delta.hex(),
        "accountant": p.accountant,
        "clip_norm": float(private.clipping.bound).hex(),
        "clipping": private.clipping.style,
        "geometry": private.geometry.describe(),
        "denoising": json.dumps(private.denoiser.options(), sort_keys=True),
        "augmentations": private.source.augmentations,
        "sensitivity check": private.check_wanted,
        "trainable parameters": [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in private.parameters.items()],
    }


# -- save --------------------------------------------------------------------------------------


def save(private: Private, folder: Path, objects: Mapping[str, Any]) -> Path:
    """Write one generation; nothing is lost if this fails half-way."""
    from safetensors.torch import save_file

    for name, thing in objects.items():
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise StateError(
                f"{name}={type(thing).__name__} has no state_dict and load_state_dict, so it cannot be saved"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(private, folder)
        tensors: dict[str, Tensor] = {}
        content = pack(_content(private, objects), tensors, "state")
        name = _free_name(folder, private.step)
        temporary = folder / f".{name}"
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        save_file(tensors, temporary / "tensors.safetensors")
        _sync(temporary / "tensors.safetensors")
        whole = {
            "format": FORMAT,
            "step": private.step,
            "configuration": configuration(private),
            "tensors_sha256": _file_digest(temporary / "tensors.safetensors"),
            "parameters_sha256": digest(private.parameters),
            "content": content,
        }
        _write(temporary / "state.json", json.dumps(whole))
        _sync(temporary)
        os.rename(temporary, folder / name)
        _sync(folder)
        _write(folder / ".current", name)
        os.replace(folder / ".current", folder / "current")
        _sync(folder)
    except OSError as error:
        raise StateError(
            f"cannot save to {folder}: {error.strerror or error}; the last whole save is untouched, free some space or "
            "choose another folder"
        ) from None
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise StateError(f"cannot save to {folder}: {error}; the last whole save is untouched") from None
        raise
    _forget_old(folder, name)
    if private.step == private.steps:
        _finish(private, folder)
    return folder / name


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
        "geometry": private.geometry.state_dict(),
        "engine": private.engine.state_dict(),
        "step": private.step,
        "released": max(private.step, private.journal.steps),
        "physical_batch_size": private.physical_batch_size,
        "check": None
        if private.check_report is None
        else {"complete": private.check_report.complete, "zero": sorted(private.zero_first)},
        "zero_snapshot": private.zero_snapshot,
        "seeded": private.keys.seeded,
        "remarks": list(private.remarks),
    }


def _take(private: Private, folder: Path) -> None:
    """On the first save: the key gets its file and its lock, the journal its file."""
    if private.folder is not None:
        if private.folder.path.resolve() != folder.resolve():
            raise StateError(
                f"this run lives in {private.folder.path}; saving it to {folder} too would put one key in two places"
            )
        return
    if (folder / "key").exists() or (folder / "current").exists():
        raise StateError(f"{folder} holds another run; choose an empty folder, or load it to go on with it")
    private.keys.save(folder / "key")
    private.folder = Folder(folder, Keys.lock(folder / "key"))
    private.journal.open(folder / "journal")


def _finish(private: Private, folder: Path) -> None:
    """The run is complete and saved: nobody may remove its noise any more."""
    private.journal.close()
    private.folder.close()
    Keys.erase(folder / "key")
    (folder / "journal").unlink(missing_ok=True)
    private.folder = Folder(folder, None)
    private.keys.destroy()


# -- load --------------------------------------------------------------------------------------


def load(private: Private, folder: Path, objects: Mapping[str, Any]) -> None:
    """Take up the last whole generation. Nothing of `private` changes if it is refused."""
    if private.step or private.folder is not None:
        raise StateError("load into a fresh run: this one has already made steps or lives in a folder")
    whole, tensors = _read(folder)
    _same_configuration(whole["configuration"], configuration(private))
    content = unpack(whole["content"], tensors)
    missing = sorted(set(content["objects"]) ^ set(objects))
    if missing:
        verb = "was saved with" if missing[0] in content["objects"] else "was saved without"
        raise StateError(f"the run {verb} {missing[0]!r}; pass the same objects to save and load")
    finished = content["step"] == private.steps
    lock = None
    if not finished:
        keys = Keys.load(folder / "key")
        lock = Keys.lock(folder / "key")
        try:
            _adopt_key(private, keys, content, folder)
        except BaseException:
            lock.release()
            raise
    private.folder = Folder(folder, lock)
    private.released_before = content["released"]
    private.model.load_state_dict(content["model"])
    private.optimizer.load_state_dict(content["optimizer"])
    for name, thing in objects.items():
        thing.load_state_dict(content["objects"][name])
    private.geometry.load_state_dict(content["geometry"])
    private.engine.load_state_dict(content["engine"])
    private.step = content["step"]
    private.physical_batch_size = content["physical_batch_size"]
    private.remarks = list(content["remarks"])
    private.restore_check(content["check"], content["zero_snapshot"])
    torch.set_rng_state(content["rng"]["cpu"].cpu())
    if "cuda" in content["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(content["rng"]["cuda"].cpu(), private.engine.recorder.device)
    if digest(private.parameters) != whole["parameters_sha256"]:
        raise StateError(
            f"the parameters loaded from {folder} are not those that were saved; the checkpoint is damaged"
        )


def _adopt_key(private: Private, keys: Keys, content: Mapping[str, Any], folder: Path) -> None:
    if keys.seeded != content["seeded"]:
        raise StateError(f"{folder / 'key'} is not the key of this run (one is seeded, the other is not)")
    private.adopt(keys)
    private.noise.load_state_dict(content["noise"])
    journal = folder / "journal"
    if not journal.exists():
        raise StateError(
            f"the journal {journal} is gone; without it a step could be released twice under one noise: restore it, or "
            "start a new run"
        )
    private.journal.open(journal)
    saved, known = private.noise.first_steps, private.journal.first_steps
    if known[: len(saved)] != saved:
        raise StateError(f"the journal in {folder} belongs to another run; restore the right one, or start a new run")
    private.noise.first_steps = list(known)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import safe_open

    current = folder / "current"
    try:
        name = current.read_text().strip()
        whole = json.loads((folder / name / "state.json").read_text())
    except FileNotFoundError as error:
        raise StateError(f"no saved run in {folder} ({Path(error.filename).name} is missing)") from None
    except (OSError, ValueError) as error:
        raise StateError(
            f"the checkpoint in {folder} is damaged ({type(error).__name__}); restore it from a copy"
        ) from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise StateError(f"{folder / name / 'state.json'} is not a checkpoint of this version of sordino")
    path = folder / name / "tensors.safetensors"
    try:
        if _file_digest(path) != whole["tensors_sha256"]:
            raise StateError(f"{path} is damaged (its digest is not the one that was saved); restore it from a copy")
        with safe_open(path, "pt") as file:
            return whole, {key: file.get_tensor(key) for key in file.keys()}
    except FileNotFoundError:
        raise StateError(f"{path} is missing; restore it from a copy") from None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror or error}") from None


def _same_configuration(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**saved, **now}:
        if saved.get(key) != now.get(key):
            old, new = (_shown(x.get(key)) for x in (saved, now))
            raise StateError(f"{key} was {old} when the run was saved and is {new} now; resume with what was saved")


def _shown(value: Any) -> str:
    if isinstance(value, str) and "0x" in value:
        return f"{float.fromhex(value):.8g}"
    if isinstance(value, list):
        return f"{len(value)} tensors ({value[0] if value else 'none'}, …)"
    return str(value)


# -- files -------------------------------------------------------------------------------------


def _free_name(folder: Path, step: int) -> str:
    count = 1
    while (folder / f"step-{step:08d}-{count}").exists():
        count += 1
    return f"step-{step:08d}-{count}"


def _forget_old(folder: Path, newest: str) -> None:
    """Keep the newest generations, by time; clear what a crash left."""
    whole = sorted((p for p in folder.glob("step-*") if p.is_dir()), key=lambda p: (p.stat().st_mtime_ns, p.name))
    for old in [p for p in whole if p.name != newest][: -(KEPT - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    for half in folder.glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(
            file.read()
        ).hexdigest()  # fmt: skip
