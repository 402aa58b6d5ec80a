"""A resumed run has the very same matrix, whatever this machine would optimise; another matrix is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.state.test_refused import edit, newest, refused
from tests.state.tiny import Run, T, make

import sordino
from sordino.errors import StateError
from sordino.noise import Keys
from sordino.registry import Entry
from sordino.strategies import STRATEGIES, Problem, Toeplitz
from sordino.strategies.bsr import square_root


class Optimised(Toeplitz):
    """BSR, but for what an optimiser's last digits make of it."""

    def __init__(self, name: str, steps: int, c: np.ndarray) -> None:
        super().__init__(name, steps, coefficients=c)
        self._c = c

    def definition(self) -> dict[str, np.ndarray]:
        return {"coefficients": self._c.copy()}


class Machine:
    """Where the run is at the moment."""

    digits = 0.0
    rounds = False  # does not take a definition as it is
    renames = False


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Machine]]:
    def build(argument: str, problem: Problem, definition: Mapping[str, np.ndarray] | None = None) -> Optimised:
        c = square_root(int(argument or 3)) * np.array([1.0, *[1 + Machine.digits] * (int(argument or 3) - 1)])
        if definition is not None:
            c = np.asarray(definition["coefficients"]).astype(np.float32 if Machine.rounds else np.float64)
        return Optimised(f"optimised:{argument or 3}{'x' if Machine.renames else ''}", problem.steps, c)

    entry = Entry("optimised", build, "for these tests", argument="3", capabilities={"identity": False})
    monkeypatch.setitem(STRATEGIES._entries, "optimised", entry)
    for name in ("digits", "rounds", "renames"):
        monkeypatch.setattr(Machine, name, getattr(Machine, name))
    yield Machine


BUDGET: dict[str, Any] = {"noise_multiplier": None, "delta": None, "budget": sordino.Budget(3.0, 1e-3)}
COSTS = {"a budget": BUDGET, "a noise multiplier": {"noise_multiplier": 10.0, "delta": 1e-5}}


def saved(folder: Path, **options: Any) -> Run:
    run = make(noise="optimised", seed=3, **options)
    run.save(folder)
    run.go(5)
    run.save(folder)
    run.private.close()
    return run


def weights(run: Run) -> list[bytes]:
    return [w.numpy().tobytes() for w in run.weights]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_run_goes_on_with_the_saved_matrix(tmp_path: Path, machine: type[Machine], cost: dict[str, Any]) -> None:
    whole = make(noise="optimised", seed=3, **cost)
    whole.go()
    first = saved(tmp_path, **cost)
    machine.digits = 1e-9
    run = make(noise="optimised", seed=3, **cost)
    mine = run.private.plan.strategy.definition()["coefficients"]
    run.load(tmp_path)
    found = run.private.plan
    assert (
        found.strategy.definition()["coefficients"] == first.private.plan.strategy.definition()["coefficients"]
    ).all()
    assert (found.strategy.definition()["coefficients"] != mine).any()
    assert found.noise_multiplier == first.private.plan.noise_multiplier
    run.go()
    assert weights(run) == weights(whole)
    assert run.private.guarantee().epsilon == whole.private.guarantee().epsilon
    run.save(tmp_path)


def test_the_name_may_be_found_too(tmp_path: Path, machine: type[Machine]) -> None:
    """λ without a value, say: its digits are in the name."""
    saved(tmp_path)
    run = make(noise="optimised", seed=3)
    assert run.private.plan.strategy.name == "optimised:3" and run.private.noise_asked == "optimised"
    machine.renames = True
    other = make(noise="optimised", seed=3)
    assert other.private.plan.strategy.name == "optimised:3x"
    machine.renames = False
    other.load(tmp_path)
    assert other.private.plan.strategy.name == "optimised:3"


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    refused(tmp_path, "noise was optimised:3 when the run was saved and is optimised:2 now", make(noise="optimised:2"))
    refused(tmp_path, "noise was optimised:3 when the run was saved and is bsr:3 now", make(noise="bsr:3"))


@pytest.mark.parametrize("how", ["rounds", "renames"])
def test_a_matrix_that_comes_out_otherwise_is_refused(tmp_path: Path, machine: type[Machine], how: str) -> None:
    saved(tmp_path)
    machine.digits = 1e-9
    run = make(noise="optimised", seed=3)
    setattr(machine, how, True)
    refused(tmp_path, "the saved noise='optimised:3' comes out as another matrix", run)


