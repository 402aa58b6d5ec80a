"""The sensitivity check: on real examples, does one example move the sum by no more than the bound?

Run on the first batch with at least two examples, before anything is released,
and again if `losses` is another function later. Dropout is off, autocast and TF32
too where the model works without them. Gradients are compared *before* clipping
(which would hide a gradient that is off by a factor), as norms by example and as
a sum with random weights (in which nothing cancels):

    in company       a few examples together against each of them alone
    other company    the whole chunk against the same chunk with a random half of it
                     replaced by other examples: the rest must not notice. Same
                     shapes and same random numbers, so this also holds for models
                     that draw random numbers of their own
    again            the same examples with the same seed: no state is kept between calls
    with, without    the clipped sum moves by no more than the bound

It also finds what the forward writes into the model, and parameters that no loss reaches.
Cost: two forward-backward passes over the first physical batch, about fifteen
over eight examples or fewer, once; memory as in an ordinary step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..errors import PrivacyError, SordinoError
from ..geometry.base import Geometry
from ..guards import Buffers
from ..randomness import seed_all, seeded
from .clipping import Clipping
from .engine import Clipped, Engine, Losses
from .findings import mixing, still_zero, unreached
from .precision import without_tf32
from .quiet import Quiet

EXAMPLES = 8
Take = Callable[[Sequence[int], bool], Any]  # positions in the batch, without OnRows if True


@dataclass
class CheckReport:
    """Pass or fail may be published; the numbers are private."""

    passed: bool
    complete: bool = True  # False: the model draws random numbers of its own, so no example could be looked at alone
    zero: set[str] = field(default_factory=set)  # parameters reached with a gradient of exactly zero
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """Relative to the gradients compared: what rounding may do."""

    alone: float  # between batches of different sizes, which kernels treat differently
    company: float  # between batches of one shape


EXACT64 = Tolerance(1e-8, 1e-9)
EXACT32 = Tolerance(1e-3, 2e-4)
HALF = Tolerance(0.1, 0.02)
SMALL = 1e-2  # gradients under this many clip norms are compared as if they were of this size


@dataclass(frozen=True)
class Weighted(Clipping):
    """No clipping: the sum with given weights."""

    by: Tensor = field(default_factory=lambda: torch.ones(1))

    def weights(self, norms: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        _, total, active = Clipping(1.0).weights(norms)
        return {name: self.by.to(v) for name, v in norms.items()}, total, active


def check(
    engine: Engine,
    losses: Losses,
    take: Take,
    count: int,
    at_once: int,
    augmentations: int,
    geometry: Geometry,
    clipping: Clipping,
) -> CheckReport | None:
    """`take(positions, plain)` collates examples of the batch, which has `count` of them; `at_once` are done together.

    None if nothing could be said, because no gradient was finite.
    """
    training = {module: module.training for module in engine.model.modules()}
    buffers = Buffers(engine.model, values=True)
    buffers.remember()
    try:
        with seeded(0, engine.recorder.device), without_tf32(engine.recorder.device):
            one = _Check(engine, losses, take, count, at_once, augmentations, geometry, clipping)
            one.buffers = buffers
            found = one.run()
            buffers.verify_values()
            return found
    finally:
        buffers.restore()
        for module, flag in training.items():
            module.training = flag


class _Check:
    buffers: Buffers

    def __init__(
        self, engine: Engine, losses: Losses, take: Take, count: int, at_once: int, augmentations: int,
        geometry: Geometry, clipping: Clipping,
    ) -> None:  # fmt: skip
        self.engine, self.losses, self.take, self.count = engine, losses, take, count
        self.chunk = min(count, at_once)
        self.augmentations, self.geometry, self.clipping = augmentations, geometry, clipping
        self.report = CheckReport(True)
        dtypes = {p.dtype for p in engine.parameters.values()}
        self.exact = dtypes <= {torch.float32, torch.float64}
        self.tolerance = EXACT64 if dtypes == {torch.float64} else EXACT32 if self.exact else HALF
        generator = torch.Generator().manual_seed(self.chunk)
        sign = torch.randint(0, 2, (self.chunk,), generator=generator) * 2 - 1
        self.r = (sign * (0.5 + torch.rand(self.chunk, generator=generator))).to(engine.recorder.device)
        self.replaced = torch.rand(self.chunk, generator=generator) < 0.5
        if self.chunk > 1 and (self.replaced.all() or not self.replaced.any()):
            self.replaced[0], self.replaced[1:] = True, False

    # -- passes -----------------------------------------------------------------------------

    def sums(
        self, positions: Sequence[int], seed: int, clipping: Clipping, data: Any = None, alone: bool = True
    ) -> Clipped:
        """One forward and backward over these examples; `alone` if the result must not depend on how many there are."""
        device, n = self.engine.recorder.device, len(positions)
        quiet = Quiet(device.type, self.exact, frozen=alone)

        def losses(*args: Any, **kwargs: Any) -> Tensor:
            seed_all(seed, device)  # every pass, probes of the layout too
            with quiet:
                return self.losses(*args, **kwargs)

        data = self.take(positions, alone) if data is None else data
        try:
            with seeded(seed, device):
                found = self.engine.clipped_sums(losses, data, n, n * self.augmentations, self.geometry, clipping)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not (self.exact and quiet.autocast):
                raise
            self.exact = False  # the model needs autocast: compare more loosely
            self.tolerance = HALF
            return self.sums(positions, seed, clipping, None, alone)
        if quiet.autocast and not self.exact:
            self.tolerance = HALF
        self.buffers.verify()
        return found

    def weighted(self, positions: Sequence[int], seed: int, weights: Tensor | None = None, **more: Any) -> Clipped:
        by = self.r[: len(positions)] if weights is None else weights
        return self.sums(positions, seed, Weighted(1.0, by=by), **more)

    # -- what is checked ----------------------------------------------------------------------

    def run(self) -> CheckReport | None:
        m = min(EXAMPLES, self.chunk)
        few = list(range(m))
        first = self.weighted(few, 1)
        if first.bad == m:  # or nobody could tell whose the gradient that is not finite was
            return None
        reached = dict(self.engine.reached)
        if self.count > m:
            self.weighted([self.count - 1 - i for i in few], 1)  # in between, so that kept state would show
        again = self.weighted(few, 1)
        self._compare("again", first, again, few, self.tolerance.alone)
        if self.chunk > 1:
            other = self.weighted(few, 2)
            self.report.complete = self._distance(first, other, self.r[:m]) <= self.tolerance.alone
            if self.report.complete:
                self._alone(few, first)
                self._clipped(few)
            reached = self._company(reached)
        missing = [name for name, moved in reached.items() if moved is None]
        if missing:
            raise unreached(missing)
        self.report.zero = {name for name, moved in reached.items() if not moved}
        return self.report

    def _alone(self, few: list[int], together: Clipped) -> None:
        """Each example on its own has the norm it has in company, and their weighted sum is the same."""
        each = []
        for i in few:
            try:
                each.append(self.weighted([i], 1, self.r[i : i + 1]))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, (SordinoError, torch.OutOfMemoryError)) and not _shape_of_one(error):
                    raise
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise PrivacyError(
                    f"the losses of several examples can be computed, those of one alone cannot ({text}); batches of "
                    "one occur, and each loss must depend on its own example alone: look for batch statistics, or for "
                    "squeeze() without a dimension"
                ) from error
        total: dict[str, Tensor] = {}
        for one in each:
            for name, tensor in one.sums.items():
                total[name] = total[name] + tensor if name in total else tensor
        alone = Clipped(total, torch.cat([one.norms for one in each]), together.clipped, together.losses, 0)
        self._compare("alone", together, alone, few, self.tolerance.alone)

    def _company(self, reached: dict[str, bool | None]) -> dict[str, bool | None]:
        """Half of the chunk is replaced by copies of the other half: those that stay must not notice."""
        stay = [i for i in range(self.chunk) if not self.replaced[i]]
        positions = [i if not self.replaced[i] else stay[i % len(stay)] for i in range(self.chunk)]
        weights = self.r.masked_fill(self.replaced.to(self.r.device), 0.0)
        before, after = self.take(range(self.chunk), False), self.take(positions, False)
        if not self.report.complete and _shapes(before) != _shapes(after):
            return reached  # padded differently: other random numbers would be drawn
        alike = _shapes(before) == _shapes(after)
        whole = self.weighted(range(self.chunk), 1, weights, data=before, alone=False)
        for name, moved in self.engine.reached.items():
            reached[name] = moved if not reached.get(name) else True
        half = self.weighted(positions, 1, weights, data=after, alone=False)
        self._compare("company", whole, half, stay, self.tolerance.company if alike else self.tolerance.alone)
        return reached

    def _clipped(self, few: list[int]) -> None:
        """The clipped sum with and without an example, the first and the last."""
        bound, tolerance = self.clipping.bound, self.tolerance.alone
        whole = self.sums(few, 1, self.clipping)
        for i in (few[0], few[-1]):
            rest = [j for j in few if j != i]
            without = self.sums(rest, 1, self.clipping)
            moved = _norm(_difference(whole.sums, without.sums))
            self.report.numbers[f"moved_{i}"] = moved
            if not moved <= bound * (1 + tolerance) + 1e-5 * bound * len(few):
                raise mixing(_worst(_difference(whole.sums, without.sums)))

    # -- comparing ----------------------------------------------------------------------------

    def _compare(self, what: str, one: Clipped, two: Clipped, rows: list[int], tolerance: float) -> None:
        """Norms by example and weighted sums, relative to the gradients themselves."""
        a, b = (x.norms.detach().double()[rows].cpu() for x in (one, two))
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            raise self._error(what, _worst(one.sums))
        if not bool(finite.any()):
            return
        floor = SMALL * max(float(a[finite].median()), self.clipping.bound)
        apart = float(((a - b).abs() / a.clamp(min=floor))[finite].max())
        weights = self.r.cpu().double()[: max(rows) + 1][rows][finite]
        size = max(float((weights * a[finite]).norm()), SMALL * self.clipping.bound)
        difference = _difference(one.sums, two.sums)
        off = _norm(difference) / size
        self.report.numbers[f"{what}_norms"] = apart
        self.report.numbers[f"{what}_sums"] = off
        if not (apart <= tolerance and off <= tolerance):
            raise self._error(what, _worst(difference))

    def _distance(self, one: Clipped, two: Clipped, weights: Tensor) -> float:
        norms = one.norms.double().nan_to_num(0, 0, 0)
        size = max(float((weights.double() * norms).norm()), SMALL * self.clipping.bound)
        return _norm(_difference(one.sums, two.sums)) / size

    def _error(self, what: str, name: str) -> PrivacyError:
        if what != "again":
            return mixing(name)
        return PrivacyError(
            f"sensitivity check failed at parameter {name!r}: the same examples with the same random numbers give "
            "another gradient the second time; the model or losses keeps something from one call to the next (running "
            "averages, queues, counters), or draws from a generator of its own: remove it"
        )


def _shape_of_one(error: Exception) -> bool:
    return isinstance(error, PrivacyError) and "for 1 rows" in str(error)


def _shapes(data: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_flatten(data)[0]]


def _difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] if name in a and name in b else a.get(name, b.get(name)) for name in {**a, **b}}  # type: ignore[misc]


def _norm(tensors: dict[str, Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors.values())) ** 0.5


def _worst(tensors: dict[str, Tensor]) -> str:
    return max(tensors, key=lambda name: float(tensors[name].double().norm()), default="?")


__all__ = ["CheckReport", "check", "still_zero"]
