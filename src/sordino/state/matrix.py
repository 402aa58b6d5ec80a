"""The very same matrix: a resumed run takes its strategy from the save, whatever would be optimised today.

An optimiser's last digits depend on the machine and its libraries, and the noise
multiplier on them. So a save holds the arrays that the strategy was found to be, and a
load rebuilds it from them; what it costs at the saved noise multiplier is then accounted
for once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SordinoError, StateError
from ..plan import Plan
from ..strategies import Problem, Strategy, make_strategy

if TYPE_CHECKING:
    from ..private import Private

SLACK = 1e-6  # of ε: what the last digits of a matrix may make of it


def matrix_state(private: Private) -> dict[str, Any]:
    strategy = private.plan.strategy
    definition = dict(strategy.definition())
    said = {} if definition else {"probe": probe(strategy), "steps": strategy.steps}
    return {"asked": private.noise_asked, "name": strategy.name, "definition": definition, **said}


def restored_plan(private: Private, state: Mapping[str, Any], noise_multiplier: float, place: object) -> Plan:
    """The plan of `private` with the saved strategy and noise multiplier, if that answers what is asked now."""
    plan, now = private.plan, private.plan.strategy
    name, definition = state["name"], state["definition"]
    if name == now.name and _same(definition, now.definition()):
        if "probe" in state and state.get("steps", now.steps) == now.steps and not _alike(state["probe"], probe(now)):
            raise StateError(
                f"{place}: noise={name!r} is another matrix now than the one of that name that was saved; pass the "
                "matrix that was saved"
            )
        return plan
    if name != now.name and state["asked"] != private.noise_asked:
        return plan  # another one altogether, which the comparison of configurations says
    strategy = _rebuilt(plan, name, definition, place)
    found = replace(plan, strategy=strategy, noise_multiplier=noise_multiplier)
    wanted = plan.budget.epsilon
    if math.isfinite(wanted) and not found.account().epsilon <= wanted * (1 + SLACK):
        raise StateError(
            f"{place}: the saved noise={name!r} at noise multiplier {noise_multiplier:.8g} costs "
            f"epsilon={found.account().epsilon:.6g} by this version's accountant, and the budget is {wanted:g}; finish "
            "the run with the version that began it"
        )
    return found if math.isfinite(wanted) else replace(found, noise_multiplier=plan.noise_multiplier)


def _rebuilt(plan: Plan, name: str, definition: Mapping[str, np.ndarray], place: object) -> Strategy:
    try:
        strategy = make_strategy(name, Problem(plan.steps, plan.sampling.participation), definition)
        same = strategy.name == name and _same(definition, strategy.definition())
    except SordinoError as error:
        raise StateError(f"{place}: the saved noise={name!r} cannot be rebuilt ({error}); use an older save") from None
    if not same:
        raise StateError(
            f"{place}: the saved noise={name!r} comes out as another matrix, {strategy.name!r}; finish the run with "
            "the version that began it"
        )
    return strategy


def probe(strategy: Strategy) -> np.ndarray:
    """Nine numbers to which every entry of C⁻¹ adds: two matrices of one's own may have one name."""
    t = np.arange(strategy.steps, dtype=np.float64)
    x = strategy.solve(np.cos(t * t))
    return np.array([float(np.linalg.norm(x)), *(float(np.cos((k + 0.5) * t) @ x) for k in range(8))])


def _alike(a: object, b: np.ndarray) -> bool:
    """Up to the rounding of another machine."""
    found = np.asarray(a, dtype=np.float64)
    return found.shape == b.shape and bool((np.abs(found - b) <= 1e-9 * max(found[0], b[0]) * 10.0).all())


def _same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """To the bit."""
    if a.keys() != b.keys():
        return False
    pairs = [(np.asarray(a[key]), np.asarray(b[key])) for key in a]
    return all(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)
