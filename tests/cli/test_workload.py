"""The options that say what the noise is summed into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sordino import SordinoError
from sordino.cli.workload import learning_rates, workload
from sordino.strategies import PREFIX_SUM, Workload

ASKED = ("--examples", 1000, "--batch-size", 100, "--epochs", 2, "--epsilon", 8, "--delta", "1e-5")
NOISE = ("--noise", "lambda-cgd:0.9", "--sampling", "fixed-order", "--json")


def test_nothing_said_is_the_prefix_sum() -> None:
    assert workload(0.0, 0.0, None, None, 10) is PREFIX_SUM
    assert workload(0.9, 0.0, None, None, 10) == Workload(momentum=0.9)
    assert workload(0.0, 0.01, 0.5, None, 10) == Workload(shrink=0.995)


def test_schedules(tmp_path: Path) -> None:
    assert learning_rates("constant", 3) == (1.0, 1.0, 1.0)
    cosine = learning_rates("cosine:0.1", 100)
    assert cosine[0] == 1.0 and cosine[50] == pytest.approx(0.55) and 0.1 < cosine[-1] < 0.101
    assert list(cosine) == sorted(cosine, reverse=True)
    (tmp_path / "rates.txt").write_text("0.5, 0.25\n0.125\n")
    assert learning_rates(str(tmp_path / "rates.txt"), 3) == (0.5, 0.25, 0.125)


def test_the_options_reach_the_plan(run: Any, tmp_path: Path) -> None:
    rates = tmp_path / "rates.txt"
    rates.write_text("\n".join(str(1 - t / 20) for t in range(20)))
    options = ("--momentum", 0.5, "--weight-decay", 0.1, "--learning-rate", 0.2, "--learning-rates", rates)
    found = json.loads(run("plan", *ASKED, *NOISE, *options, "--objective", "max-se")[1])
    assert found["workload"]["momentum"] == 0.5 and found["workload"]["shrink"] == pytest.approx(0.98)
    assert found["workload"]["learning_rates"] == {"first": 1.0, "largest": 1.0, "last": pytest.approx(0.05)}
    assert found["objective"] == "max-se"
    plain = json.loads(run("plan", *ASKED, *NOISE)[1])
    assert plain["noise_multiplier"] == found["noise_multiplier"] and plain["rmse"] != found["rmse"]
    text = run("plan", *ASKED, *NOISE[:-1], *options)[1]
    assert "the sum with momentum 0.5 and weights shrunk by 0.98 a step and a learning-rate schedule" in text
    best = json.loads(run("plan", *ASKED, "--noise", "lambda-cgd", "--sampling", "fixed-order", "--json")[1])
    assert 0 < best["lambda"] == best["lambda_rmse"] < best["lambda_max_se"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weight-decay", 0.1), "needs --learning-rate"),
        (("--weight-decay", 10, "--learning-rate", 1), "must be from 0 to 1"),
        (("--momentum", 1), "momentum=1"),
        (("--momentum", 2), "momentum=2.0"),
        (("--learning-rates", "cosin"), "neither a schedule (constant, linear, cosine) nor a file"),
        (("--learning-rates", "cosine:2"), "from 0 to 1"),
        (("--learning-rates", "cosine:x"), "from 0 to 1"),
        (("--objective", "mean"), "objective='mean' is not known"),
    ],
)
def test_mistakes_are_one_line(run: Any, options: tuple[object, ...], message: str) -> None:
    code, out, err = run("plan", *ASKED, *NOISE, *options)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rates"
    path.write_text("1 2 three")
    with pytest.raises(SordinoError, match="cannot be read"):
        learning_rates(str(path), 3)
    path.write_text("1 2")
    with pytest.raises(SordinoError, match="2 numbers for 3 steps"):
        learning_rates(str(path), 3)
