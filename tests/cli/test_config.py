"""The configuration of a run: what is read, and what is said about what cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sordino.cli.config import override, parse_assignment, read_toml, validate
from sordino.errors import SordinoError

OK: dict[str, Any] = {"epsilon": 8, "delta": 1e-5}


def test_shorthands_and_tables_mean_the_same() -> None:
    short = validate(OK | {"data": "a.csv", "model": "wrn-16-4", "optimizer": "adam", "public": "b.npz"})
    long = validate(
        OK
        | {t: {k: v} for t, k, v in [("data", "path", "a.csv"), ("model", "name", "wrn-16-4")]}
        | {"optimizer": {"name": "adam"}, "public": {"path": "b.npz"}}
    )
    assert short == long
    assert validate(OK | {"model": {"name": "mlp", "hidden": [3]}}).as_toml()["model"] == {"name": "mlp", "hidden": [3]}


def test_the_toml_written_reads_back_the_same(tmp_path: Path) -> None:
    import tomli_w

    config = validate(OK | {"geometry": {"name": "adadps", "epsilon": 0.1}, "public": "x.npz", "epsilon": math.inf})
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config.as_toml()))
    assert validate(read_toml(tmp_path / "c.toml")) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"epsilonn": 3}, "unknown key 'epsilonn'; did you mean 'epsilon'?"),
        ({"optimizer": {"learning_rte": 1}}, "unknown key 'optimizer.learning_rte'; did you mean 'learning_rate'"),
        ({"data": {"pth": "x"}}, "unknown key 'data.pth'; did you mean 'path'? known: path, test, label"),
        ({"public": {"path": "x", "lables": "given"}}, "did you mean 'labels'"),
        ({"public": {}}, "public.path is missing"),
        ({"epsilon": None}, "epsilon is missing; give one of the two"),
        ({"delta": None}, "delta is missing; choose it well under"),
        ({"noise_multiplier": 1}, "epsilon and noise_multiplier are both given"),
        ({"noise_multiplier": -1, "epsilon": None}, "noise_multiplier=-1.0: it should be greater than or equal to 0"),
        ({"epsilon": "8"}, "epsilon='8': it should be a number"),
        ({"epsilon": True}, "epsilon=True: it should be a number"),
        ({"batch_size": 0}, "batch_size=0: it should be greater than or equal to 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: it should be a whole number"),
        ({"batch_size": "many"}, "batch_size='many': it should be a whole number"),
        ({"epochs": []}, "epochs=[]: it should be a whole number"),
        ({"clip_norm": 0}, "clip_norm=0.0: it should be greater than 0"),
        ({"clip_norm": math.nan}, "clip_norm=nan: it should be a finite number"),
        ({"optimizer": "sdg"}, "optimizer.name='sdg': it should be 'sgd', 'adam' or 'adamw'"),
        ({"optimizer": {"name": "adam", "momentum": 0.9}}, "momentum=0.9 goes with name='sgd', not with 'adam'"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate=-1: it should be greater than 0"),
        ({"public": {"path": "x", "labels": "true"}}, "it should be 'model', 'random' or 'given'"),
        ({"noise_storage": "gpu"}, "noise_storage='gpu': it should be 'auto', 'regenerate', 'device' or 'host'"),
        ({"data": {"validation": 1.0}}, "data.validation=1.0: it should be less than 1"),
        ({"physical_batch_size": "big"}, "physical_batch_size='big': it should be a whole number or 'auto'"),
        ({"geometry": 3}, "geometry=3: it should be text or a table"),
        ({"model": 3}, "model=3: it should be a name or the table Model"),
        ({"seed": 1.5}, "seed=1.5: it should be a whole number"),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(change: dict[str, Any], message: str) -> None:
    tables = {key: value for key, value in (OK | change).items() if value is not None}
    with pytest.raises(SordinoError) as caught:
        validate(tables, "run.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.toml: ") and "\n" not in str(caught.value)


def test_set() -> None:
    assert parse_assignment("model.hidden=[64, 32]") == ("model.hidden", [64, 32])
    assert parse_assignment("noise=lambda-cgd:0.9") == ("noise", "lambda-cgd:0.9")
    assert parse_assignment("epsilon=inf") == ("epsilon", math.inf)
    made = override({"model": "mlp", "data": "a.csv"}, [("model.hidden", [3]), ("data.label", "y"), ("epochs", 2)])
    assert made == {"model": {"name": "mlp", "hidden": [3]}, "data": {"path": "a.csv", "label": "y"}, "epochs": 2}
    with pytest.raises(SordinoError, match="must be written key=value"):
        parse_assignment("epochs")
    with pytest.raises(SordinoError, match="epochs is 3, not a table"):
        override({"epochs": 3}, [("epochs.x", 1)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match="cannot be read: No such file"):
        read_toml(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("epsilon = = 3")
    with pytest.raises(SordinoError, match=r"not valid TOML: .*line 1"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(SordinoError, match="not UTF-8"):
        read_toml(tmp_path / "latin.toml")
