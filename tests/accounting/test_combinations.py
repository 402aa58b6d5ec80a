"""Sampling × noise: each pair has an accountant, or an error that names the part and what goes with it instead."""

from __future__ import annotations

import importlib
import re

import pytest

from sordino import Budget, Unsupported
from sordino.accounting import ACCOUNTANTS, supported
from sordino.budget import Schedule
from sordino.compare import all_samplings
from sordino.plan import declared_bands, plan
from sordino.sampling import make_sampling
from sordino.strategies import STRATEGIES, make_strategy

RUN = {"examples": 320, "batch_size": 10, "epochs": 2}  # E = 32, T = 64
BUDGET = Budget(8, 1e-4)
BANDED = {"identity", "bsr", "band-mf", "band-mf-general", "noise-curve", "diagonal"}
# What is proved; "any" is any lower-triangular C.
PROVED = {
    "poisson": "identity",
    "cyclic-poisson": "banded",
    "fixed-order": "any",
    "balls-in-bins": "any" if "monte-carlo" in ACCOUNTANTS.names() else "identity",
    "balls-in-bins:fresh": "identity",
}
NOISES = [
    e.spelled()
    for e in STRATEGIES
    if (not e.argument or e.argument.replace(".", "").isdigit()) and not e.capabilities.get("needs_spectrum")
]


def expected(sampling: str, noise: str) -> bool:
    family = noise.partition(":")[0]
    return {"identity": family == "identity", "banded": family in BANDED, "any": True}[PROVED[sampling]]


def test_the_table_knows_every_sampler() -> None:
    assert set(PROVED) == set(all_samplings())


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("sampling", PROVED)
def test_every_combination(sampling: str, noise: str) -> None:
    if expected(sampling, noise):
        if sampling == "balls-in-bins" and noise != "identity":
            schedule = Schedule(**RUN)  # the accountant has its own tests
            assert supported(make_strategy("lambda-cgd:0.9", schedule.steps), make_sampling(sampling, schedule))
            return
        p = plan(BUDGET, **RUN, noise=noise, sampling=sampling)
        assert 7.9 < p.account().epsilon <= 8.0
        return
    with pytest.raises(Unsupported) as caught:
        plan(BUDGET, **RUN, noise=noise, sampling=sampling)
    said = str(caught.value)
    assert "\n" not in said and repr(noise) in said and sampling in said
    if "goes with sampling=" in said:
        there = re.findall(r"'([^']+)'", said.partition("goes with sampling=")[2].partition(";")[0])
        assert set(there) == {s for s in PROVED if expected(s, noise)}
        kinds = said.rpartition("goes with ")[2]
        assert kinds.startswith(
            {"identity": "noise='identity'", "banded": "banded noise (identity, ", "any": "any"}[PROVED[sampling]]
        )


def test_what_is_refused_is_refused_before_it_is_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("sordino.plan")
    monkeypatch.setattr(module, "make_strategy", lambda *arguments: pytest.fail("optimised"))
    with pytest.raises(Unsupported, match="correlated noise"):
        plan(BUDGET, **RUN, noise="band-inv-mf:16", sampling="poisson")


def test_an_accountant_by_name_that_does_not_fit_says_what_it_needs() -> None:
    for accountant, needs in (("gaussian", "fixed-order"), ("convolution", "balls-in-bins"), ("bins-pld", "fresh")):
        with pytest.raises(Unsupported, match=f"{accountant}.*accountant needs sampling='.*{needs}"):
            plan(BUDGET, **RUN, accountant=accountant)
    with pytest.raises(Unsupported, match="'bsr:16' goes with sampling='cyclic-poisson' or 'fixed-order'"):
        plan(BUDGET, **RUN, noise="bsr:16", accountant="pld")


@pytest.mark.parametrize("noise", NOISES)
def test_the_bands_a_name_declares_are_those_the_matrix_has(noise: str) -> None:
    strategy = make_strategy(noise, 64)
    bands = 1 if strategy.is_identity else strategy.bands
    assert declared_bands(noise) == bands
