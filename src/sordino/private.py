"""The private step. `make_private` joins the rooms; `Private.backward` calls each once, in the order data flows.

    batch → gradients → geometry (clipped sum) → noise → ÷ B → denoising → back → p.grad

Nothing in this file knows a sampler, a strategy, a geometry or a denoiser by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch, Batches, OnRows, Source, cuda_devices
from .budget import Budget, Guarantee, SordinoWarning
from .denoising import Denoiser
from .denoising import build as build_denoiser
from .denoising import check as check_denoiser
from .denoising.base import DENOISERS
from .errors import SordinoError
from .geometry import Geometry
from .geometry import geometry as build_geometry
from .gradients.check import CheckReport, check, still_zero
from .gradients.clipping import Clipping
from .gradients.engine import Engine, Losses, check_model
from .journal import Journal
from .noise import CorrelatedNoise, Keys, Stream
from .plan import Plan, plan
from .public import Public

__all__ = ["Batch", "OnRows", "Private", "StepNumbers", "make_private"]


@dataclass(frozen=True)
class StepNumbers:
    """What happened in one step. Private: for the console, never to be published."""

    loss: float
    clip_fraction: float
    norms: Tensor
    batch_size: int
    non_finite: int


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    budget: Budget | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    batch_size: int,
    epochs: int,
    clip_norm: float = 1.0,
    noise: str = "identity",
    sampling: str = "poisson",
    geometry: str | Geometry = "euclidean",
    denoising: str | Denoiser = "none",
    clipping: str | Clipping = "flat",
    public: Public | None = None,
    examples: int | None = None,
    physical_batch_size: int | str | None = None,
    augment: Callable[[Any], Any] | OnRows | None = None,
    augmentations: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    pin_memory: bool = False,
    check: bool = True,
    seed: int | None = None,
    accountant: str = "auto",
) -> Private:
    """Make a training loop private. Model, optimizer and loop stay yours; see `Private`."""
    parameters = _trainable(model, optimizer)
    check_model(model)
    device = _one_device(parameters)
    source = Source(
        dataset, collate=collate, augment=augment, augmentations=augmentations, device=device, pin_memory=pin_memory
    )
    planned = plan(
        budget,
        examples=len(source) if examples is None else examples,
        batch_size=batch_size,
        epochs=epochs,
        noise=noise,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        delta=delta,
        parameters=sum(p.numel() for p in parameters.values()),
        accountant=accountant,
    )
    if isinstance(clipping, Clipping):
        if clipping.bound != clip_norm and clip_norm != 1.0:
            raise SordinoError(f"clip_norm={clip_norm} is given twice; leave it to clipping ({clipping.bound:g})")
        rule = clipping
    else:
        rule = Clipping(clip_norm, clipping)
    return Private(
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        source=source,
        planned=planned,
        clipping=rule,
        geometry=build_geometry(geometry),
        denoiser=build_denoiser(denoising),
        public=public,
        examples_stated=examples is not None,
        physical_batch_size=physical_batch_size,
        workers=_count("workers", workers, 0),
        check=bool(check),
        keys=Keys.fresh() if seed is None else Keys.from_seed(seed),
    )


class Private:
    """One private training run. Made by `make_private`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, Tensor],
        source: Source,
        planned: Plan,
        clipping: Clipping,
        geometry: Geometry,
        denoiser: Denoiser,
        public: Public | None,
        examples_stated: bool,
        physical_batch_size: int | str | None,
        workers: int,
        check: bool,
        keys: Keys,
    ) -> None:
        self.model, self.optimizer, self.parameters = model, optimizer, parameters
        self.source, self.plan, self.clipping = source, planned, clipping
        self.geometry, self.denoiser, self.public = geometry, denoiser, public
        self.examples_stated, self.workers = examples_stated, workers
        self.engine = Engine(model, parameters, verify=check)
        self.step = 0  # steps released
        self.attempted = -1
        self.check_wanted, self.check_report = check, None  # type: bool, CheckReport | None
        self.last: StepNumbers | None = None
        self.folder: Any = None  # set by the first save: where key and journal live
        self.remarks: list[str] = []
        self.adopt(keys)
        self.released_before = 0  # steps a loaded run had released
        self.physical_batch_size, self.halve = _physical(physical_batch_size)
        self.matrices = _matrices(model, parameters)
        self.zero_first: set[str] = set()
        self.zero_snapshot: dict[str, Tensor] | None = None
        entry = DENOISERS.find(denoiser.name)
        for text in check_denoiser(
            entry,
            correlated_noise=not planned.strategy.is_identity,
            white_noise=getattr(geometry, "white_noise", True),
            geometry=geometry.name,
        ):
            warnings.warn(text, SordinoWarning, stacklevel=3)
        if geometry.needs_public and public is None:
            raise SordinoError(
                f"geometry={geometry.name!r} learns from public data; pass public=sordino.Public(dataset, losses=...)"
            )
        geometry.prepare(model, parameters, public, keys)
        if public is not None and geometry.needs_public:
            self.remarks.append(
                f"{geometry.describe()} learnt from {public.describe()}, which the guarantee does not cover"
            )

    def adopt(self, keys: Keys, journal: Journal | None = None) -> None:
        """Draw everything from these keys (a fresh run's own, or those of a run that is resumed)."""
        self.keys = keys
        self.noise = CorrelatedNoise(keys, self.plan.strategy)
        self._sampling_stream = Stream(keys.subkey("sampling"))
        self._dropout_stream = Stream(keys.subkey("dropout"))
        self._augment_stream = Stream(keys.subkey("augmentation"))
        self.journal = Journal(keys.subkey("journal")) if journal is None else journal

    # -- what runs ----------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """T."""
        return self.plan.steps

    def batches(self) -> Batches:
        """The batches from the next step that has not been released; sized and re-iterable."""
        return Batches(self, self.workers)

    def draw(self, step: int) -> Sequence[int]:
        return self.plan.sampling.draw(self._sampling_stream, step, len(self.source))

    def batch(self, step: int, indices: Sequence[int], samples: list[Any] | None) -> Batch:
        """The batch of a step, on the device, from its examples."""
        source = self.source

        def seed(index: int) -> int:
            return _seed(self._augment_stream, step, "example", index)

        def fetch(lo: int, hi: int) -> Any:
            return source.collated(indices[lo:hi], None if samples is None else samples[lo:hi], seed)

        return Batch(step, step // self.plan.schedule.steps_per_epoch, indices, fetch)

    def backward(self, losses: Losses, batch: Batch) -> None:
        """Put the private gradient of `batch` into every trainable parameter's `.grad`.

        `losses(*data)` gives one loss per example; it may be called several times and must have no side effects. If
        anything is raised, nothing was released and the same step can be tried again.
        """
        self._check_call(losses, batch)
        self.attempted = batch.step
        for p in self.parameters.values():
            p.grad = None  # a step that fails must not leave the last one's gradient to be applied again
        if self.check_wanted and self.check_report is None and len(batch) > 1:
            self._check_sensitivity(losses, batch)
        sums, numbers = self._clipped_sums(losses, batch)
        self._release(sums)
        self.last = numbers
        self.step += 1
        if self.step == self.steps and self.folder is None:
            self.keys.destroy()  # in a folder, the last save does it

    def _release(self, sums: dict[str, Tensor]) -> None:
        """Noise, average, denoise, map back. Nothing before the journal's line is written leaves this object."""
        step, strategy, divisor = self.step, self.plan.strategy, self.plan.schedule.batch_size
        scale = self.clipping.bound * self.plan.noise_multiplier
        if scale:
            self.journal.admit(step, scale, sums, self.noise)
        self.noise.add_(sums, step, scale)
        for total in sums.values():
            total.div_(divisor)
        if scale:
            self.denoiser(sums, scale * strategy.row_norm(step) / divisor, self.matrices)
        for name, p in self.parameters.items():
            p.grad = self.geometry.back(name, sums[name]).reshape(p.shape).to(p.dtype)

    def _clipped_sums(self, losses: Losses, batch: Batch) -> tuple[dict[str, Tensor], StepNumbers]:
        """The sum of the clipped gradients, in the geometry's coordinates, chunk by chunk."""
        count, lo = len(batch), 0
        total: dict[str, Tensor] = {}
        parts = []
        while lo < count:
            hi = min(count, lo + (self.physical_batch_size or count))
            try:
                found = self._chunk(losses, batch, lo, hi)
            except torch.OutOfMemoryError:
                if not self.halve or hi - lo == 1:
                    raise
                self._halve(hi - lo)
                continue
            for name, tensor in found.sums.items():
                if name in total:
                    total[name] += tensor
                else:
                    total[name] = tensor
            found.sums = {}
            parts.append(found)
            lo = hi
        for name, p in self.parameters.items():
            if name not in total:
                total[name] = torch.zeros(p.shape, device=p.device, dtype=_wide(p.dtype))
        return {name: total[name].contiguous() for name in self.parameters}, _numbers(parts, count)

    def _chunk(self, losses: Losses, batch: Batch, lo: int, hi: int) -> Any:
        n, device = hi - lo, self.engine.recorder.device
        self.engine.watch_reached = bool(self.zero_first)
        data = batch.part(lo, hi)
        with torch.random.fork_rng(devices=cuda_devices(device)):
            torch.manual_seed(_seed(self._dropout_stream, batch.step, "chunk", lo))
            found = self.engine.clipped_sums(
                losses, data, n, n * self.source.augmentations, self.geometry, self.clipping
            )
        if self.zero_first:
            self._look_again()
        return found

    def _halve(self, size: int) -> None:
        self.physical_batch_size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- checks -------------------------------------------------------------------------

    def _check_call(self, losses: Losses, batch: Batch) -> None:
        if not callable(losses):
            raise SordinoError(
                f"backward's first argument is {type(losses).__name__}, not a function; pass the function that computes "
                "the losses, so that a batch can be split: private.backward(losses, batch)"
            )
        if not isinstance(batch, Batch):
            raise SordinoError(f"backward got {type(batch).__name__}, not a batch from private.batches()")
        if self.step >= self.steps:
            raise SordinoError(
                f"all {self.steps} planned steps are released; for more, plan a longer run with new epochs"
            )
        if batch.step != self.step:
            done = "was released already" if batch.step < self.step else "is not the next one"
            raise SordinoError(
                f"the batch of step {batch.step} {done} (next: {self.step}); call backward once for every batch, in order"
            )
        if self.folder is not None:
            self.folder.check(self.journal)
        self.journal.check()
        check_model(self.model)
        now = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if now.keys() != self.parameters.keys() or any(now[n] is not p for n, p in self.parameters.items()):
            changed = sorted(now.keys() ^ self.parameters.keys()) or [
                n for n, p in self.parameters.items() if now[n] is not p
            ]
            raise SordinoError(
                f"the trainable parameters changed after make_private: {changed[0]!r}; set requires_grad and add modules "
                "before make_private"
            )

    def _check_sensitivity(self, losses: Losses, batch: Batch) -> None:
        report = check(
            self.engine, losses, batch.part, len(batch), self.source.augmentations, self.geometry, self.clipping
        )
        self.check_report = report
        if report.zero:
            self.zero_first = set(report.zero)
            self.zero_snapshot = {name: p.detach().clone() for name, p in self.parameters.items()}

    def _look_again(self) -> None:
        """A gradient that was exactly zero at first (LoRA's A) must move once its partners have."""
        if self.zero_snapshot is None:
            return
        moved = any(not torch.equal(p, self.zero_snapshot[name]) for name, p in self.parameters.items())
        if not moved:
            return
        first, self.zero_first, self.zero_snapshot = self.zero_first, set(), None
        still_zero(first, {k: bool(v) for k, v in self.engine.reached.items()}, moved)

    def restore_check(self, report: dict[str, Any] | None, snapshot: dict[str, Tensor] | None) -> None:
        """The check is not repeated after a resume, so that a resumed run does what the first did."""
        if report is not None:
            self.check_report = CheckReport(True, complete=report["complete"])
            self.zero_first = set(report["zero"])
            self.zero_snapshot = snapshot

    # -- what holds ---------------------------------------------------------------------

    def guarantee(self) -> Guarantee:
        """What holds for everything released so far, the planned total beside it."""
        released = max(self.step, self.journal.steps, self.released_before)
        remarks = list(self.remarks)
        if self.plan.noise_multiplier:
            if not self.check_wanted:
                remarks.append("the sensitivity check was switched off")
            elif self.check_report is not None:
                whole = "" if self.check_report.complete else ", in part: the model draws random numbers of its own"
                remarks.append(f"the sensitivity check passed on the first batch{whole}")
        redone = self.noise.first_steps[1:]
        if redone:
            remarks.append(
                f"{len(redone)} step(s) were redone with a different sum and fresh noise (from step {min(redone)}); this "
                "holds if nothing computed from the first attempt was released: no weights, no metric, and not the "
                "decision to go back"
            )
        return self.plan.guarantee(
            min(released, self.steps),
            clip_norm=self.clipping.bound,
            examples_stated=self.examples_stated,
            seeded=self.keys.seeded,
            remarks=tuple(remarks),
        )

    def save(self, folder: str | Path, **objects: Any) -> Path:
        """Save everything needed to go on, atomically; further objects with a state_dict by keyword."""
        from .state import save

        return save(self, Path(folder), objects)

    def load(self, folder: str | Path, **objects: Any) -> None:
        """Go on from the last whole save in `folder`."""
        from .state import load

        load(self, Path(folder), objects)

    def close(self) -> None:
        """Let go of the key and its lock; destroys the key in memory."""
        self.journal.close()
        if self.folder is not None:
            self.folder.close()
        self.keys.destroy()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def describe(self) -> str:
        """What runs, in a few lines: to be printed before training."""
        s = self.plan.schedule
        lines = [
            f"{s.examples} examples{'' if self.examples_stated else ' (len(dataset), treated as public)'}, batch size "
            f"{s.batch_size} expected, {s.epochs} epochs of {s.steps_per_epoch} steps: {s.steps} steps",
            f"{self.plan.sampling.describe()}; noise {self.plan.strategy.name}, multiplier "
            f"{self.plan.noise_multiplier:.4g}; clipping {self.clipping.style} at {self.clipping.bound:g}; "
            f"geometry {self.geometry.describe()}; denoising {self.denoiser.name}",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Private: step {self.step} of {self.steps}, {self.plan.strategy.name}, {self.plan.sampling.name}>"


def _trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise SordinoError(f"model is {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SordinoError(f"optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer")
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise SordinoError("the model has no trainable parameter; set requires_grad_(True) on what is to be trained")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in parameters.items() if id(p) not in held]
    if left_out:
        raise SordinoError(
            f"parameter {left_out[0]!r} is trainable but not in the optimizer ({len(left_out)} such); give it to the "
            "optimizer, or freeze it with requires_grad_(False): it would only use up the clip norm"
        )
    ours = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if foreign:
        raise SordinoError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's (one of shape "
            f"{tuple(foreign[0].shape)}); make the optimizer from model.parameters()"
        )
    for name, p in parameters.items():
        if not p.is_floating_point():
            raise SordinoError(f"parameter {name!r} is {p.dtype}; only floating-point parameters can be trained")
    return parameters


def _one_device(parameters: dict[str, Tensor]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise SordinoError(f"the trainable parameters lie on several devices ({names}); put the model on one")
    return devices.pop()


def _matrices(model: nn.Module, parameters: dict[str, Tensor]) -> set[str]:
    """The weights of linear layers: two-dimensional, and not a table."""
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    return {name for name, p in parameters.items() if p.dim() == 2 and id(p) not in tables}


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SordinoError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def _physical(value: int | str | None) -> tuple[int | None, bool]:
    """How many examples at once, and whether to halve that when memory runs out."""
    if value is None or value == "auto":
        return None, value == "auto"
    if isinstance(value, str):
        raise SordinoError(f"physical_batch_size={value!r} must be a whole number, 'auto' or None")
    return _count("physical_batch_size", value, 1), False


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _seed(stream: Stream, step: int, name: str, index: int) -> int:
    words = stream.words(step, name, 2 * index, 2)
    return int(words[0]) << 32 | int(words[1])


def _numbers(parts: Iterable[Any], count: int) -> StepNumbers:
    parts = list(parts)
    if not count:
        return StepNumbers(math.nan, math.nan, torch.zeros(0), 0, 0)
    return StepNumbers(
        loss=float(torch.cat([p.losses for p in parts]).nanmean()),
        clip_fraction=float(torch.cat([p.clipped for p in parts]).float().mean()),
        norms=torch.cat([p.norms for p in parts]).detach(),
        batch_size=count,
        non_finite=sum(p.bad for p in parts),
    )
