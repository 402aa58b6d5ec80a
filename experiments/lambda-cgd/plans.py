"""The noise of every method under every budget, worked out once, on any machine, and kept in plans.json.

A run takes its noise multiplier from here, so that no run waits for an accountant; `same` refuses a run whose matrix,
sampler or schedule is not the one that the multiplier was worked out for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sordino.budget import Budget, Schedule
from sordino.errors import SordinoError
from sordino.plan import Plan
from sordino.plan import plan as make_plan
from sordino.sampling import make_sampling
from sordino.strategies import Problem, Strategy, make_strategy

LOOSE = 0.95  # the least share of ε that a plan has to use

Key = tuple[str, str, float]  # noise, sampling, ε


@dataclass
class Planned:
    """What plans.json holds."""

    plans: dict[Key, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, dict[str, float]] = field(default_factory=dict)  # setting → λ of least RMSE and MaxSE


def read(path: Path) -> Planned:
    """Nothing planned yet if there is no such file."""
    if not path.exists():
        return Planned()
    content = json.loads(path.read_text(encoding="utf-8"))
    return Planned({(p["noise"], p["sampling"], p["epsilon"]): p for p in content["plans"]}, content["best_lambda"])


def write(path: Path, planned: Planned) -> None:
    content = {"plans": list(planned.plans.values()), "best_lambda": planned.best}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def strategy(plan: Mapping[str, Any]) -> Strategy:
    """The very matrix of a plan; nothing is optimised again."""
    schedule = _schedule(plan)
    participation = make_sampling(plan["sampling"], schedule).participation
    definition = {name: np.array(values) for name, values in plan["definition"].items()}
    return make_strategy(plan["noise"], Problem(schedule.steps, participation), definition or None)


def same(plan: Mapping[str, Any], running: Plan) -> None:
    """Whether a run is what was planned."""
    norms = [running.strategy.row_norm(t) for t in _marked(running.steps)]
    here = (running.schedule, running.sampling.name, running.strategy.name, running.noise_multiplier, running.delta)
    there = (_schedule(plan), plan["sampling"], plan["strategy"], plan["noise_multiplier"], plan["delta"])
    if here != there or not np.allclose(norms, plan["row_norms"], rtol=1e-9):
        raise SordinoError(f"the run is not what was planned: {here} and {there}; plan again with run.py --plan")


def complete(
    path: Path, config: Mapping[str, Any], settings: Sequence[Any], parameters: int, say: Callable[[str], None]
) -> Planned:
    """Plan what is missing, one after the other, each kept as soon as it is there."""
    planned = read(path)
    examples = config["examples"]
    for setting in settings:
        extra = [f"lambda-cgd:{lam}" for lam in config["more_lambdas"]] if setting.sampling != "fixed-order" else []
        wanted = [(m.noise, m.sampling) for m in setting.methods] + [(noise, setting.sampling) for noise in extra]
        for noise, sampling in wanted:
            if (noise, sampling, setting.epsilon) in planned.plans:
                continue
            start = time.perf_counter()
            try:
                found = make_plan(
                    Budget(setting.epsilon, config["delta"]),
                    examples=examples,
                    batch_size=config["batch_size"],
                    epochs=config["epochs"],
                    noise=noise,
                    sampling=sampling,
                    parameters=parameters,
                )
            except SordinoError as error:
                say(f"{noise}, {sampling}, ε = {setting.epsilon:g}: not planned ({error})")
                continue
            entry = _entry(noise, setting.epsilon, found)
            if entry["accounted_epsilon"] < LOOSE * setting.epsilon:  # too much noise would be no fair comparison
                used = f"only {entry['accounted_epsilon']:.3f} used"
                say(f"{noise}, {sampling}, ε = {setting.epsilon:g}: not planned ({used})")
                continue
            planned.plans[noise, sampling, setting.epsilon] = entry
            write(path, planned)
            say(
                f"{noise}, {sampling}, ε = {setting.epsilon:g}: noise multiplier {found.noise_multiplier:.4f}, "
                f"{time.perf_counter() - start:.1f} s"
            )
        best = best_lambda(planned, setting, config)
        if best:
            planned.best[setting.name] = best
            write(path, planned)
            say(f"{setting.title}: λ of least RMSE {best['rmse']:.4f}, of least MaxSE {best['max_se']:.4f}")
    return planned


def best_lambda(planned: Planned, setting: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """The λ of least RMSE, and of least MaxSE, over [0, 1].

    In fixed order every λ's noise is known in closed form. With an amplifying sampler ln σ is smooth in ln(1−λ): a
    cubic through the λ planned, by least squares since each was found by sampling. Needs five of them.
    """
    from scipy.optimize import minimize_scalar

    schedule = Schedule(examples=config["examples"], batch_size=config["batch_size"], epochs=config["epochs"])
    participation = make_sampling(setting.sampling, schedule).participation
    logs: Callable[[float], float]
    if setting.sampling == "fixed-order":

        def logs(lam: float) -> float:
            return math.log(make_strategy(f"lambda-cgd:{lam!r}", schedule.steps).sensitivity(participation))

    else:
        known = {
            float(noise.partition(":")[2]): plan["noise_multiplier"]
            for (noise, sampling, epsilon), plan in planned.plans.items()
            if noise.startswith("lambda-cgd:") and (sampling, epsilon) == (setting.sampling, setting.epsilon)
        }
        if len(known) < 5:
            return {}
        at = np.array([-math.log1p(-lam) for lam in known])
        cubic = np.polynomial.Polynomial.fit(at, np.log(list(known.values())), 3)

        def logs(lam: float) -> float:
            return float(cubic(-math.log1p(-lam)))

    def least(error: str) -> float:
        def loss(x: float) -> float:
            lam = -math.expm1(-x)
            made = make_strategy(f"lambda-cgd:{lam!r}", schedule.steps)
            return math.log(made.rmse() if error == "rmse" else made.max_se()) + logs(lam)

        widest = -math.log1p(-0.999) if setting.sampling == "fixed-order" else float(at.max())
        return float(-math.expm1(-minimize_scalar(loss, bounds=(0.0, widest), method="bounded").x))

    return {"rmse": least("rmse"), "max_se": least("max_se")}


def _entry(noise: str, epsilon: float, found: Plan) -> dict[str, Any]:
    kept = ("noise_multiplier", "delta", "rmse", "max_se", "sensitivity", "accountant", "failure_probability")
    kept += ("examples", "batch_size", "epochs", "steps", "parameters", "noise_vectors_stored")
    kept += ("noise_vectors_regenerated",)
    said = found.as_dict()
    return {
        "noise": noise,
        "sampling": found.sampling.name,
        "epsilon": epsilon,
        "strategy": found.strategy.name,
        "accounted_epsilon": said["epsilon"],
        **{key: said[key] for key in kept},
        "row_norms": [found.strategy.row_norm(t) for t in _marked(found.steps)],
        "definition": {name: np.asarray(array).tolist() for name, array in found.strategy.definition().items()},
    }


def _schedule(plan: Mapping[str, Any]) -> Schedule:
    return Schedule(examples=plan["examples"], batch_size=plan["batch_size"], epochs=plan["epochs"])


def _marked(steps: int) -> list[int]:
    """Steps whose noise tells one matrix from another."""
    return sorted({0, min(1, steps - 1), min(20, steps - 1), steps // 2, steps - 1})
