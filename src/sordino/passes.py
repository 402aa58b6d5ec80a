"""The sum of a batch's clipped gradients, in as many passes as memory asks for.

What is random in the model is a pure function of (key, step, first example of the chunk),
so a step done again with the same chunks gives the same sum.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .asked import out_of_memory, wide
from .batches import Batch
from .budget import SordinoWarning
from .gradients.check import CheckReport, check
from .gradients.engine import Losses
from .guards import losses_only, refuse_hooks, refuse_raw_gradients
from .noise import Stream
from .numbers import StepNumbers
from .randomness import derived_seed, seed_all, seeded

if TYPE_CHECKING:
    from .private import Private


def clipped_sums(private: Private, losses: Losses, batch: Batch) -> tuple[dict[str, Tensor], StepNumbers]:
    """The sum of the clipped gradients, in the geometry's coordinates, chunk by chunk."""
    count, lo = len(batch), 0
    total: dict[str, Tensor] = {}
    parts = []
    moved = private.checks.moved()
    while lo < count:
        hi = min(count, lo + (private.physical_batch_size or count))
        found = _within_memory(private, functools.partial(_chunk, private, losses, batch, lo, hi), hi - lo)
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
        private.checks.look_again(count)
    for name, p in private.parameters.items():
        if name not in total:
            total[name] = torch.zeros(p.shape, device=p.device, dtype=wide(p.dtype))
    return {name: total[name].contiguous() for name in private.parameters}, StepNumbers(parts, count)


def check_sensitivity(private: Private, losses: Losses, batch: Batch) -> None:
    """The check on this batch, in chunks as large as memory allows."""
    report = None
    while report is None:
        at_once = min(len(batch), private.physical_batch_size or len(batch))

        def run(at_once: int = at_once) -> CheckReport | bool:
            found = check(
                private.engine,
                _guarded(private, losses),
                batch.take,
                len(batch),
                at_once,
                private.source.augmentations,
                private.geometry,
                private.clipping,
            )
            return False if found is None else found

        report = _within_memory(private, run, at_once)
    if report is not False:  # else no finite gradient: nothing could be compared, so the next batch will do
        private.checks.passed(losses, report)


def _chunk(private: Private, losses: Losses, batch: Batch, lo: int, hi: int) -> Any:
    """Examples lo ≤ i < hi. What is random in the model is a pure function of (key, step, lo)."""
    engine, checks, n = private.engine, private.checks, hi - lo
    engine.watch_reached = bool(checks.zero_first)
    data = batch.part(lo, hi)
    key = Stream(private.keys.subkey("dropout")).words(batch.step, "step", 0, 8).tobytes()
    seed = derived_seed(key, "chunk", lo)
    device = engine.recorder.device
    with seeded(seed, device):

        def again(*args: Any, **kwargs: Any) -> Tensor:
            seed_all(seed, device)  # every pass over the chunk draws the same
            return _guarded(private, losses)(*args, **kwargs)

        rows = n * private.source.augmentations
        found = engine.clipped_sums(again, data, n, rows, private.geometry, private.clipping)
    if checks.zero_first:
        checks.zero_first -= {name for name, moved in engine.reached.items() if moved}
    return found


def _guarded(private: Private, losses: Losses) -> Losses:
    """`losses`, refused if it scales its losses or computes gradients of its own."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with losses_only(private.buffers.touch):
            value = losses(*args, **kwargs)
        refuse_raw_gradients(private.parameters)
        refuse_hooks(private.parameters)
        return value

    return run


def _within_memory(private: Private, compute: Callable[[], Any], size: int) -> Any:
    """What `compute` gives; None if memory ran out and less is to be done at once from now on."""
    try:
        return compute()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error) or not private.halve or size == 1:
            raise
    # here the exception is gone, and with it what its traceback held in memory
    private.engine.recorder.end()
    private.physical_batch_size = max(1, size // 2)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    text = f"out of memory with {size} examples at once; going on with {private.physical_batch_size}"
    warnings.warn(text, SordinoWarning, stacklevel=4)
    return None
