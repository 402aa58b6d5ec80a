"""The private step. `make_private` joins the rooms; `Private.backward` calls each once, in the order data flows.

    batch → gradients → geometry (clipped sum) → noise → ÷ B → denoising → back → p.grad

Nothing in this file knows a sampler, a strategy, a geometry or a denoiser by name.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .asked import (
    flag,
    matrices,
    one_device,
    out_of_memory,
    physical,
    refuse,
    trainable,
    unchanged,
    whole,
    wide,
)
from .batches import Batch, Batches, OnRows, Source
from .budget import Budget, Guarantee, SordinoWarning, round_up
from .code import digest_of, key_of
from .denoising import Denoiser
from .denoising import build as build_denoiser
from .denoising import check as check_denoiser
from .denoising.base import DENOISERS
from .errors import SordinoError
from .geometry import Geometry
from .geometry import geometry as build_geometry
from .gradients.check import CheckReport, check, still_zero
from .gradients.clipping import Clipping
from .gradients.engine import Clipped, Engine, Losses, check_model, without_autocast
from .guards import Buffers, losses_only, refuse_hooks, refuse_raw_gradients
from .journal import Journal
from .noise import CorrelatedNoise, Keys, Stream
from .plan import Plan, plan
from .public import Public
from .randomness import derived_seed, seed_all, seeded
from .walk import Walk

__all__ = ["Batch", "OnRows", "Private", "StepNumbers", "make_private"]


class StepNumbers:
    """What happened in one step. Private: for the console, never to be published.

    Worked out when asked for: on a GPU a number read is a wait for everything before it.
    """

    def __init__(self, parts: Sequence[Clipped], batch_size: int) -> None:
        self._parts, self.batch_size = list(parts), batch_size

    @property
    def loss(self) -> float:
        """The mean loss, NaN for an empty batch; losses that are NaN are left out."""
        return float(torch.cat([p.losses for p in self._parts]).nanmean()) if self._parts else math.nan

    @property
    def clip_fraction(self) -> float:
        return float(torch.cat([p.clipped for p in self._parts]).float().mean()) if self._parts else math.nan

    @property
    def norms(self) -> Tensor:
        """‖ĝ_i‖ before clipping."""
        return torch.cat([p.norms for p in self._parts]).detach() if self._parts else torch.zeros(0)

    @property
    def non_finite(self) -> int:
        return sum(p.bad for p in self._parts)

    def __repr__(self) -> str:
        return f"<private: loss {self.loss:.4g}, {self.clip_fraction:.0%} of {self.batch_size} clipped>"


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
    sampling: str = "poisson",
    geometry: str | Geometry | Mapping[str, Any] = "euclidean",
    denoising: str | Denoiser | Mapping[str, Any] = "none",
    clipping: str | Clipping = "flat",
    public: Public | None = None,
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
    `OnRows`) gives `augmentations` rows an example, averaged before clipping.
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
        workers=whole("workers", workers, 0),
        check=flag("check", check),
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
        self.source, self.plan, self._clipping = source, planned, clipping
        self.geometry, self.denoiser, self.public = geometry, denoiser, public
        self.examples_stated, self.workers = examples_stated, workers
        self.engine = Engine(model, parameters)
        self._step = 0
        self.attempted = -1
        self.check_wanted, self.check_report = check, None  # type: bool, CheckReport | None
        self.last: StepNumbers | None = None
        self.folder: Any = None  # set by the first save: where key and journal live
        self.remarks: list[str] = []
        self.adopt(keys)
        self.released_before = 0  # steps a loaded run had released
        self.physical_batch_size, self.halve = physical(physical_batch_size)
        self.matrices = matrices(model, parameters)
        self.walk, self.looked_over = Walk(model), False
        self.buffers = Buffers(model, self.walk)
        self._checked: set[Any] = set()  # every `losses` that was checked, and
        self.checked_code: set[str] = set()  # digests of their code, those of a loaded run included
        self._unchecked: set[Any] = set()  # those released without
        self.unchecked_before = False  # whether a loaded run had any
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
        self.noise = CorrelatedNoise(keys, self.plan.strategy)
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
                    self._check_sensitivity(losses, batch)
                sums, numbers = self._clipped_sums(losses, batch)
            with torch.no_grad(), without_autocast(self.engine.recorder.device):
                grads = self._release(sums)
        except BaseException:
            self._no_gradient()
            raise
        self._step += 1  # before anything is handed out: an interrupt from here on must not lead to this step again
        self.journal.handed_out(batch.step)
        if len(batch) and key_of(losses) not in self._checked:
            self._unchecked.add(key_of(losses))
        self.last = numbers
        for name, p in self.parameters.items():
            p.grad = grads[name]
        if self.step == self.steps and self.folder is None:
            self.keys.destroy()  # in a folder, the last save does it

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

    def _clipped_sums(self, losses: Losses, batch: Batch) -> tuple[dict[str, Tensor], StepNumbers]:
        """The sum of the clipped gradients, in the geometry's coordinates, chunk by chunk."""
        count, lo = len(batch), 0
        total: dict[str, Tensor] = {}
        parts = []
        moved = self._has_moved()
        while lo < count:
            hi = min(count, lo + (self.physical_batch_size or count))
            found = self._within_memory(functools.partial(self._chunk, losses, batch, lo, hi), hi - lo)
            if found is None:  # only this chunk is done again, in smaller ones
                continue
            for name, tensor in found.sums.items():
                if name in total:
                    total[name] += tensor
                else:
                    total[name] = tensor
            found.sums = {}
            parts.append(found)
            lo = hi
        if moved:
            self._look_again(count)
        for name, p in self.parameters.items():
            if name not in total:
                total[name] = torch.zeros(p.shape, device=p.device, dtype=wide(p.dtype))
        return {name: total[name].contiguous() for name in self.parameters}, StepNumbers(parts, count)

    def _chunk(self, losses: Losses, batch: Batch, lo: int, hi: int) -> Any:
        """Examples lo ≤ i < hi. What is random in the model is a pure function of (key, step, lo)."""
        n, device = hi - lo, self.engine.recorder.device
        self.engine.watch_reached = bool(self.zero_first)
        data = batch.part(lo, hi)
        key = Stream(self.keys.subkey("dropout")).words(batch.step, "step", 0, 8).tobytes()
        seed = derived_seed(key, "chunk", lo)
        with seeded(seed, device):

            def again(*args: Any, **kwargs: Any) -> Tensor:
                seed_all(seed, device)  # every pass over the chunk draws the same
                return self._guarded(losses)(*args, **kwargs)

            found = self.engine.clipped_sums(
                again, data, n, n * self.source.augmentations, self.geometry, self.clipping
            )
        if self.zero_first:
            self.zero_first -= {name for name, moved in self.engine.reached.items() if moved}
        return found

    def _guarded(self, losses: Losses) -> Losses:
        """`losses`, refused if it scales its losses or computes gradients of its own."""

        def run(*args: Any, **kwargs: Any) -> Tensor:
            with losses_only(self.buffers.touch):
                value = losses(*args, **kwargs)
            refuse_raw_gradients(self.parameters)
            refuse_hooks(self.parameters)
            return value

        return run

    def _within_memory(self, compute: Callable[[], Any], size: int) -> Any:
        """What `compute` gives; None if memory ran out and less is to be done at once from now on."""
        try:
            return compute()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error) or not self.halve or size == 1:
                raise
        # here the exception is gone, and with it what its traceback held in memory
        self.engine.recorder.end()
        self.physical_batch_size = max(1, size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        text = f"out of memory with {size} examples at once; going on with {self.physical_batch_size}"
        warnings.warn(text, SordinoWarning, stacklevel=4)
        return None

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
        if not len(batch) or key_of(losses) in self._checked:
            return False
        if self.checked_code and digest_of(losses, self.model) in self.checked_code:  # checked before it was saved
            self._checked.add(key_of(losses))
            return False
        if key_of(losses) not in self._unchecked:  # what was learnt of other losses may not hold for these
            self.engine.recorder.forget_layouts()
        return self.check_wanted and len(batch) > 1

    def _check_sensitivity(self, losses: Losses, batch: Batch) -> None:
        report = None
        while report is None:
            at_once = min(len(batch), self.physical_batch_size or len(batch))

            def run(at_once: int = at_once) -> CheckReport | bool:
                found = check(
                    self.engine,
                    self._guarded(losses),
                    batch.take,
                    len(batch),
                    at_once,
                    self.source.augmentations,
                    self.geometry,
                    self.clipping,
                )
                return False if found is None else found

            report = self._within_memory(run, at_once)
        if report is False:  # no finite gradient: nothing could be compared, so the next batch will do
            return
        self._checked.add(key_of(losses))
        self._unchecked.discard(key_of(losses))
        digest = digest_of(losses, self.model)
        if digest is not None:
            self.checked_code.add(digest)
        if self.check_report is None:
            self.check_report = report
            if report.zero:
                self.zero_first = set(report.zero)
                self.zero_snapshot = {name: p.detach().clone() for name, p in self.parameters.items()}
        else:
            self.check_report.numbers.update(report.numbers)
            self.check_report.complete &= report.complete

    def _has_moved(self) -> bool:
        """Whether any parameter moved since a gradient of exactly zero was met."""
        if not self.zero_first or self.zero_snapshot is None:
            return False
        return any(not torch.equal(p, self.zero_snapshot[name]) for name, p in self.parameters.items())

    def _look_again(self, count: int) -> None:
        """A gradient that was exactly zero at first (LoRA's A) must move once its partners have."""
        if not count:
            return
        if self.zero_first and len(self.zero_first) < len(self.parameters):
            raise still_zero(sorted(self.zero_first))
        self.zero_first, self.zero_snapshot = set(), None

    def restore_check(self, report: dict[str, Any] | None, snapshot: dict[str, Tensor] | None) -> None:
        """What was checked is not checked again after a resume, so that a resumed run does what the first did."""
        if report is not None:
            self.checked_code, self.unchecked_before = set(report["losses"]), report["unchecked"]
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
                if self.unchecked:
                    remarks.append("not for all losses: some met no batch of two examples to compare")
            elif released:
                remarks.append("the sensitivity check has not run: no batch so far had two examples to compare")
        redone = self.noise.first_steps[1:]
        if redone:
            remarks.append(
                f"{len(redone)} step(s) were redone with a different sum and fresh noise (from step {min(redone)}); "
                "this holds if nothing computed from the first attempt was released: no weights, no metric, and not "
                "the decision to go back"
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

    @property
    def unchecked(self) -> bool:
        """Whether anything was released by losses that no check has looked at."""
        return bool(self._unchecked) or self.unchecked_before

    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise SordinoError("a private run is not pickled or copied: two of them would use one noise twice; use save")

    __copy__ = __deepcopy__ = __reduce_ex__

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
            f"{self.plan.noise_multiplier:.4g}; clipping {self.clipping.describe()}; "
            f"geometry {self.geometry.describe()}; denoising {self.denoiser.name}",
            f"planned: ε {self.planned()} at δ {self.plan.delta:g}, {self.plan.sampling.adjacency.value}; "
            f"{sum(p.numel() for p in self.parameters.values())} trainable parameters; {self._at_once()}",
        ]
        return "\n".join(lines)

    def planned(self) -> str:
        """ε of the whole run, in words."""
        epsilon = self.plan.account().epsilon if self.plan.noise_multiplier else math.inf
        return round_up(epsilon) if math.isfinite(epsilon) else "none (no noise)"

    def _at_once(self) -> str:
        size = self.physical_batch_size
        text = "a batch is done at once" if size is None else f"at most {size} examples are done at once"
        text += " (halved when memory runs out)" if self.halve else ""
        k = self.source.augmentations
        return text + (f"; {k} augmentations of each, averaged before clipping" if k > 1 else "")

    def __repr__(self) -> str:
        return f"<Private: step {self.step} of {self.steps}, {self.plan.strategy.name}, {self.plan.sampling.name}>"
