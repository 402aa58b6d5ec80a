"""A run in words: what is printed before training, and what a guarantee adds to the plan's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .budget import round_up

if TYPE_CHECKING:
    from .private import Private


def describe(private: Private) -> str:
    """What runs, in a few lines."""
    plan, s = private.plan, private.plan.schedule
    lines = [
        f"{s.examples} examples{'' if private.examples_stated else ' (len(dataset), treated as public)'}, batch size "
        f"{s.batch_size} expected, {s.epochs} epochs of {s.steps_per_epoch} steps: {s.steps} steps",
        f"{plan.sampling.describe()}; noise {plan.strategy.name}, multiplier "
        f"{plan.noise_multiplier:.4g}; clipping {private.clipping.describe()}; "
        f"geometry {private.geometry.describe()}; denoising {private.denoiser.name}",
    ]
    if plan.noise_multiplier and not plan.strategy.is_identity and private.noise.storage is not None:
        lines.append(f"past noise: {private.noise.storage.describe()}")
    lines.append(
        f"planned: ε {planned_epsilon(private)} at δ {plan.delta:g}, {plan.sampling.adjacency.value}; "
        f"{sum(p.numel() for p in private.parameters.values())} trainable parameters; {_at_once(private)}"
    )
    return "\n".join(lines)


def planned_epsilon(private: Private) -> str:
    """ε of the whole run, in words."""
    epsilon = private.plan.account().epsilon if private.plan.noise_multiplier else math.inf
    return round_up(epsilon) if math.isfinite(epsilon) else "none (no noise)"


def _at_once(private: Private) -> str:
    size = private.physical_batch_size
    text = "a batch is done at once" if size is None else f"at most {size} examples are done at once"
    text += " (halved when memory runs out)" if private.halve else ""
    k = private.source.augmentations
    return text + (f"; {k} augmentations of each, averaged before clipping" if k > 1 else "")


def remarks(private: Private, released: int) -> tuple[str, ...]:
    """What the guarantee of `released` steps says beside the plan's own words."""
    found = list(private.remarks)
    if private.plan.noise_multiplier:
        found += private.checks.remarks(released)
    redone = private.noise.first_steps[1:]
    if redone:
        found.append(
            f"{len(redone)} step(s) were redone with a different sum and fresh noise (from step {min(redone)}); "
            "this holds if nothing computed from the first attempt was released: no weights, no metric, and not "
            "the decision to go back"
        )
    return tuple(found)
