"""Whatever is wrong with a saved run: one line that names the place and the remedy; nothing is lost or half done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.state.tiny import Run, T, make
from torch import nn

import sordino
from sordino.budget import SordinoWarning
from sordino.errors import SordinoError, StateError
from sordino.journal import seal
from sordino.noise import Keys
from sordino.state.folder import file_digest

SEED: dict[str, Any] = {"seed": None}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with saves after steps 2 and 4 that went on to step 6 and was lost."""
    return saved_in(tmp_path / "run")


def saved_in(folder: Path) -> Path:
    run = make(**SEED)
    for step in (0, 2, 4):
        run.go(step)
        run.save(folder)
    run.go(6)
    run.private.close()
    return folder


def untouched(run: Run) -> tuple[Any, ...]:
    p = run.private
    return (
        str(run.weights), str(run.optimizer.state_dict()), str(run.schedule.state_dict()), p.step, p.folder, p.keys,
        p.journal, p.noise, list(p.remarks), p.released_before, torch.get_rng_state().sum(), p.check_report,
    )  # fmt: skip


def refused(folder: Path, match: str, run: Run | None = None) -> str:
    """Loading is refused in one line, and nothing of the run was changed: it can be used as if nothing had been."""
    run = run or make(**SEED)
    before = untouched(run)
    with pytest.raises(StateError, match=match) as caught:
        run.load(folder)
    assert untouched(run) == before
    assert "\n" not in str(caught.value)
    run.go(2)
    return str(caught.value)


def goes_on(folder: Path, step: int = 4) -> Run:
    run = make(**SEED)
    run.load(folder)
    assert run.private.step == step
    return run


def newest(folder: Path) -> Path:
    return max(folder.glob("step-*"), key=lambda p: int(p.name.rpartition("-")[2]))


def flip(path: Path, place: float = 0.5) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(place * (len(raw) - 1))] ^= 1
    path.write_bytes(raw)


