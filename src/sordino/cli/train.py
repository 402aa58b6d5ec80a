"""``sordino train``: one private run, in one folder, that can be stopped and resumed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..budget import Budget, round_up
from ..errors import SordinoError, StateError
from ..private import Private, make_private
from . import setup
from .config import Config, override, read_toml, validate
from .folder import RunFolder
from .output import err, progress_bar, to_json


def train(
    config_path: Path | None, overrides: Sequence[tuple[str, Any]], out: Path | None, resume: bool, as_json: bool
) -> int:
    """The exit code: 0, or 130 if the run was stopped and can be resumed."""
    folder = RunFolder(out if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    if resume:
        config = _resumed(folder, config_path, overrides, out)
    else:
        folder.refuse_if_used()
        tables = read_toml(config_path) if config_path is not None else {}
        config = validate(override(tables, overrides), str(config_path or "configuration"))
    run = Run(config, folder)
    try:
        run.start(resume)
        finished = run.go()
    finally:
        run.private.close()
    if not finished:
        err().print(
            f"Stopped after step {run.private.step} of {run.private.steps}, and saved. "
            f"Go on with: sordino train --resume --out {folder.path}"
        )
        return 130
    result = run.result()
    if as_json:
        print(to_json(result))
    else:
        for name, value in result["metrics"].items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        print(result["statement"])
        print(f"The run is in {folder.path}")
    return 0


def _resumed(
    folder: RunFolder, config_path: Path | None, overrides: Sequence[tuple[str, Any]], out: Path | None
) -> Config:
    """The configuration the run was started with; what is given must agree with it, but for where noise is kept."""
    if out is None:
        raise SordinoError("--resume needs --out, the folder of the run")
    tables = folder.config()
    if folder.never_begun():
        raise StateError(
            f"the run in --out {str(out)!r} was cut short before its first save; start it without --resume"
        )
    config = validate(tables, str(folder.path / "config.toml"))
    asked = override(read_toml(config_path) if config_path is not None else tables, overrides)
    given = validate(asked, str(config_path or "configuration"))
    was, now = config.as_toml(), given.as_toml()
    for key in {**was, **now}:
        if was.get(key) != now.get(key) and key != "noise_storage":
            raise StateError(
                f"{key} was {was.get(key)!r} when the run was started and is {now.get(key)!r} now; "
                "resume with what was started, or start a new run"
            )
    kept = str(folder.spectrum) if folder.spectrum.exists() else config.spectrum
    return config.model_copy(update={"noise_storage": given.noise_storage, "spectrum": kept})


class Run:
    """One run, from its configuration to its result."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.data = setup.load_data(config)
        self.model = setup.make_model(config, self.data.train)
        self.optimizer = setup.make_optimizer(config.optimizer, self.model)
        self.losses = setup.make_losses(self.model)
        self.metrics: dict[str, float] = {}
        c = config
        self.private: Private = make_private(
            self.model,
            self.optimizer,
            setup.tensors(self.data.train),
            budget=None if c.epsilon is None else Budget(c.epsilon, c.delta or 0.0),
            noise_multiplier=c.noise_multiplier,
            delta=c.delta if c.epsilon is None else None,
            batch_size=c.batch_size,
            epochs=c.epochs,
            examples=c.examples,
            clip_norm=c.clip_norm,
            clipping=c.clipping,
            noise=c.noise,
            noise_storage=c.noise_storage,
            spectrum=c.spectrum,
            exact_curvature=c.exact_curvature,
            allow_overlap=c.allow_overlap,
            sampling=c.sampling,
            accountant=c.accountant or "auto",
            geometry=c.geometry,
            denoising=c.denoising,  # type: ignore[arg-type]
            public=setup.make_public(c, self.model, self.data.train),
            physical_batch_size=c.physical_batch_size,
            seed=c.seed,
        )

    def start(self, resume: bool) -> None:
        """Take up the last checkpoint, or make the folder and the first one, before anything is released."""
        console = err()
        if resume:
            self.private.load(self.folder.checkpoints)
            console.print(f"Going on after step {self.private.step} of {self.private.steps}")
        else:
            self.folder.create(self.config.as_toml(), self.private.plan.as_dict())
            if self.private.plan.curvature is not None:
                self.private.plan.curvature.spectrum.save(self.folder.spectrum)  # a run is one folder
            self.private.save(self.folder.checkpoints)
        console.print(self.private.describe())
        if self.data.validation is not None:
            console.print(f"{len(self.data.validation)} private examples are held out for validation")
        if self.data.test is not None:
            console.print(f"{len(self.data.test)} test examples count as public: what is measured on them is published")

    def go(self) -> bool:
        """Train until all steps are released or somebody stops it; whether it is complete."""
        private, every = self.private, self.config.checkpoint_every
        epoch = private.plan.schedule.steps_per_epoch
        noted = [line["step"] for line in self.folder.metrics()]
        if private.step and private.step % epoch == 0 and private.step not in noted:
            self._note()  # a crash came between the checkpoint and its line
        with _stopping() as stop, progress_bar("loss {task.fields[loss]} (private)") as bar:
            task = bar.add_task("training", total=private.steps, completed=private.step, loss="")
            for batch in private.batches():
                private.backward(self.losses, batch)
                self.optimizer.step()
                self._keep_private(batch.step)
                loss = f"{private.last.loss:.3f}" if private.last is not None else ""
                bar.update(task, completed=private.step, loss=loss)
                done = private.step // epoch
                if private.step % (epoch * every) == 0 or private.step == private.steps:
                    self._save()
                    bar.console.print(self._line(done))
                elif stop.is_set():
                    self._save(note=False)
                if stop.is_set() and private.step < private.steps:
                    return False
        self._finish()
        return True

    def _save(self, note: bool = True) -> None:
        self.private.save(self.folder.checkpoints)
        if note:
            self._note()

    def _note(self) -> None:
        """What may be published, after the checkpoint that it tells of."""
        private = self.private
        guarantee = private.guarantee()
        line: dict[str, Any] = {
            "step": private.step,
            "epoch": private.step // private.plan.schedule.steps_per_epoch,
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "noise_multiplier": private.plan.noise_multiplier,
        }
        if self.data.test is not None:
            found = setup.evaluate(self.model, self.data.test)
            self.metrics = {f"test_{name}": value for name, value in found.items()}
            line |= self.metrics
        self.folder.add_metrics(line)
        self.folder.write_privacy(guarantee.as_dict())

    def _keep_private(self, step: int) -> None:
        """What must not be published, and validation on private data once an epoch."""
        last, report = self.private.last, self.private.check_report
        if last is not None:
            numbers = {"loss": last.loss, "clip_fraction": last.clip_fraction}
            counts = {"batch_size": last.batch_size, "non_finite": last.non_finite}
            self.folder.add_private("training", {"step": step, **numbers, **counts})
        if report is not None and report.numbers:
            self.folder.add_private("sensitivity_check", {"step": step, "passed": report.passed, **report.numbers})
            report.numbers = {}  # written once
        if self.data.validation is not None and (step + 1) % self.private.plan.schedule.steps_per_epoch == 0:
            self.validation = setup.evaluate(self.model, self.data.validation)
            self.folder.add_private("validation", {"step": step + 1, **self.validation})

    validation: dict[str, float] | None = None

    def _line(self, epoch: int) -> str:
        guarantee = self.private.guarantee()
        spent = f"no guarantee ({guarantee.void})" if guarantee.void else f"ε {round_up(guarantee.epsilon)}"
        parts = [f"epoch {epoch}", spent]
        if self.metrics:
            parts.append(f"test accuracy {self.metrics['test_accuracy']:.4f}")
        if self.validation is not None:
            parts.append(f"validation accuracy {self.validation['accuracy']:.4f} (private)")
        return ", ".join(parts)

    def _finish(self) -> None:
        guarantee = self.private.guarantee()
        self.folder.write_privacy(guarantee.as_dict())
        about = {"model": self.config.as_toml()["model"], "input_shape": self.data.train.input_shape}
        about |= {"classes": self.data.train.classes, "privacy": guarantee.as_dict()["statement"]}
        self.folder.write_model(self.model.state_dict(), about)

    def result(self) -> dict[str, Any]:
        guarantee = self.private.guarantee().as_dict()
        lines = self.folder.metrics()
        metrics = {key: value for key, value in (lines[-1] if lines else {}).items() if key.startswith("test_")}
        return {
            "folder": str(self.folder.path),
            "model": str(self.folder.path / "model.safetensors"),
            **{key: guarantee[key] for key in ("epsilon", "delta", "noise_multiplier", "void", "statement")},
            "steps": self.private.step,
            "metrics": metrics,
        }


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask for a stop after the step that is under way; a second one does not wait."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("sordino: stopping after this step; again to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
