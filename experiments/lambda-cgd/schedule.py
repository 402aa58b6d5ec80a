"""Which runs there are, which of them can be done now, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import Results, Run, next_trials

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


NOTHING_LEARNT = 0.15  # of ten classes


@dataclass(frozen=True)
class Method:
    noise: str
    sampling: str

    @property
    def lam(self) -> float | None:
        """λ, 0 for independent noise; None if the method is not a λCGD."""
        if self.noise == "identity":
            return 0.0
        name, _, argument = self.noise.partition(":")
        return float(argument) if name == "lambda-cgd" else None

    @property
    def title(self) -> str:
        name, _, argument = self.noise.partition(":")
        if self.noise == "identity":
            return "DP-SGD, Poisson" if self.sampling == "poisson" else "λ = 0, DP-SGD"
        if self.lam is not None:
            return f"λ = {argument}"
        return {"bisr": "BISR", "band-inv-mf": "BandInvMF", "blt": "BLT"}.get(name, name) + f"({argument})"


@dataclass(frozen=True)
class Setting:
    name: str
    title: str
    epsilon: float
    start: float
    methods: tuple[Method, ...]

    @property
    def sampling(self) -> str:
        """That of the methods compared; one more may stand beside them."""
        return self.methods[0].sampling


Plans = Mapping[tuple[str, str, float], Mapping[str, Any]]  # (noise, sampling, ε) → what plans.py found


class Schedule:
    """The experiment of one configuration file."""

    def __init__(self, path: Path, plans: Plans) -> None:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        self.config, self.plans = config, plans
        self.settings = [
            Setting(
                s["name"],
                s["title"],
                s["epsilon"],
                s["start"],
                (
                    *(Method(noise, s["sampling"]) for noise in config["noises"]),
                    *(Method(m["noise"], m["sampling"]) for m in s["also"]),
                ),
            )
            for s in config["setting"]
        ]

    def plan(self, setting: Setting, method: Method) -> Mapping[str, Any] | None:
        return self.plans.get((method.noise, method.sampling, setting.epsilon))

    def run(self, setting: Setting, method: Method, rate: float, seed: int) -> Run:
        """Everything that one run is, and so what its result is filed under."""
        plan = self.plan(setting, method)
        assert plan is not None
        kept = ("data", "validation", "widths", "batch_size", "epochs", "clip_norm", "delta")
        return {
            **{key: self.config[key] for key in kept},
            "noise": method.noise,
            "sampling": method.sampling,
            "epsilon": setting.epsilon,
            "noise_multiplier": plan["noise_multiplier"],
            "learning_rate": rate,
            "seed": seed,
        }

    def trials(self, setting: Setting, method: Method, results: Results) -> dict[float, float]:
        """Validation accuracy by learning rate, of the tuning runs that are in.

        A run that learnt nothing counts 0: by how much it missed chance says nothing about where to go.
        """
        found = {}
        for rate in self.config["tuning"]["rates"]:
            result = results.get(self.run(setting, method, rate, self.config["tuning"]["seed"]))
            if result is not None:
                found[rate] = result["validation"] if result["validation"] > NOTHING_LEARNT else 0.0
        return found

    def tuning(self, setting: Setting, method: Method, results: Results) -> tuple[list[float], float | None]:
        """(learning rates to try next, the one chosen)."""
        tuning = self.config["tuning"]
        return next_trials(tuning["rates"], setting.start, self.trials(setting, method, results), tuning["most"])

    def finals(self, setting: Setting, method: Method, results: Results) -> list[Mapping[str, Any]]:
        """The results of the final runs that are in, by seed."""
        if self.plan(setting, method) is None:
            return []
        _, rate = self.tuning(setting, method, results)
        found = [] if rate is None else [results.get(self.run(setting, method, rate, s)) for s in self.seeds()]
        return [result for result in found if result is not None]

    def seeds(self) -> Sequence[int]:
        return [*self.config["final"]["seeds"], *self.config["final"]["more_seeds"]]

    def available(self, results: Results) -> Iterator[Run]:
        """Setting by setting: tuning of all methods abreast, then final runs seed by seed; at last the extra seeds."""
        for setting in self.settings:
            methods = [m for m in setting.methods if self.plan(setting, m) is not None]
            wanted = {method: self.tuning(setting, method, results) for method in methods}
            for turn in range(self.config["tuning"]["most"]):
                for method, (rates, _) in wanted.items():
                    if turn < len(rates):
                        yield self.run(setting, method, rates[turn], self.config["tuning"]["seed"])
            yield from self._finals(setting, wanted, self.config["final"]["seeds"])
        for setting in self.settings:
            methods = [m for m in setting.methods if self.plan(setting, m) is not None]
            wanted = {method: self.tuning(setting, method, results) for method in methods}
            yield from self._finals(setting, wanted, self.config["final"]["more_seeds"])

    def _finals(
        self, setting: Setting, wanted: Mapping[Method, tuple[list[float], float | None]], seeds: Sequence[int]
    ) -> Iterator[Run]:
        for seed in seeds:
            for method, (_, rate) in wanted.items():
                if rate is not None:
                    yield self.run(setting, method, rate, seed)