def edit(path: Path, change: Callable[[Any], None], key: bytes | None = None) -> None:
    """Change state.json and make the seal fit it, as far as one can without the key."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    reseal(path.parent, key)


def reseal(generation: Path, key: bytes | None) -> None:
    path = generation / "seal.json"
    sealed = json.loads(path.read_text())
    sealed["files"] = {name: file_digest(generation / name) for name in sealed["files"]}
    old = sealed.pop("key")
    sealed["key"] = old if key is None else seal(key, json.dumps(sealed))
    path.write_text(json.dumps(sealed))


# -- a damaged generation: the one before is taken, with a warning -----------------------------------


FILES = ["tensors.safetensors", "state.json", "seal.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage", ["missing", "empty", "half", "bit", "first bit", "zeros", "a folder", "another run's"]
)
def test_a_damaged_newest_save_gives_way_to_the_one_before(tmp_path: Path, saved: Path, file: str, damage: str) -> None:
    path = newest(saved) / file
    raw = path.read_bytes()
    if damage == "another run's":
        shutil.copy(newest(saved_in(tmp_path / "other")) / file, path)
    elif damage in ("missing", "a folder"):
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    elif "bit" in damage:
        flip(path, 0.5 if damage == "bit" else 0.0)
    else:
        path.write_bytes({"empty": b"", "half": raw[: len(raw) // 2], "zeros": bytes(len(raw))}[damage])
    whole = make(**SEED)
    with pytest.warns(SordinoWarning, match=r"step-00000004-3.*going on from the save before, step-00000002-2") as said:
        whole.load(saved)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert whole.private.step == 2 and whole.private.guarantee().steps_released == 6
    whole.go()
    assert whole.private.noise.first_steps == [0]  # the same sums again, the same noise
    whole.save(saved)
    assert not (saved / "key").exists()


def test_a_warning_that_is_an_error_changes_nothing(saved: Path) -> None:
    flip(newest(saved) / "state.json")
    run = make(**SEED)
    before = untouched(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SordinoWarning):
            run.load(saved)
    assert untouched(run) == before
    with pytest.warns(SordinoWarning):
        run.load(saved)


def test_another_runs_generation_is_not_taken(tmp_path: Path, saved: Path) -> None:
    other = newest(saved_in(tmp_path / "other"))
    shutil.rmtree(newest(saved))
    shutil.copytree(other, saved / "step-00000004-9")
    run = make(**SEED)
    with pytest.warns(SordinoWarning, match="step-00000004-9 is of another run; going on from .*step-00000002-2"):
        run.load(saved)


def test_all_saves_damaged(saved: Path) -> None:
    for path in saved.glob("step-*/state.json"):
        flip(path)
    refused(
        saved, r"no save in .*run can be used \(.*step-00000004-3/state.json is damaged.*\); restore it from a copy"
    )


def test_a_save_that_was_left_behind_is_refused(tmp_path: Path, saved: Path) -> None:
    """Its rows of noise were drawn anew since: going on from it would replay other noise than it was trained with."""
    kept = tmp_path / "kept"
    shutil.copytree(newest(saved), kept)
    flip(newest(saved) / "state.json")
    run = make(**SEED)
    with pytest.warns(SordinoWarning):
        run.load(saved)
    run.optimizer.param_groups[0]["lr"] *= 2
    run.go(5)
    assert run.private.noise.first_steps == [0, 3]
    run.private.close()
    shutil.rmtree(newest(saved))
    shutil.copytree(kept, saved / "step-00000004-3")
    refused(saved, "step-00000004-3 was left behind when step 3 was done again with fresh noise; restore a later save")


def test_an_older_save_put_back_is_noticed_step_by_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = make(**SEED)
    run.save(folder)
    run.go(3)
    shutil.copytree(run.save(folder), tmp_path / "older")
    run.go(6)
    run.save(folder)
    run.private.close()
    for path in folder.glob("step-*"):
        shutil.rmtree(path)
    shutil.copytree(tmp_path / "older", folder / "step-00000003-9")
    again = goes_on(folder, step=3)
    assert again.private.guarantee().steps_released == 6
    again.go(7)
    assert again.private.noise.first_steps == [0]


# -- key and journal --------------------------------------------------------------------------------


def test_the_key_file(tmp_path: Path, saved: Path) -> None:
    key = (saved / "key").read_bytes()
    os.chmod(saved / "key", 0o644)
    refused(saved, r"run/key has mode 0644: others may have read the key; if nobody did, chmod 600 .*run/key")
    (saved / "key").unlink()
    refused(saved, r"no key file at .*run/key; a run without its key cannot go on: restore it, or start a new run")
    for raw in (b"", key[:40], bytes(len(key)), b"sordino-key-1 secret 00\n"):
        (saved / "key").write_bytes(raw)
        os.chmod(saved / "key", 0o600)
        refused(saved, r"run/key is not a whole key file")
    other = saved_in(tmp_path / "other")
    (saved / "key").write_bytes((other / "key").read_bytes())
    refused(saved, r"run/key is not the key of this run; put the right one back, or start a new run")
    (saved / "journal").write_bytes((other / "journal").read_bytes())  # key and journal fit each other, not the saves
    refused(saved, r"no save in .*run can be used \(.*step-00000004-3 is of another run\)")
    assert make(**SEED).private.step == 0
    (saved / "key").write_bytes(key)
    refused(saved, r"journal is not the journal of this run")


def test_a_foreign_key_without_the_journal(tmp_path: Path, saved: Path) -> None:
    (saved / "key").write_bytes((saved_in(tmp_path / "other") / "key").read_bytes())
    (saved / "journal").unlink()
    refused(saved, "the journal .* is gone")


def test_the_journal(saved: Path) -> None:
    raw = (saved / "journal").read_bytes()
    (saved / "journal").unlink()
    refused(
        saved, r"the journal .*run/journal is gone; without it a step could be released twice under one noise: resto"
    )
    for bad, match in (
        (b"", "is empty"),
        (b"nonsense\n", "is not the journal of this run"),
        (raw.replace(b'"step": 1', b'"step": 7'), "line 3 of the journal .* is damaged"),
        (b"".join(raw.splitlines(keepends=True)[:4]), r"has 4 lines, but step-00000004-3 was saved with 5"),
        (raw[: raw.rindex(b"\n", 0, -200) + 1], "lines"),
    ):
        (saved / "journal").write_bytes(bad)
        refused(saved, match)
    (saved / "journal").write_bytes(raw)
    goes_on(saved)


def test_a_key_or_journal_that_goes_while_the_run_goes_on(saved: Path) -> None:
    run = goes_on(saved)
    (saved / "key").rename(saved / "moved")
    with pytest.raises(StateError, match=r"the key file .*run/key is gone; nothing was released: restore it"):
        run.go(5)
    (saved / "moved").rename(saved / "key")
    run.go(5)
    shutil.copy(saved / "journal", saved / "copy")
    (saved / "copy").replace(saved / "journal")
    with pytest.raises(StateError, match=r"the journal .* was removed or replaced; nothing was released"):
        run.go(6)
    assert run.private.step == 5


# -- what is not a run, or not this one --------------------------------------------------------------


def test_folders_that_hold_no_run(tmp_path: Path, saved: Path) -> None:
    refused(
        tmp_path / "nowhere", r"no saved run in .*nowhere \(no such folder\); name the folder that was given to save"
    )
    refused(saved / "journal", r"no saved run in .*journal \(it is not a folder\)")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"no saved run in .*empty; name the folder")
    refused(newest(saved), r"no saved run in .*step-00000004-3; name the folder")
    run = make(**SEED)
    with pytest.raises(StateError, match="cannot save to .*journal"):
        run.save(saved / "journal")
    with pytest.raises(StateError, match="holds another run; choose an empty folder"):
        run.save(saved)
    run.go(1)
    run.save(tmp_path / "empty")


class Dropout(nn.Module):
    pass


def other_model(width: int = 9, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2, bias=bias))


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("clip norm", {"clip_norm": 2.0}, "clip_norm was 1 when the run was saved and is 2 now; resume with"),
    ("batch size", {"batch_size": 32}, "batch_size was 16 .* is 32 now"),
    ("epochs", {"epochs": 4}, "epochs was 3 .* is 4 now"),
    ("examples", {"examples": 60}, "examples was 64 .* is 60 now"),
    ("noise", {"noise": "lambda-cgd:0.8"}, "noise was lambda-cgd:0.9 .* is lambda-cgd:0.8 now"),
    ("sampling", {"noise": "identity", "sampling": "poisson"}, "noise was lambda-cgd:0.9 .* is identity now"),
    ("multiplier", {"noise_multiplier": 11.0}, "noise_multiplier was 10 .* is 11 now"),
    ("delta", {"delta": 1e-6}, "delta was 1e-05 .* is 1e-06 now"),
    ("budget", {"noise_multiplier": None, "delta": None, "budget": sordino.Budget(8, 1e-5)}, "epsilon was inf"),
    ("clipping", {"clipping": "automatic"}, "clipping was .*flat.* is .*automatic.* now"),
    ("check", {"check": False}, "check was True .* is False now"),
    ("seed", {"seed": 4}, "seed was None .* is given now"),
    ("optimizer", {"optimizer": torch.optim.SGD}, "optimizer was Adam .* is SGD"),
    ("width", {"model": other_model()}, r"trainable parameters was 4 tensors \(one of them 0.weight \(8, 4\).*9, 4\)"),
    ("bias", {"model": other_model(8, bias=False)}, r"optimizer was Adam of \[4\] .* is Adam of \[3\] now"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "match"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_changed_configuration_is_named(saved: Path, options: dict[str, Any], match: str) -> None:
    refused(saved, match, make(**{**SEED, **options}))
    goes_on(saved)


def test_another_seed_is_named(tmp_path: Path) -> None:
    run = make(seed=1)
    run.save(tmp_path)
    run.private.close()
    refused(tmp_path, "seed is not the one that the run was saved with", make(seed=2))
    refused(tmp_path, "seed was given .* is None now", make(seed=None))
    make(seed=1).load(tmp_path)


def test_a_model_with_other_buffers_is_named(tmp_path: Path) -> None:
    def build(momentum: bool) -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, track_running_stats=True).eval()
        if momentum:
            norm.register_buffer("extra", torch.zeros(2))
        return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))

    run = make(model=build(False))
    run.save(tmp_path)
    run.private.close()
    refused(tmp_path, r"the model's '1.extra' was absent when the run was saved and is \(2,\) torch.float32 now",
            make(model=build(True)))  # fmt: skip


def test_another_physical_batch_size_is_the_users_to_choose(tmp_path: Path) -> None:
    """It is no part of the mechanism; redone steps may differ in rounding, and are then noticed."""
    run = make(physical_batch_size=8)
    run.save(tmp_path)
    run.go(2)
    run.private.close()
    again = make(physical_batch_size=4)
    with pytest.warns(SordinoWarning, match="physical_batch_size was 8 when the run was saved and is 4 now"):
        again.load(tmp_path)
    again.go()
    assert again.private.physical_batch_size == 4


def test_load_into_a_run_that_has_begun(saved: Path) -> None:
    run = make(**SEED)
    run.go(1)
    with pytest.raises(StateError, match="load into a fresh run"):
        run.load(saved)
    run.go(2)
    other = goes_on(saved)
    with pytest.raises(StateError, match="load into a fresh run"):
        other.load(saved)
    other.go(5)


# -- content that was written by somebody else --------------------------------------------------------


BAD: dict[str, Callable[[Any], None]] = {
    "format": lambda s: s.update(format=99),
    "no content": lambda s: s.pop("content"),
    "content is a list": lambda s: s.update(content=[]),
    "step is a word": lambda s: s.update(step="four"),
    "step is too large": lambda s: s.update(step=99),
    "complete is a number": lambda s: s.update(complete=1),
    "configuration is None": lambda s: s.update(configuration=None),
    "an unknown kind": lambda s: s.update(content={"pickle": "x"}),
    "two kinds": lambda s: s.update(content={"map": [], "list": []}),
    "a tensor that is not there": lambda s: model(s, {"tensor": "gone", "device": "cpu"}),
    "a device that is none": lambda s: model(s, {"tensor": "state.model.0.weight", "device": "?"}),
    "model is a number": lambda s: model(s, 3),
    "a dtype that is none": lambda s: model(s, {"dtype": "load"}),
    "deep": lambda s: s.update(content=deep()),
    "other digest": lambda s: s.update(parameters_sha256="0" * 64),
}  # fmt: skip


def model(state: Any, value: Any) -> None:
    assert state["content"]["map"][0][0] == "model"
    state["content"]["map"][0][1] = value


def deep() -> Any:
    found: Any = 1
    for _ in range(400):
        found = {"list": [found]}
    return found


@pytest.mark.parametrize("name", BAD)
def test_wrong_content_under_a_good_digest(saved: Path, name: str) -> None:
    """Without the key the seal cannot be made to fit, so the one before is taken; with it, or in a run that ended, it
    is refused by its content."""
    path = newest(saved) / "state.json"
    edit(path, BAD[name])
    with pytest.warns(SordinoWarning, match="is of another run; going on from"):
        goes_on(saved, 2).private.close()
    edit(path, lambda s: None, Keys.load(saved / "key").subkey("journal"))
    if name == "other digest":
        run = make(**SEED)
        with pytest.raises(StateError, match=r"failed half-way .*the parameters are not those that were saved"):
            run.load(saved)
        unusable(run, saved)
    else:
        refused(saved, "is damaged|not of this version|No such|saved after step 99")


@pytest.mark.parametrize("name", [n for n in BAD if "complete" not in n])
def test_wrong_content_in_a_run_that_ended(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ended"
    run = make(**SEED)
    run.go()
    run.save(folder)
    edit(newest(folder) / "state.json", BAD[name])
    again = make(**SEED)
    with pytest.raises(StateError) as caught:
        again.load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_garbled_safetensors_header(tmp_path: Path) -> None:
    folder = tmp_path / "ended"
    run = make(**SEED)
    run.go()
    run.save(folder)
    for raw in (b"", b"\xff" * 64, (40).to_bytes(8, "little") + b"{" * 40):
        (newest(folder) / "tensors.safetensors").write_bytes(raw)
        reseal(newest(folder), None)
        with pytest.raises(StateError, match=r"no save in .*tensors.safetensors cannot be read"):
            make(**SEED).load(folder)


def unusable(run: Run, folder: Path) -> None:
    for attempt in (lambda: run.go(T), lambda: run.save(folder), lambda: run.load(folder)):
        with pytest.raises(StateError, match="failed half-way, so this run cannot be used; call make_private again"):
            attempt()


def test_a_load_that_fails_half_way_leaves_nothing_usable(saved: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("not today\nnor tomorrow")

    folder = saved.parent / "with"
    run = make(**SEED)
    run.private.save(folder, schedule=run.schedule, x=Refuses())
    run.go(1)
    run.private.close()
    run = make(**SEED)
    with pytest.raises(StateError, match=r"failed half-way \(not today\), so this run cannot be used"):
        run.private.load(folder, schedule=run.schedule, x=Refuses())
    unusable(run, folder)
    other = make(**SEED)  # the key was let go
    Refuses.load_state_dict = lambda self, state: None  # type: ignore[method-assign]
    other.private.load(folder, schedule=other.schedule, x=Refuses())
    other.go(2)


# -- a disk that fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 30, 1000, 6000])
@pytest.mark.parametrize("which", ["first save", "save", "journal"])
def test_a_full_disk(server: Any, tmp_path: Path, room: int, which: str) -> None:
    """One line; the run goes on, and what was saved before is still there."""
    if which == "journal" and room > 30:
        return
    whole = make()
    whole.go()
    found = server("full_disk", folder=str(tmp_path / "run"), room=room, which=which)
    (message,) = found["messages"]
    assert "\n" not in message and str(tmp_path / "run") in message and "make room" in message
    assert found["step"] == 3
    kept = {"first save": [], "save": ["journal", "key", "step-00000000-1"]}
    assert found["left"] == kept.get(which, kept["save"])
    assert found["digest"] == sordino.state.digest(whole.private.parameters)  # type: ignore[attr-defined]
    assert not any("redone" in remark for remark in found["remarks"])


def test_a_read_only_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = goes_on(saved)
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **named)

    def mkdir(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = sorted(saved.iterdir())
    with monkeypatch.context() as m:
        m.setattr(os, "open", read_only)
        m.setattr(os, "mkdir", mkdir)
        with pytest.raises(
            StateError, match=r"cannot save to .*run: Read-only file system; what was saved before is un"
        ):
            run.save(saved)
        fresh = make(**SEED)
        with pytest.raises(StateError, match="cannot save to .*: Read-only file system"):
            fresh.save(saved.parent / "new")
        assert fresh.private.folder is None
        fresh.go(1)
        run.private.close()
        refused(saved, r"cannot open the key file .*run/key: Read-only file system")
    assert sorted(saved.iterdir()) == before
    goes_on(saved)


@pytest.mark.parametrize("place", ["key", "journal", "generation"])
def test_a_first_save_that_fails_leaves_a_run_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = make()
    run.go(2)
    target = {"key": "sordino.noise.keys.os.link", "journal": "sordino.journal.os.ftruncate", "generation": "os.rename"}
    with monkeypatch.context() as m:
        if place == "journal":
            m.setattr("sordino.journal.Journal.begin", _fails)
        else:
            m.setattr(target[place], _fails)
            m.setattr("os.rename", _fails)
        with pytest.raises(StateError, match="No space left"):
            run.save(tmp_path / "run")
    assert run.private.folder is None and list((tmp_path / "run").iterdir()) == []
    run.go(4)
    run.save(tmp_path / "run")
    run.private.close()
    again = make()
    again.load(tmp_path / "run")
    assert again.private.step == 4 and again.private.guarantee().steps_released == 4


def _fails(*arguments: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_errors_are_sordinos(saved: Path) -> None:
    """Whoever catches SordinoError catches these."""
    assert issubclass(StateError, SordinoError) and issubclass(SordinoError, ValueError)
