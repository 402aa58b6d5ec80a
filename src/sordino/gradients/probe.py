"""Find out in whose rows the gradient of each example arrives, before anything is recorded.

Three single examples decide between all layouts that a model can have (first,
last, second). Where that leaves a doubt, every pair of examples is told apart by
sending back, for each binary digit of the example's number, those with a one and
those with a zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import Unsupported
from .layout import NeedsProbe
from .recorder import Recorder


def singles(n: int) -> list[Tensor]:
    return [torch.arange(n) == i for i in dict.fromkeys([0, n - 1, min(1, n - 1)])]


def digits(n: int) -> Iterator[Tensor]:
    """Subsets of the examples such that any i and j are, in this order, separated by one of them.

    >>> [mask.tolist() for mask in digits(3)]
    [[False, True, False], [True, False, True], [False, False, True], [True, True, False]]
    """
    for k in range((n - 1).bit_length()):
        bit = (torch.arange(n) >> k) % 2 == 1
        yield from (bit, ~bit)


def probe(recorder: Recorder, n: int, send: Callable[[Tensor], None], missing: NeedsProbe | None = None) -> None:
    """`send(mask)` runs forward and backward with a cotangent of one for the examples in `mask`, zero elsewhere."""
    layouts, wanted = recorder.layouts, None if missing is None else missing.key
    for _ in range(50):
        layouts.start()
        try:
            for mask in singles(n):
                _send(recorder, mask, send)
            complete = n <= 3
            if not complete and layouts.unclear(wanted):
                complete = True
                for mask in digits(n):
                    _send(recorder, mask, send)
            layouts.settle(complete)
            return
        except NeedsProbe:  # a module was made one operation: begin again
            continue
        finally:
            layouts.stop()
    raise Unsupported("the model's operations could not be recorded; set physical_batch_size=1")


def _send(recorder: Recorder, mask: Tensor, send: Callable[[Tensor], None]) -> None:
    recorder.layouts.mask = mask.to(recorder.device)
    send(recorder.layouts.mask)
