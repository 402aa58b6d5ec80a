"""The private step. `make_private` joins the rooms; `Private.backward` calls each once, in the order data flows.

    batch → gradients → geometry (clipped sum) → noise → ÷ B → denoising → back → p.grad

Nothing in this file knows a sampler, a strategy, a geometry or a denoiser by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import describe, shaped
from .asked import flag, matrices, one_device, physical, refuse, trainable, unchanged, whole
from .batches import Batch, Batches, OnRows, Source
from .budget import Budget, Guarantee, SordinoWarning
from .checks import Checks
from .denoising import Denoiser
from .denoising import build as build_denoiser
from .denoising import check as check_denoiser
from .denoising.base import DENOISERS
from .errors import SordinoError
from .geometry import Geometry
from .geometry import geometry as build_geometry
from .gradients.check import CheckReport
from .gradients.clipping import Clipping
from .gradients.engine import Engine, Losses, check_model, without_autocast
from .guards import Buffers, refuse_hooks
from .journal import Journal
from .noise import CorrelatedNoise, Keys, Stream
from .numbers import StepNumbers
from .passes import check_sensitivity, clipped_sums
from .plan import Plan, plan
from .public import Public
from .walk import Walk

__all__ = ["Batch", "OnRows", "Private", "StepNumbers", "make_private"]


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
    clip_norm: float | None = None,
    noise: str = "identity",
    noise_storage: str = "auto",
    sampling: str = "poisson",
    geometry: str | Geometry | Mapping[str, Any] = "euclidean",
    denoising: str | Denoiser | Mapping[str, Any] = "none",
    clipping: str | Clipping = "flat",
    public: Public | None = None,
    spectrum: Any = None,
    exact_curvature: bool = False,
    allow_overlap: bool = False,
    examples: int | None = None,
    physical_batch_size: int | str | None = "auto",
    augment: Callable[[Any], Any] | OnRows | None = None,
    augmentations: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    pin_memory: bool = False,
    check: bool = True,
    seed: int | None = None,
    accountant: str = "auto",
) -> Private:
    """Make a training loop private. Model, optimizer and loop stay yours; see `Private`.

    Give a `budget`, or a `noise_multiplier` (with `delta` to report ε at). `clip_norm` is 1 unless said otherwise.
    `examples=N` states a public N; without it, len(dataset) is treated as public. `physical_batch_size="auto"` takes a
    batch at once and halves that when memory runs out; None never splits. `augment` (a function of an example, or
    `OnRows`) gives `augmentations` rows an example, averaged before clipping. `noise_storage` says where the past lives
    that correlated noise needs: "regenerate", "device" or "host"; the noise is the same.
    `spectrum` (a `Spectrum` or its file) shapes `noise="noise-curve:16"` by public curvature, at the SGD optimizer's
    learning rate; public examples that are private too are refused, unless `allow_overlap`.
    """
    refuse(model)
    parameters = trainable(model, optimizer)
    check_model(model)
    device = one_device(parameters)
    source = Source(
        dataset,
        collate=collate,
        augment=augment,
        augmentations=whole("augmentations", augmentations, 1),
        device=device,
        pin_memory=pin_memory,
    )
    planned = plan(
        budget,
        examples=len(source) if examples is None else whole("examples", examples, 1),
        batch_size=whole("batch_size", batch_size, 1),
        epochs=whole("epochs", epochs, 1),
        noise=noise,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        delta=delta,
        parameters=sum(p.numel() for p in parameters.values()),
        accountant=accountant,
        spectrum=None if spectrum is None else shaped.curvature(spectrum, model, optimizer, exact_curvature),
    )
    if isinstance(clipping, Clipping):
        if clip_norm is not None and clipping.bound != clip_norm:
            raise SordinoError(f"clip_norm={clip_norm} is given twice; leave it to clipping ({clipping.bound:g})")
        rule = clipping
    else:
        rule = Clipping(1.0 if clip_norm is None else clip_norm, clipping)
    rule.fits(parameters)
    if public is not None and not isinstance(public, Public):
        raise SordinoError(f"public is a {type(public).__name__}; pass public=sordino.Public(dataset, losses=...)")
    shaped.refuse_private_examples(planned, public, dataset, flag("allow_overlap", allow_overlap))
    private = Private(
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        source=source,
        planned=planned,
        clipping=rule,
        geometry=build_geometry(geometry),
        denoiser=build_denoiser(denoising),
        public=public,
        noise_asked=noise if isinstance(noise, str) else planned.strategy.name,
        noise_storage=noise_storage,
        examples_stated=examples is not None,
        physical_batch_size=physical_batch_size,
        workers=whole("workers", workers, 0),
        check=flag("check", check),
        keys=Keys.fresh() if seed is None else Keys.from_seed(seed),
    )
    if (text := shaped.remark(planned, allow_overlap)) is not None:
        private.remarks.append(text)
    return private


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
        noise_asked: str,
        noise_storage: str,
        examples_stated: bool,
        physical_batch_size: int | str | None,
        workers: int,
        check: bool,
        keys: Keys,
    ) -> None:
        self.model, self.optimizer, self.parameters = model, optimizer, parameters
        self.source, self.plan, self._clipping = source, planned, clipping
        self.geometry, self.denoiser, self.public = geometry, denoiser, public
        self.noise_asked, self.noise_storage = noise_asked, noise_storage
        self.examples_stated, self.workers = examples_stated, workers
        self.engine = Engine(model, parameters)
        self._step = 0
        self.attempted = -1
        self.checks = Checks(check, model, parameters)
        self.last: StepNumbers | None = None
        self.folder: Any = None  # set by the first save: where key and journal live
        self.remarks: list[str] = []
        self.adopt(keys)
        self.released_before = 0  # steps a loaded run had released
        self.physical_batch_size, self.halve = physical(physical_batch_size)
        self.matrices = matrices(model, parameters)
        self.walk, self.looked_over = Walk(model), False
        self.buffers = Buffers(model, self.walk)
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
        if public is not None and not geometry.needs_public:
            text = f"public= was given, but geometry={geometry.name!r} learns nothing from it; it is not used"
            warnings.warn(text, SordinoWarning, stacklevel=3)
        geometry.prepare(model, parameters, public, keys)
        if public is not None and geometry.needs_public:
            self.remarks.append(
                f"{geometry.describe()} learnt from {public.describe()}, which the guarantee does not cover"
            )

    def adopt(self, keys: Keys, journal: Journal | None = None) -> None:
        """Draw everything from these keys (a fresh run's own, or those of a run that is resumed)."""
        self.keys = keys
        self.noise = CorrelatedNoise(keys, self.plan.strategy, storage=self.noise_storage)
        self.noise.prepare(self.parameters)
        self.run = object()  # batches drawn before belong to another run
        self.journal = Journal(keys.subkey("journal")) if journal is None else journal

    # -- what runs ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps released: the number of the next one."""
        return self._step

    @property
    def steps(self) -> int:
        """T."""
        return self.plan.steps

    def batches(self) -> Batches:
        """The batches from the next step that has not been released; sized and re-iterable."""
        return Batches(self, self.workers)

    @property
    def clipping(self) -> Clipping:
        """The one owner of the clip bound: clipping and noise both read it here, and nobody can change it."""
        return self._clipping

    def draw(self, step: int) -> Sequence[int]:
        """Who is in the batch of a step."""
        drawn: Any = self.plan.sampling.draw(Stream(self.keys.subkey("sampling")), step, len(self.source))
        drawn.flags.writeable = False
        return drawn

    def token(self, step: int) -> bytes:
        """Secret bytes for the seeds of one step's augmentations; they say nothing about the key."""
        return Stream(self.keys.subkey("augmentation")).words(step, "step", 0, 8).tobytes()

    def _batch(self, step: int, indices: Sequence[int], samples: list[Any] | None = None) -> Batch:
        """The batch of a step, on the device, from its examples."""
        source, token = self.source, self.token(step)

        def fetch(positions: Sequence[int], place: int | None) -> Any:
            return source.collated(indices, samples, positions, token, place)

        return Batch(step, step // self.plan.schedule.steps_per_epoch, indices, fetch, self.run)

    def backward(self, losses: Losses, batch: Batch) -> None:
        """Put the private gradient of `batch` into every trainable parameter's `.grad`.

        `losses(*data)` gives one loss per example; it may be called several times and must have no side effects. What
        was in `.grad` is gone, so there is nothing to be zeroed. If anything is raised, nothing was released: the same
        step can be tried again and gives the same result; until then `.grad` is None.
        """
        self._check_call(losses, batch)
        self.attempted = batch.step
        self._no_gradient()  # a step that fails must not leave the last one's gradient to be applied again
        try:
            with self._watched():
                if self._to_be_checked(losses, batch):
                    check_sensitivity(self, losses, batch)
                sums, numbers = clipped_sums(self, losses, batch)
            with torch.no_grad(), without_autocast(self.engine.recorder.device):
                grads = self._release(sums)
        except BaseException:
            self._no_gradient()
            raise
        self._step += 1  # before anything is handed out: an interrupt from here on must not lead to this step again
        self.journal.handed_out(batch.step)
        if len(batch):
            self.checks.released(losses)
        self.last = numbers
        for name, p in self.parameters.items():
            p.grad = grads[name]
        if self.step == self.steps and self.folder is None:
            self.destroy()  # in a folder, the last save does it

    def _no_gradient(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The model's buffers stay as they are, or the step is refused and they are put back."""
        self.buffers.remember()
        try:
            yield
        except BaseException:
            self.buffers.restore()
            raise
        self.buffers.verify()

    def _release(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Noise, average, denoise, map back. Nothing before the journal's line is written leaves this object."""
        step, strategy, divisor = self.step, self.plan.strategy, self.plan.schedule.batch_size
        scale = self.clipping.bound * self.plan.noise_multiplier
        if scale:
            self.journal.admit(step, scale, sums, self.noise)
        self.noise.add_(sums, step, scale)
        torch._foreach_div_(list(sums.values()), divisor)
        if scale:
            self.denoiser(sums, scale * strategy.row_norm(step) / divisor, self.matrices)
        return {
            name: self.geometry.back(name, sums[name]).reshape(p.shape).to(p.dtype)
            for name, p in self.parameters.items()
        }

    # -- checks -------------------------------------------------------------------------

    def _check_call(self, losses: Losses, batch: Batch) -> None:
        if not callable(losses):
            raise SordinoError(
                f"backward's first argument is {type(losses).__name__}, not a function; pass the function that "
                "computes the losses, so that a batch can be split: private.backward(losses, batch)"
            )
        if not isinstance(batch, Batch):
            raise SordinoError(f"backward got {type(batch).__name__}, not a batch from private.batches()")
        if torch.is_inference_mode_enabled():
            raise SordinoError("backward was called under torch.inference_mode(), where nothing can be differentiated")
        if self.step >= self.steps:
            raise SordinoError(
                f"all {self.steps} planned steps are released; for more, plan a longer run with new epochs"
            )
        if not batch.drawn_for(self.run):
            raise SordinoError(
                f"{batch!r} was drawn for another run; take the batches from this one's batches(), as they come"
            )
        if batch.step != self.step:
            done = "was released already" if batch.step < self.step else "is not the next one"
            raise SordinoError(
                f"the batch of step {batch.step} {done} (next: {self.step}); call backward once for every batch, in "
                "order"
            )
        if self.folder is not None:
            self.folder.check(self.journal)
        self.journal.check()
        refuse_hooks(self.parameters)
        if self.walk.moved() or not self.looked_over:
            self.looked_over = False
            check_model(self.model)
            unchanged(self.model, self.parameters, self.engine.recorder.device)
            self.looked_over = True

    def _to_be_checked(self, losses: Losses, batch: Batch) -> bool:
        """The first batch with two examples, and whenever another function computes the losses."""
        if not len(batch) or self.checks.known(losses):
            return False
        if not self.checks.met(losses):  # what was learnt of other losses may not hold for these
            self.engine.recorder.forget_layouts()
        return self.checks.wanted and len(batch) > 1

    @property
    def check_report(self) -> CheckReport | None:
        return self.checks.report

    @property
    def zero_first(self) -> set[str]:
        """Parameters whose gradient was exactly zero so far."""
        return self.checks.zero_first

    @property
    def unchecked(self) -> bool:
        """Whether anything was released by losses that no check has looked at."""
        return self.checks.unchecked

    # -- what holds ---------------------------------------------------------------------

    def guarantee(self) -> Guarantee:
        """What holds for everything released so far, the planned total beside it."""
        released = max(self.step, self.journal.steps, self.released_before)
        return self.plan.guarantee(
            min(released, self.steps),
            clip_norm=self.clipping.bound,
            examples_stated=self.examples_stated,
            seeded=self.keys.seeded,
            remarks=describe.remarks(self, released),
        )

    def save(self, folder: str | Path, **objects: Any) -> Path:
        """Save everything needed to go on, atomically; further objects with a state_dict by keyword."""
        from .state import save

        return save(self, Path(folder), objects)

    def load(self, folder: str | Path, **objects: Any) -> None:
        """Go on from the last whole save in `folder`."""
        from .state import load

        load(self, Path(folder), objects)

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("a private run is not pickled or copied: two of them would use one noise twice; use save")

    __copy__ = __deepcopy__ = __reduce_ex__

    def close(self) -> None:
        """Let go of the key and its lock; destroys the key in memory."""
        self.journal.close()
        if self.folder is not None:
            self.folder.close()
        self.destroy()

    def destroy(self) -> None:
        """Overwrite what could remove the noise: the key, and what was kept of the noise."""
        self.keys.destroy()
        self.noise.wipe()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def describe(self) -> str:
        """What runs, in a few lines: to be printed before training."""
        return describe.describe(self)

    def planned(self) -> str:
        """ε of the whole run, in words."""
        return describe.planned_epsilon(self)

    def __repr__(self) -> str:
        return f"<Private: step {self.step} of {self.steps}, {self.plan.strategy.name}, {self.plan.sampling.name}>"
