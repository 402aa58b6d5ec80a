"""Whatever happens, in whatever order: no row of noise ever hides two different sums.

Random lives of a run: steps, saves, crashes at whatever reaches the disk, failures inside a step, resumes with another
loss or learning rate, damaged saves, saves put back from a copy. Beside it a record of every attempt to add noise, in
all attempts together. What must hold:

1. A (step, generation) of noise is used for one sum and one scale only, and always means the same rows of noise.
2. On the way to the weights in hand, each row of Z is one row: drawn under the generation under which it is replayed
   later. Otherwise (C⁻¹Z)_t would not have its law.
3. What is released is the sum plus that row of C⁻¹Z, drawn here once more from the sub-keys and the dense matrix.
4. The steps said to be released never go down, and cover every attempt.
5. A step that was done again differently is said so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.state.tiny import Run, T, make
from torch import Tensor

from sordino.errors import StateError
from sordino.noise import CorrelatedNoise, Keys, Stream


class Crash(BaseException):
    """The process is gone."""


class World:
    """One run's whole life, over many processes."""

    def __init__(self, folder: Path, seed: int, noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.folder, self.copies = folder / "run", folder / "copies"
        noise, _, storage = noise.partition(" ")
        self.options: dict[str, Any] = {
            "noise": noise,
            "noise_storage": storage or "auto",
            "check": False,
            "optimizer": torch.optim.SGD,
            "lr": 0.5,
        }
        self.keys = Keys.from_seed(3)
        self.used: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.attempted: dict[int, set[str]] = {}
        self.way: list[int] = []  # the generation of each row, on the way to the weights in hand
        self.ways: dict[str, list[int]] = {}  # by save
        self.released = 0
        self.countdown: int | None = None
        self.scale, self.before = 0.0, {}  # type: ignore[var-annotated]
        self.fail_in_noise: type[BaseException] | None = None
        self.count = {"redone": 0, "crashes": 0, "steps": 0, "refused": 0, "fallbacks": 0, "left behind": 0}
        for name in ("fsync", "write", "rename", "link", "unlink", "mkdir", "ftruncate"):
            self._wrap(monkeypatch, name)
        self._watch(monkeypatch)
        self.run = self._new()

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def durable(*arguments: Any, **named: Any) -> Any:
            if self.countdown is not None:
                self.countdown -= 1
                if self.countdown < 0:
                    if name == "write" and self.random.random() < 0.7:
                        part = self.random.randrange(len(arguments[1]) + 1)
                        original(arguments[0], bytes(arguments[1])[:part])
                    raise Crash
            if name == "fsync":
                return None  # nothing here outlives a power failure anyway
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, durable)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add, world = CorrelatedNoise.add_, self

        def recorded(noise: CorrelatedNoise, sums: dict[str, Tensor], step: int, scale: float) -> None:
            world.attempt(noise, sums, step, scale)
            if world.fail_in_noise is not None:
                add(noise, dict(list(sums.items())[:1]), step, scale)
                raise world.fail_in_noise
            add(noise, sums, step, scale)

        monkeypatch.setattr(CorrelatedNoise, "add_", recorded)

    def attempt(self, noise: CorrelatedNoise, sums: dict[str, Tensor], step: int, scale: float) -> None:
        """Invariants 1 and 2."""
        if self.fail_in_noise is not None and self.run.private.folder is None:
            return  # handed to nobody, and no other process can take this run up: its noise may hide another sum
        digest = hashlib.sha256(repr(scale).encode())
        for name, total in sums.items():
            digest.update(name.encode() + total.numpy().tobytes())
        rows = tuple(noise.generation(row) for row in range(step + 1))
        found = (digest.hexdigest(), rows)
        assert self.used.setdefault((step, rows[-1]), found) == found, f"step {step}: noise used twice"
        assert list(rows[:step]) == self.way[:step], f"step {step}: earlier rows are replayed with other noise"
        others = self.attempted.setdefault(step, set())
        if others and found[0] not in others:
            self.count["redone"] += 1
        others.add(found[0])
        self.released = max(self.released, step + 1)
        self.scale, self.before = scale, {name: total.clone() for name, total in sums.items()}

    # -- what happens ------------------------------------------------------------------------------

    def _new(self) -> Run:
        return make(**self.options)

    def losses(self) -> Any:
        """Now and then another loss than last time."""
        factor = 1.0 if self.random.random() < 0.85 else self.random.choice([0.5, 2.0])
        return lambda x, y: factor * self.run.losses(x, y)

    def step(self) -> None:
        private = self.run.private
        if private.step >= T - 1:
            return
        step = private.step
        batch = next(iter(private.batches()))
        private.backward(self.losses(), batch)
        self.check_release(step)
        self.way[step:] = [private.noise.generation(step)]
        self.run.optimizer.step()
        self.count["steps"] += 1

    def check_release(self, step: int) -> None:
        """Invariant 3."""
        private = self.run.private
        row = private.plan.strategy.inverse()[step]
        for name, p in private.parameters.items():
            noise = np.zeros(p.numel())
            for j in range(step + 1):
                generation = private.noise.generation(j)
                stream = Stream(self.keys.subkey("noise", generation))
                noise += row[j] * stream.normals(j, name, 0, p.numel()).double().numpy()
            expected = self.before[name].double().numpy().ravel() + self.scale * noise
            assert p.grad is not None
            found = p.grad.double().numpy().ravel() * private.plan.schedule.batch_size
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    def failing_step(self) -> None:
        """Something is raised after the journal's line; the same process tries again later."""
        self.fail_in_noise = self.random.choice([MemoryError, KeyboardInterrupt])
        try:
            with contextlib.suppress(MemoryError, KeyboardInterrupt):
                self.step()
        finally:
            self.fail_in_noise = None

    def save(self) -> None:
        name = self.run.private.save(self.folder, schedule=self.run.schedule).name
        self.ways[self.identity(name)] = list(self.way)
        if self.random.random() < 0.5:
            shutil.copytree(
                self.folder / name, self.copies / name, dirs_exist_ok=True
            )  # an older one of that name is replaced

    def identity(self, name: str) -> str:
        return (self.folder / name / "seal.json").read_text()

    def another_rate(self) -> None:
        self.run.optimizer.param_groups[0]["lr"] *= self.random.choice([0.5, 2.0])

    def crash(self) -> None:
        """The process ends here, and the next one takes up what is on the disk."""
        self.countdown = None
        self.count["crashes"] += 1
        private = self.run.private
        if private.folder is not None:
            private.folder.close()
        private.journal._close_fd()
        self.damage()
        self.run = self._new()
        if not any(self.folder.glob("step-*")):
            # the run is lost; what it released it released under a key that is gone (here all keys are one: start over)
            assert not self.ways
            self.used.clear()
            self.attempted.clear()
            self.way, self.released = [], 0
            self.save()
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.run.load(self.folder)
            except StateError as error:
                self.refused(str(error))
        last = self.identity(self.run.private.folder.last)
        if last not in self.ways:  # the crash came after the save was whole and before it was said
            self.ways[last] = list(self.way)
        self.way = list(self.ways[last])
        assert len(self.way) == self.run.private.step

    def refused(self, message: str) -> None:
        """A save that was left behind: take it away, as the message says."""
        self.count["refused"] += 1
        assert "was left behind" in message or "can be used" in message, message
        while True:
            names = sorted(self.folder.glob("step-*"), key=lambda p: int(p.name.rpartition("-")[2]))
            if not names:
                pytest.skip("every save was damaged")
            self.count["left behind"] += "was left behind" in message
            shutil.rmtree(names[-1])
            if len(names) == 1:
                pytest.skip("the last save was left behind")
            self.run = self._new()
            try:
                return self.run.load(self.folder)
            except StateError as error:
                message = str(error)
                assert "was left behind" in message or "can be used" in message, message

    def damage(self) -> None:
        """Between two processes: the newest save is damaged, or an older one is put back in its place."""
        names = sorted(self.folder.glob("step-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        chance = self.random.random()
        if len(names) > 1 and chance < 0.15:
            path = names[-1] / self.random.choice(["state.json", "tensors.safetensors", "seal.json"])
            raw = bytearray(path.read_bytes())
            raw[self.random.randrange(len(raw))] ^= 1
            path.write_bytes(raw)
            self.count["fallbacks"] += 1
        elif names and chance < 0.5 and self.copies.exists():
            copy = self.random.choice(sorted(self.copies.iterdir()))
            for path in names[self.random.randrange(2) :]:
                shutil.rmtree(path)
            shutil.rmtree(self.folder / copy.name, ignore_errors=True)
            shutil.copytree(copy, self.folder / copy.name)

    def live(self, actions: int) -> None:
        todo = [self.step] * 8 + [self.save] * 3 + [self.failing_step, self.another_rate]
        for _ in range(actions):
            if self.random.random() < 0.12:
                self.crash()
            elif self.random.random() < 0.12:
                self.countdown = self.random.randrange(8)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self.random.choice(todo)()
                except Crash:
                    self.crash()
            self.check_said()

    def check_said(self) -> None:
        """Invariants 4 and 5."""
        found = self.run.private.guarantee()
        assert found.steps_released >= self.released
        self.released = max(self.released, found.steps_released)
        redone = any(len(sums) > 1 for sums in self.attempted.values())
        assert redone <= any("redone" in remark for remark in found.remarks)


def lives(tmp_path: Path, noise: str, seeds: range, actions: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in seeds:
        with pytest.MonkeyPatch.context() as monkeypatch:
            world = World(tmp_path / str(seed), seed, noise, monkeypatch)
            try:
                world.live(actions)
            except pytest.skip.Exception:
                pass
            world.countdown = None
            world.run.private.close()
        for name, count in world.count.items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("noise", ["identity", "lambda-cgd:0.9", "bisr:3 device", "bsr:3 host"])
def test_no_noise_hides_two_sums(tmp_path: Path, noise: str) -> None:
    total = lives(tmp_path, noise, range(12), 45)
    assert min(total.values()) > 0, total  # everything that is to be survived did happen
    assert total["redone"] > 20 and total["crashes"] > 40 and total["steps"] > 100, total


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise", ["identity", "lambda-cgd:0.9", "lambda-cgd-normalized:0.7", "bisr:4 device", "bsr:4 host"]
)
def test_no_noise_hides_two_sums_in_many_lives(tmp_path: Path, noise: str) -> None:
    lives(tmp_path, noise, range(100, 260), 60)