def test_a_matrix_that_costs_more_than_the_budget_is_refused(tmp_path: Path, machine: type[Machine]) -> None:
    saved(tmp_path, **BUDGET)
    key = Keys.from_seed(3).subkey("journal")

    def larger(state: dict[str, Any]) -> None:
        sigma = float.fromhex(state["configuration"]["noise_multiplier"])
        state["configuration"]["noise_multiplier"] = (0.999 * sigma).hex()

    edit(newest(tmp_path) / "state.json", larger, key)
    machine.digits = 1e-9
    refused(tmp_path, r"at noise multiplier .* costs epsilon=3\.00.*the budget is 3", make(noise="optimised", **BUDGET))


def test_with_a_noise_multiplier_it_must_be_the_same(tmp_path: Path, machine: type[Machine]) -> None:
    saved(tmp_path, **COSTS["a noise multiplier"])
    machine.digits = 1e-9
    refused(
        tmp_path, "noise_multiplier was 10 when the run was saved and is 9 now",
        make(noise="optimised", noise_multiplier=9.0, delta=1e-5),
    )  # fmt: skip


def test_a_save_from_before_matrices_were_saved_still_loads(tmp_path: Path) -> None:
    run = make(noise="lambda-cgd:0.9")
    run.save(tmp_path)
    run.go(4)
    run.save(tmp_path)
    run.private.close()

    def older(state: dict[str, Any]) -> None:
        state["content"]["map"] = [
            pair for pair in state["content"]["map"] if pair[0] not in ("matrix", "noise_storage")
        ]

    edit(newest(tmp_path) / "state.json", older, Keys.from_seed(3).subkey("journal"))
    again = make(noise="lambda-cgd:0.9")
    again.load(tmp_path)
    assert again.private.step == 4


@pytest.mark.parametrize("name", ["band-inv-mf:3", "band-mf:3", "band-mf-general:3", "lambda-cgd", "diagonal", "bsr:3"])
def test_every_optimised_strategy_survives_a_save(tmp_path: Path, name: str) -> None:
    """Rebuilt from what was saved, without optimising, to the bit."""
    from sordino.state import matrix

    run = make(noise=name)
    strategy = run.private.plan.strategy
    rebuilt = matrix._rebuilt(run.private.plan, strategy.name, strategy.definition(), tmp_path)
    assert rebuilt is not strategy and rebuilt.name == strategy.name
    assert np.array_equal(rebuilt.dense(), strategy.dense())
    assert [rebuilt.row_norm(t) for t in range(T)] == [strategy.row_norm(t) for t in range(T)]


def test_no_kept_noise_is_saved(tmp_path: Path) -> None:
    """Nothing of a kept vector is in any file."""
    for noise, place in (("bsr:4", "device"), ("bisr:4", "host")):
        folder = tmp_path / noise
        run = make(noise=noise, noise_storage=place, seed=None)
        run.save(folder)
        run.go(6)
        run.save(folder)
        kept = run.private.noise._kept
        assert kept is not None
        pieces = {kept.vectors[i, j : j + 2].numpy().tobytes() for i in range(3) for j in (0, 2048, 4096)}
        assert all(piece != bytes(8) for piece in pieces) and len(pieces) == 9
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) > 5
        for path in files:
            raw = path.read_bytes()
            assert not any(piece in raw or piece.hex().encode() in raw for piece in pieces), path
        state = json.loads((newest(folder) / "state.json").read_text())
        stored = {pair[0]: pair[1] for pair in state["content"]["map"]}
        assert stored["noise_storage"] == place
        run.private.close()


def test_a_definition_of_another_shape_is_one_line(tmp_path: Path) -> None:
    from sordino.state import matrix

    run = make(noise="band-mf:3")
    with pytest.raises(StateError, match="the saved noise='band-mf:3' cannot be rebuilt") as caught:
        matrix._rebuilt(run.private.plan, "band-mf:3", {"coefficients": np.array([-1.0, 2.0])}, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_matrix_of_ones_own_is_known_by_more_than_its_name(tmp_path: Path, cost: dict[str, Any]) -> None:
    """It has no definition: half a run with one matrix and half with another would be accounted for as the second."""

    def mine(past: float) -> Run:
        return make(noise=Toeplitz("mine", T, inverse=np.array([1.0, past])), **cost)

    run = mine(-0.9)
    run.save(tmp_path)
    run.go(5)
    run.save(tmp_path)
    run.private.close()
    for other in (-0.9 * (1 - 1e-6), 0.0):
        refused(tmp_path, "(is another matrix now|noise_multiplier was)", mine(other))
    same = mine(-0.9)
    same.load(tmp_path)
    whole = mine(-0.9)
    whole.go()
    same.go()
    assert weights(same) == weights(whole)
