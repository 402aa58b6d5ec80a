"""The sensitivity check: on real examples, does one example move the sum by no more than the bound?

Run once, on the first batch with at least two examples, before anything is
released. It compares the clipped sum of a few examples with and without one of
them, and that difference with the example's own clipped gradient computed alone
by ordinary autograd. Whatever mixes examples, misattributes a gradient or
misses a use shows up here. It also finds buffers that the forward changes and
parameters that no loss reaches. Cost: about a dozen forward-backward passes over
at most eight examples, plus the probe (three passes over the first batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import PrivacyError, SordinoError
from ..geometry.base import Geometry
from .clipping import Clipping
from .engine import Clipped, Engine, Losses

EXAMPLES = 8


@dataclass
class CheckReport:
    """Pass or fail may be published; the numbers are private."""

    passed: bool
    complete: bool = True  # False: the model draws random numbers of its own, so gradients could not be compared
    zero: set[str] = field(default_factory=set)  # parameters reached with a gradient of exactly zero
    numbers: dict[str, float] = field(default_factory=dict)


class NoDropout(TorchFunctionMode):
    """Dropout of every spelling does nothing."""

    _same = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._same:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        elif func is F.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])
        elif func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) and len(args) > 6:
            args = (*args[:6], False, *args[7:]) if isinstance(args[6], bool) else args
        return func(*args, **kwargs)


def check(
    engine: Engine,
    losses: Losses,
    part: Callable[[int, int], Any],
    count: int,
    augmentations: int,
    geometry: Geometry,
    clipping: Clipping,
) -> CheckReport:
    """`part(lo, hi)` gives the collated examples of the first batch, which has `count` of them."""
    model = engine.model
    m = min(count, EXAMPLES)

    def quiet(*args: Any, **kwargs: Any) -> Tensor:
        with NoDropout():
            return losses(*args, **kwargs)

    def sums(lo: int, hi: int) -> Clipped:
        n = hi - lo
        return engine.clipped_sums(quiet, part(lo, hi), n, n * augmentations, geometry, clipping)

    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        devices = [engine.recorder.device] if engine.recorder.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(1)
            whole = sums(0, m)
            uses = dict(engine.reached)
            torch.manual_seed(2)
            again = sums(0, m)
            _buffers(model, before)
            _reached(uses)
            report = CheckReport(True, zero={name for name, moved in uses.items() if not moved})
            tolerance = _tolerance(engine)
            if _distance(whole.sums, again.sums) > tolerance * clipping.bound:
                report.complete = False
                return report
            for i, rest in ((0, (1, m)), (m - 1, (0, m - 1))):
                alone = sums(i, i + 1)
                without = sums(*rest)
                difference = {
                    name: whole.sums.get(name, 0) - without.sums.get(name, 0) for name in {**whole.sums, **without.sums}
                }
                _compare(difference, alone, clipping.bound, tolerance, report, i)
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                if name in before and not _same(b, before[name]):
                    b.copy_(before[name])
    return report


def _compare(
    difference: dict[str, Any], alone: Clipped, bound: float, tolerance: float, report: CheckReport, i: int
) -> None:
    """(sum with) − (sum without) must be the example's own clipped gradient, of norm at most the bound."""
    tensors = {name: d for name, d in difference.items() if isinstance(d, Tensor)}
    moved = float(torch.stack([d.double().square().sum() for d in tensors.values()]).sum().sqrt()) if tensors else 0.0
    off = {
        name: float((d - alone.sums[name]).norm()) if name in alone.sums else float(d.norm())
        for name, d in tensors.items()
    }
    apart = sum(v * v for v in off.values()) ** 0.5
    report.numbers[f"moved_{i}"] = moved
    report.numbers[f"apart_{i}"] = apart
    if not (apart <= tolerance * bound and moved <= bound * (1 + tolerance)):
        worst = max(off, key=lambda name: off[name])
        ratio = max(moved, apart) / bound
        raise PrivacyError(
            f"sensitivity check failed at parameter {worst!r}: taking one example out of the batch changes the sum by "
            f"something other than that example's own clipped gradient (up to {ratio:.3g} clip norms); the loss of one "
            "example depends on the others: look for batch statistics, a mean over the batch, or a divisor counted "
            "over the batch"
        )


def _tolerance(engine: Engine) -> float:
    dtypes = {p.dtype for p in engine.parameters.values()}
    if dtypes <= {torch.float64}:
        return 1e-6
    exact = dtypes <= {torch.float32, torch.float64} and engine.recorder.device.type == "cpu"
    return 2e-3 if exact and not torch.is_autocast_enabled("cpu") else 0.1


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[n] - b[n]).norm()) ** 2 if n in a and n in b else float("inf") for n in {**a, **b}) ** 0.5


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan())
                                                             and torch.equal(a.nan_to_num(), b.nan_to_num())))  # fmt: skip


def _buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    changed = [name for name, b in model.named_buffers() if name not in before or not _same(b, before[name])]
    if changed:
        raise PrivacyError(
            f"buffer {changed[0]!r} changes in the forward pass, and would be released as it is with the model; freeze "
            "it (running statistics: .eval(); observers and codebooks: switch their updates off)"
        )


def _reached(reached: dict[str, bool]) -> None:
    missing = [name for name, moved in reached.items() if moved is None]
    if missing:
        names = ", ".join(repr(name) for name in missing[:5]) + (" …" if len(missing) > 5 else "")
        raise SordinoError(
            f"no loss reaches {len(missing)} trainable parameter(s): {names}; freeze what is not used with "
            "requires_grad_(False), or make the loss depend on it"
        )


def still_zero(first: set[str], now: dict[str, bool], moved: bool) -> None:
    """After the first update: whoever is still at exactly zero while the others moved trains nothing."""
    stuck = sorted(name for name in first if now.get(name) is False)
    if stuck and moved and len(stuck) < len(now):
        names = ", ".join(repr(name) for name in stuck[:5]) + (" …" if len(stuck) > 5 else "")
        raise SordinoError(
            f"the gradient of {names} is exactly zero, before and after the first update; it trains nothing: freeze it "
            "with requires_grad_(False), or look for a multiplication by zero in front of it"
        )
