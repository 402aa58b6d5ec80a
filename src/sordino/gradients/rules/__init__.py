"""One rule per kind of operation; `run` chooses.

A rule takes `(recorder, func, args, kwargs)` and returns the operation's result,
or NotImplemented to leave the case to the fallback, which differentiates the
operation itself example by example with `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import attention, broadcast, conv, embedding, fallback, linear, norms, recurrent

if TYPE_CHECKING:
    from ..recorder import Recorder

Rule = Callable[["Recorder", Any, tuple, dict], Any]

RULES: dict[Any, Rule] = {
    **linear.RULES,
    **conv.RULES,
    **embedding.RULES,
    **norms.RULES,
    **broadcast.RULES,
}
# written out in operations that have rules; run with the recorder on
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **attention.DECOMPOSITIONS,
    **recurrent.DECOMPOSITIONS,
    **norms.DECOMPOSITIONS,
}


def run(recorder: Recorder, func: Any, args: tuple, kwargs: dict, batched: bool) -> Any:
    """An operation in which a parameter (or a derived tensor) takes part."""
    rule = RULES.get(func) if batched else None
    if rule is not None:
        for a in args:
            if isinstance(a, Tensor) and a.is_complex():
                break
        else:
            out = rule(recorder, func, args, kwargs)
            if out is not NotImplemented:
                return out
    decomposition = DECOMPOSITIONS.get(func)
    if decomposition is not None:
        with recorder:
            return decomposition(*args, **kwargs)
    return fallback.run(recorder, func, args, kwargs) if batched else _derive(recorder, func, args, kwargs)


def _derive(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Parameters and constants only: autograd follows as usual, and the result counts as derived."""
    special = embedding.DERIVE.get(func)
    if special is not None:
        out = special(recorder, func, args, kwargs)
        if out is not NotImplemented:
            return out
    if fallback.in_place(func):
        fallback.refuse_writing(recorder, func, args[0])
        out = func(*args, **kwargs)
        for changed in (args[0], args[0]._base):
            if changed is not None:
                recorder.mark_derived(changed, (args, kwargs))
        return out
    out = func(*args, **kwargs)
    recorder.mark_derived(out, (args, kwargs))
    return out
