"""Sordino: differentially private training that loses as little accuracy to the noise as is known how.

The public names are looked up when they are first used, so that ``import sordino`` costs next to nothing.

>>> import sordino
>>> sordino.Budget(epsilon=8, delta=1e-5).epsilon
8.0
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .budget import Adjacency, Budget, Guarantee, Participation, Schedule, SordinoWarning
    from .denoising import Shrinkage
    from .errors import PrivacyError, SordinoError, StateError, Unsupported
    from .geometry import AdaDPS
    from .gradients.clipping import Clipping
    from .plan import Plan, plan
    from .private import Batch, OnRows, Private, make_private
    from .public import Public

_HOME = {
    "AdaDPS": "geometry",
    "Adjacency": "budget",
    "Batch": "private",
    "Budget": "budget",
    "Clipping": "gradients.clipping",
    "Guarantee": "budget",
    "OnRows": "batches",
    "Participation": "budget",
    "Plan": "plan",
    "Private": "private",
    "PrivacyError": "errors",
    "Public": "public",
    "Schedule": "budget",
    "Shrinkage": "denoising",
    "SordinoError": "errors",
    "SordinoWarning": "budget",
    "StateError": "errors",
    "Unsupported": "errors",
    "make_private": "private",
    "plan": "plan",
}

__all__ = [
    "AdaDPS",
    "Adjacency",
    "Batch",
    "Budget",
    "Clipping",
    "Guarantee",
    "OnRows",
    "Participation",
    "Plan",
    "Private",
    "PrivacyError",
    "Public",
    "Schedule",
    "Shrinkage",
    "SordinoError",
    "SordinoWarning",
    "StateError",
    "Unsupported",
    "__version__",
    "make_private",
    "plan",
]


class _Package(ModuleType):
    """``sordino.plan`` is the function; importing the file of the same name must not put the file in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sordino' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
