"""What is saved comes back; what is done again differently is noticed; the end of a run."""

from __future__ import annotations

import gc
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.state.tiny import Run, T, make
from torch import Tensor, nn

from sordino.errors import SordinoError, StateError
from sordino.noise import CorrelatedNoise, Keys
from sordino.private import Private
from sordino.state import digest, has_save


def equal(a: Run, b: Run) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
    return same and str(a.optimizer.state_dict()) == str(b.optimizer.state_dict())


def halfway(folder: Path, at: int, on: int = 0, **options: Any) -> None:
    """A run saved after step `at` that went on for some steps and was then lost."""
    run = make(**options)
    run.save(folder)
    run.go(at)
    run.save(folder)
    run.go(at + on)
    run.private.close()


RUNS: dict[str, dict[str, Any]] = {
    "λCGD": {},
    "DP-SGD, Poisson": {"noise": "identity", "sampling": "poisson"},
    "balls in bins": {"noise": "identity", "sampling": "balls-in-bins"},
    "SGD with momentum": {"optimizer": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
    "several chunks": {"physical_batch_size": 5},
    "augmented": {"augment": lambda s: (s[0] + 0.1 * torch.randn(4), s[1]), "augmentations": 2},
    "clip only": {"noise_multiplier": 0.0},
    "a loader's worker": {"workers": 1},
    "shrinkage": {"denoising": "shrinkage", "noise": "identity"},
    "past rows drawn again": {"noise": "bisr:4"},
    "past rows kept": {"noise": "bisr:4", "noise_storage": "device"},
    "past outputs kept": {"noise": "bsr:4", "noise_storage": "host"},
    "an optimised matrix": {"noise": "band-mf:3"},
    "λ found": {"noise": "lambda-cgd"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("on", [0, 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str, on: int) -> None:
    options = RUNS[name]
    whole = make(**options)
    whole.go()
    random_state = torch.get_rng_state()
    halfway(tmp_path / "run", 5, on, **options)
    resumed = make(**options)
    resumed.load(tmp_path / "run")
    assert resumed.private.step == 5 and resumed.schedule.last_epoch == 5
    resumed.go()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert equal(whole, resumed) and digest(whole.private.parameters) == digest(resumed.private.parameters)
    assert resumed.private.guarantee().remarks == whole.private.guarantee().remarks


@pytest.mark.parametrize("noise", ["bisr:4", "bsr:4"])
def test_noise_may_be_kept_elsewhere_after_a_resume(tmp_path: Path, noise: str) -> None:
    places = ["host", "device", "regenerate" if noise == "bisr:4" else "auto"]
    whole = make(noise=noise)
    whole.go()
    for number, place in enumerate([*places, places[0]]):
        run = make(noise=noise, noise_storage=place)
        run.load(tmp_path) if number else run.save(tmp_path)
        run.go(3 * number + 2)
        run.save(tmp_path)
        run.private.close()
    run = make(noise=noise)
    run.load(tmp_path)
    run.go()
    assert equal(run, whole)


@pytest.mark.parametrize("noise", ["bisr:4", "bsr:4"])
def test_kept_noise_ends_with_its_key(tmp_path: Path, noise: str) -> None:
    """Overwritten, wherever the key is: at the end of a run in memory or in a folder, and when a run is closed."""

    def vectors(run: Run) -> Tensor:
        run.go(5)
        assert run.private.noise._kept is not None and run.private.noise._kept.vectors.any()
        return run.private.noise._kept.vectors

    for where in (None, tmp_path):
        run = make(noise=noise, noise_storage="device")
        if where is not None:
            run.save(where)
        kept = vectors(run)
        run.go()
        assert kept.any() == (where is not None)
        if where is not None:
            run.save(where)
        assert not kept.any() and run.private.noise._kept is None
    run = make(noise=noise, noise_storage="device")
    kept = vectors(run)
    run.private.close()
    assert not kept.any()


def test_without_noise_nothing_is_kept(tmp_path: Path) -> None:
    run = make(noise="bsr:4", noise_multiplier=0.0)
    run.save(tmp_path)
    run.go(5)
    run.save(tmp_path)
    assert run.private.noise._kept is None
    run.private.close()
    run = make(noise="bsr:4", noise_multiplier=0.0)
    run.load(tmp_path)
    assert run.private.noise._kept is None
    assert "past noise" not in run.private.describe()


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ["lambda-cgd:0.9", "bisr:4", "bsr:4"])
@pytest.mark.parametrize("on", [0, 2])
def test_a_resumed_run_on_a_gpu(tmp_path: Path, on: int, noise: str) -> None:
    storage = iter(("device", "host", "device"))

    def options() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).cuda()
        return {"model": model, "noise": noise, "noise_storage": next(storage)}

    whole = make(**options())
    whole.go()
    halfway(tmp_path / "run", 5, on, **options())
    resumed = make(**options())
    resumed.load(tmp_path / "run")
    resumed.go()
    assert equal(whole, resumed) and resumed.private.noise.first_steps == [0]
    again = make()  # on the CPU the redone steps come out differently, and that is noticed
    halfway(tmp_path / "moved", 5, 2, **options())
    again.load(tmp_path / "moved")
    again.go()
    assert again.private.noise.first_steps == [0, 5]


def test_a_run_with_a_secret_key_goes_on_with_it(tmp_path: Path) -> None:
    run = make(seed=None)
    run.save(tmp_path)
    run.go(4)
    run.save(tmp_path)
    run.go(6)
    expected = run.weights
    run.private.close()
    again = make(seed=None)
    again.load(tmp_path)
    again.go(6)
    assert all(torch.equal(a, b) for a, b in zip(expected, again.weights, strict=True))
    assert again.private.guarantee().void is None and again.private.noise.first_steps == [0]


def test_torchs_random_state_comes_back(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path / "other")
    run.go(3)
    torch.rand(7)
    run.save(tmp_path / "other")
    expected = torch.rand(5)
    run.private.close()
    torch.manual_seed(99)
    run = make()
    run.load(tmp_path / "other")
    assert torch.equal(torch.rand(5), expected)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    a, b = make(), make()
    a.go()
    for step in range(T + 1):
        b.go(step)
        b.save(tmp_path)
        b.save(tmp_path)
    assert equal(a, b)


def test_two_generations_are_kept(tmp_path: Path) -> None:
    run = make()
    for step in range(5):
        run.go(step)
        assert run.save(tmp_path).name == f"step-{step:08d}-{step + 1}"
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["journal", "key", "step-00000003-4", "step-00000004-5"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


class Holder:
    """Any object with a state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_any_object_with_a_state_dict(tmp_path: Path) -> None:
    value = {"best": 0.1, "curve": [1, (2.0, None)], "ema": torch.arange(3), 7: np.float32(1.5), "n": np.arange(2)}
    run = make()
    run.private.save(tmp_path, a=Holder(value), b=Holder(float("nan")))
    run.private.close()
    a, b = Holder(None), Holder(None)
    make().private.load(tmp_path, a=a, b=b)
    assert a.value["best"] == 0.1 and a.value["curve"] == [1, (2.0, None)] and a.value[7] == 1.5
    assert torch.equal(a.value["ema"], torch.arange(3)) and (a.value["n"] == np.arange(2)).all()
    assert math.isnan(b.value)
    with pytest.raises(StateError, match="the run was saved with 'b'"):
        make().private.load(tmp_path, a=a)
    with pytest.raises(StateError, match="c=int has no state_dict"):
        make().private.load(tmp_path, c=3)


# -- steps that are done again ---------------------------------------------------------------------


def noise_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, generation) of every release from here on."""
    found: list[tuple[int, int]] = []
    add = run.private.noise.add_

    def recorded(sums: dict[str, Tensor], step: int, scale: float) -> None:
        found.append((step, run.private.noise.generation(step)))
        add(sums, step, scale)

    monkeypatch.setattr(run.private.noise, "add_", recorded)
    return found


def another_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def older_weights(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("change", ["learning rate", "loss", "older weights"])
def test_a_step_done_again_differently_takes_fresh_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    halfway(tmp_path, 4, on=3)
    run = make()
    run.load(tmp_path)
    before = run.private.guarantee()
    assert before.steps_released == 7 and not any("redone" in remark for remark in before.remarks)
    found = noise_of(run, monkeypatch)
    if change == "learning rate":
        another_rate(run)
    elif change == "older weights":
        older_weights(run)
    run.go(9, losses=(lambda x, y: 2 * run.losses(x, y)) if change == "loss" else None)
    # step 4 itself is the same under another learning rate: the weights are only moved after it
    first = 5 if change == "learning rate" else 4
    assert found == [(step, int(step >= first)) for step in range(4, 9)]
    (said,) = [remark for remark in run.private.guarantee().remarks if "redone" in remark]
    assert f"(from step {first})" in said and "nothing computed from the first attempt was released" in said
    run.go()
    run.save(tmp_path)
    assert run.private.guarantee().steps_released == T and said in run.private.guarantee().remarks
    late = make()
    late.load(tmp_path)  # a finished run still says it
    assert said in late.private.guarantee().remarks


def test_steps_released_never_go_down(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path)
    run.go(2)
    run.save(tmp_path)
    run.go(7)
    spent = run.private.guarantee()
    run.private.close()
    again = make()
    again.load(tmp_path)
    assert again.private.step == 2
    assert again.private.guarantee().steps_released == 7 and again.private.guarantee().epsilon == spent.epsilon
    again.save(tmp_path)  # and so it stays, even if nothing is done
    again.private.close()
    last = make()
    last.load(tmp_path)
    assert last.private.guarantee().steps_released == 7


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("differently", [False, True])
@pytest.mark.parametrize("noise", ["lambda-cgd:0.9", "bisr:3", "bsr:3"])
def test_a_retry_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_folder: bool, differently: bool, noise: str
) -> None:
    """Out of memory while the noise is added: the same sum gets the same noise; nothing was handed out."""
    options = {"noise": noise, "noise_storage": "device"}
    whole = make(**options)
    whole.go()
    run = make(**options)
    if in_folder:
        run.save(tmp_path)
    run.go(5)
    add, failures = CorrelatedNoise.add_, [MemoryError("noise"), KeyboardInterrupt()]

    def failing(self: CorrelatedNoise, sums: dict[str, Tensor], step: int, scale: float) -> None:
        add(self, dict(list(sums.items())[:1]), step, scale)  # a part of it is done
        raise failures.pop()

    for kind in (KeyboardInterrupt, MemoryError):
        with monkeypatch.context() as m:
            m.setattr(CorrelatedNoise, "add_", failing)
            with pytest.raises(kind):
                run.go(6)
        assert run.private.step == 5 and all(p.grad is None for p in run.model.parameters())
        assert run.private.guarantee().steps_released == 6  # it may have been
    if differently:
        older_weights(run)
    run.go()
    # in memory nobody saw the first sum or anything of it; from a folder it could have been taken up elsewhere
    assert run.private.noise.first_steps == ([0, 5] if differently and in_folder else [0])
    assert equal(run, whole) is not differently


def test_an_interrupt_while_the_gradient_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it was seen, so the step is over: it is not done again with the same noise."""

    class Interrupted(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name.startswith("3"):
                raise KeyboardInterrupt
            return super().__getitem__(name)

    run = make()
    run.go(5)
    release = run.private._release
    with monkeypatch.context() as m:
        m.setattr(run.private, "_release", lambda sums: Interrupted(release(sums)))
        with pytest.raises(KeyboardInterrupt):
            run.go(6)
    assert run.private.step == 6 == run.private.guarantee().steps_released
    assert run.model[0].weight.grad is not None and run.model[3].weight.grad is None  # type: ignore[index,union-attr]
    run.go()


def test_weights_reloaded_by_hand_are_no_redo(tmp_path: Path) -> None:
    """The steps go on, so nothing is released twice."""
    run = make()
    run.save(tmp_path)
    older = {name: t.clone() for name, t in run.model.state_dict().items()}
    run.go(5)
    run.model.load_state_dict(older)
    run.go(8)
    assert run.private.noise.first_steps == [0] and run.private.guarantee().steps_released == 8


# -- one key, one run ------------------------------------------------------------------------------


def test_two_runs_on_one_key_are_refused(tmp_path: Path, server: Any) -> None:
    halfway(tmp_path, 2)
    run = make()
    run.load(tmp_path)
    assert "is in use by another run" in server("try_load", folder=str(tmp_path))["message"]
    with pytest.raises(StateError, match="is in use by another run"):
        make().load(tmp_path)
    run.private.close()
    assert server("try_load", folder=str(tmp_path))["message"] is None


def test_a_run_that_is_dropped_lets_go(tmp_path: Path) -> None:
    halfway(tmp_path, 2)
    run: Run | None = make()
    assert run is not None
    run.load(tmp_path)
    del run
    gc.collect()
    make().load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A loader's worker that outlives a killed run must not keep the next one out."""
    run = make()
    run.save(tmp_path)
    wait, go = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.write(say, b"here")
        os.read(wait, 1)
        os._exit(0)
    try:
        assert os.read(said, 4) == b"here"
        run.private.close()
        make().load(tmp_path)
    finally:
        for fd in (go, wait, said, say):
            os.close(fd)
        os.waitpid(child, 0)


def test_one_key_in_two_places_is_refused(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path / "a")
    with pytest.raises(StateError, match="this run lives in .*would put one key in two places"):
        run.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with pytest.raises(StateError, match="holds another run"):
        make().save(tmp_path / "a")


def test_with_closes(tmp_path: Path) -> None:
    with make(seed=None).private as private:
        assert isinstance(private, Private)
        private.save(tmp_path)
    with pytest.raises(StateError, match="closed"):
        private.save(tmp_path)
    with pytest.raises(StateError, match="destroyed"):
        next(iter(private.batches()))
    with pytest.raises(StateError, match="fresh run"):
        private.load(tmp_path)
    assert str(private.guarantee())
    make(seed=None).private.load(tmp_path)


# -- the end ---------------------------------------------------------------------------------------


def test_the_end_of_a_run(tmp_path: Path) -> None:
    run = make(seed=None)
    run.save(tmp_path)
    key = (tmp_path / "key").read_bytes()
    held = os.open(tmp_path / "key", os.O_RDONLY)
    run.go()
    assert (tmp_path / "key").exists()
    run.save(tmp_path)
    assert not (tmp_path / "key").exists() and not (tmp_path / "journal").exists()
    assert os.pread(held, 1000, 0) == bytes(len(key))  # overwritten, not only unlinked
    os.close(held)
    assert repr(run.private.keys) == "<Keys: destroyed>"
    assert run.private.guarantee().steps_released == T and run.private.guarantee().void is None
    run.save(tmp_path)  # once more is fine
    late = make(seed=None)
    late.load(tmp_path)
    assert late.private.step == T and equal(run, late)
    assert str(late.private.guarantee()) == str(run.private.guarantee())
    assert list(late.private.batches()) == []
    late.save(tmp_path)
    assert not (tmp_path / "key").exists()


def test_the_end_of_a_run_that_was_never_saved(tmp_path: Path) -> None:
    run = make(seed=None)
    run.go()
    assert repr(run.private.keys) == "<Keys: destroyed>"
    assert run.private.guarantee().steps_released == T
    run.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{T:08d}-1"]
    late = make(seed=None)
    late.load(tmp_path)
    assert equal(run, late)


def test_a_crash_between_the_last_save_and_the_keys_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for left in ("everything", "an empty key", "the journal"):
        folder = tmp_path / left
        run = make(seed=None)
        run.save(folder)
        run.go()
        with monkeypatch.context() as m:
            m.setattr("sordino.state.saving.finish", lambda *a: None)
            run.save(folder)
        run.private.close()
        (folder / ".key.0123456789abcdef").write_bytes((folder / "key").read_bytes())
        if left == "an empty key":
            (folder / "key").write_bytes(bytes(80))
        elif left == "the journal":
            Keys.erase(folder / "key")
        late = make(seed=None)
        late.load(folder)
        assert late.private.step == T
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000000-1", f"step-{T:08d}-2"]


def test_has_save(tmp_path: Path) -> None:
    assert not has_save(tmp_path / "none") and not has_save(tmp_path)
    (tmp_path / "file").touch()
    assert not has_save(tmp_path / "file")
    make().save(tmp_path)
    assert has_save(tmp_path)


def test_a_first_save_that_was_cut_short_can_be_made_again(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path)
    run.private.close()
    (tmp_path / "step-00000000-1").rename(tmp_path / ".step-00000000-1")
    with pytest.raises(StateError, match="no saved run"):
        make().load(tmp_path)
    with pytest.raises(StateError, match="holds another run"):  # not cut short, its saves were taken away
        make().save(tmp_path)
    (tmp_path / "starting").touch()
    with pytest.raises(StateError, match="was cut short, nothing was saved; start a new run there"):
        make().load(tmp_path)
    fresh = make()
    fresh.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal", "key", "step-00000000-1"]


def test_frozen_parameters_and_buffers_come_back(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
        for p in made[0].parameters():
            p.requires_grad_(False)
        return made

    def options() -> dict[str, Any]:
        return {"model": model(), "optimizer": lambda p, lr: torch.optim.SGD([q for q in p if q.requires_grad], lr=lr)}

    run = make(**options())
    with torch.no_grad():
        run.model[0].weight.add_(1.0)  # type: ignore[index,union-attr,operator]
        run.model[1].running_mean.add_(2.0)  # type: ignore[index,union-attr,operator]
    run.save(tmp_path)
    run.private.close()
    again = make(**options())
    again.load(tmp_path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    run = make()
    with pytest.raises(SordinoError, match=r"cannot save the object at state.objects.bad.value; a state_dict may hold"):
        run.private.save(tmp_path / "run", bad=Holder(object()))
    with pytest.raises(SordinoError, match=r"cannot save the complex tensor at state.objects.bad.value"):
        run.private.save(tmp_path / "run", bad=Holder(torch.zeros(2, dtype=torch.complex64)))
    assert not (tmp_path / "run").exists()
    run.save(tmp_path / "run")
