"""``sordino train``: one folder, what may be published apart from what may not, stop and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open

from sordino.cli.setup import held_out
from sordino.data import Arrays, load
from sordino.errors import StateError
from sordino.models import build
from sordino.private import Private

SMALL = [
    "--epsilon", 8, "--delta", "1e-5", "--batch-size", 500, "--epochs", 3, "--model", "logistic", "--learning-rate", 1,
]  # fmt: skip
PUBLISHED = {
    "step", "epoch", "epsilon", "delta", "learning_rate", "noise_multiplier", "test_loss", "test_accuracy",
}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_one_folder(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, err = run("train", *SMALL, "--out", out, "--set", "data.validation=0.2", "--json")
    assert code == 0, err
    result = json.loads(said)
    assert {p.name for p in out.iterdir()} == {
        "config.toml", "plan.json", "privacy.json", "metrics.jsonl", "model.safetensors", "checkpoints", "private",
    }  # fmt: skip
    plan, privacy = (json.loads((out / f"{name}.json").read_text()) for name in ("plan", "privacy"))
    assert plan["steps"] == privacy["steps_released"] == result["steps"] == 9
    assert privacy["epsilon"] == pytest.approx(8, abs=1e-3) and privacy["epsilon"] <= 8
    assert privacy["void"] is None and "sensitivity check passed" in privacy["statement"]
    assert result["epsilon"] == privacy["epsilon"] and result["statement"] == privacy["statement"]

    published = lines(out / "metrics.jsonl")
    assert [line["step"] for line in published] == [3, 6, 9]
    assert all(line.keys() == PUBLISHED for line in published)
    assert [line["epsilon"] for line in published] == sorted(line["epsilon"] for line in published)

    private = out / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert len(lines(private / "training.jsonl")) == 9 and len(lines(private / "validation.jsonl")) == 3
    assert lines(private / "sensitivity_check.jsonl")[0]["passed"] is True
    # No private number in anything that may be published.
    for secret in ("loss", "clip_fraction", "validation_accuracy", "non_finite"):
        assert secret not in said.replace("test_loss", "")

    with safe_open(out / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["sordino"])
    assert about["model"] == {"name": "logistic"} and about["classes"][9] == "9"
    model = build("logistic", (1, 8, 8), 10)
    model.load_state_dict(load_file(out / "model.safetensors"))
    test = load("digits", "test")
    assert test is not None
    inputs, targets = test[:]
    accuracy = float((model(inputs).argmax(1) == targets).float().mean())
    assert accuracy == pytest.approx(result["metrics"]["test_accuracy"]) and accuracy > 0.3
    assert not (out / "checkpoints" / "key").exists()  # destroyed when the run ended


def test_config_file_and_overrides(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'epsilon = 4\ndelta = 1e-5\nbatch_size = 500\nepochs = 9\nnoise = "lambda-cgd:0.5"\nsampling = "fixed-order"\n'
        'denoising = "shrinkage"\n[model]\nname = "mlp"\nhidden = [8]\n'
        '[optimizer]\nname = "adam"\nlearning_rate = 0.01\n'
    )
    code, said, err = run("train", tmp_path / "run.toml", "--epochs", 1, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(said)["steps"] == 3
    assert "usually harmful" in err  # shrinkage with correlated noise
    config = (tmp_path / "out" / "config.toml").read_text()
    assert "epochs = 1" in config and 'noise = "lambda-cgd:0.5"' in config


def test_own_data_with_names_for_classes(run: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    names = np.where(x[:, 0] > 0, "yes", "no")
    for part, rows in (("train", slice(0, 200)), ("test", slice(200, 300))):
        text = "a,b,c,d,kind\n" + "".join(
            ",".join(map(str, row)) + f",{name}\n" for row, name in zip(x[rows], names[rows], strict=True)
        )
        (tmp_path / f"{part}.csv").write_text(text)
    options = ["--epsilon", 8, "--delta", "1e-4", "--batch-size", 50, "--epochs", 4, "--model", "logistic"]
    code, said, err = run(
        "train", *options, "--data", tmp_path / "train.csv", "--test", tmp_path / "test.csv", "--set",
        "data.label=kind", "--learning-rate", 2, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(said)["metrics"]["test_accuracy"] > 0.7


def test_without_test_data_nothing_is_measured_in_public(run: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 2)
    options = ["--epsilon", 8, "--delta", "1e-3", "--batch-size", 20, "--epochs", 1, "--model", "logistic"]
    code, said, _ = run("train", *options, "--data", tmp_path / "a.npz", "--out", tmp_path / "out", "--json")
    assert code == 0 and json.loads(said)["metrics"] == {}
    assert all("test_accuracy" not in line for line in lines(tmp_path / "out" / "metrics.jsonl"))


def test_geometry_from_a_table_and_public_data(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'epsilon = 8\ndelta = 1e-5\nbatch_size = 500\nepochs = 1\nmodel = "logistic"\n'
        '[geometry]\nname = "adadps"\nepsilon = 0.1\n[public]\npath = "digits"\nlabels = "random"\n'
    )
    code, _, err = run("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert "public examples with labels drawn uniformly" in (tmp_path / "out" / "privacy.json").read_text()


def test_a_seeded_run_says_so(run: Any, tmp_path: Path) -> None:
    code, said, err = run("train", *SMALL, "--set", "seed=3", "--out", tmp_path / "a", "--json")
    assert code == 0 and json.loads(said)["void"] == "seeded" and "no guarantee (seeded)" in err
    assert run("train", *SMALL, "--set", "seed=3", "--out", tmp_path / "b")[0] == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_full_disk_is_one_line_and_loses_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.cli.folder import RunFolder

    written = RunFolder.add_metrics
    calls = []

    def full(folder: RunFolder, line: dict[str, Any]) -> None:
        calls.append(line)
        if len(calls) == 2:
            with monkeypatch.context() as patch:
                patch.setattr(
                    Path, "open", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device"))
                )
                written(folder, line)
        written(folder, line)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add_metrics", full)
        code, out, err = run("train", *SMALL, "--out", tmp_path / "out", "--json")
    assert code == 2 and out == "" and "No space left on device" in err.splitlines()[-1] and "Traceback" not in err
    code, out, err = run("train", "--resume", "--out", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["steps"] == 9
    assert [line["step"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [3, 6, 9]


def test_clip_only_has_no_guarantee(run: Any, tmp_path: Path) -> None:
    code, said, err = run("train", *SMALL, "--epsilon", "inf", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(said)
    assert result["epsilon"] is None and result["noise_multiplier"] == 0 and result["statement"].startswith("none")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "epsilon is missing"),
        (["--epsilon", 8], "delta is missing"),
        ([*SMALL, "--data", "digit"], "did you mean 'digits'"),
        ([*SMALL, "--data", "missing.npz"], "no such file or folder"),
        ([*SMALL, "--model", "wrn-16"], "did you mean 'wrn-16-4'"),
        ([*SMALL, "--set", "model.hidden=[3]"], "model='logistic' has no option 'hidden'"),
        ([*SMALL, "--noise", "lamda-cgd:0.9"], "did you mean 'lambda-cgd'"),
        ([*SMALL, "--noise", "lambda-cgd:0.9"], "no accountant is known for Poisson"),
        ([*SMALL, "--sampling", "shuffled"], "sampling='shuffled'"),
        ([*SMALL, "--geometry", "kfak"], "geometry='kfak'"),
        ([*SMALL, "--geometry", "adadps"], "learns from public data"),
        ([*SMALL, "--set", "geometry.name=adadps", "--set", "geometry.eps=1"], "has no option 'eps'; known: epsilon"),
        ([*SMALL, "--denoising", "shrink"], "denoising='shrink' is not known; did you mean 'shrinkage'"),
        ([*SMALL, "--set", "clipping=global"], "clipping"),
        ([*SMALL, "--batch-size", 5000], "batch_size=5000 is larger than the 1500 examples"),
        ([*SMALL, "--learning-rate", -1], "optimizer.learning_rate=-1.0: it should be greater than 0"),
        ([*SMALL, "--set", "optimizer.lr=1"], "unknown key 'optimizer.lr'"),
        ([*SMALL, "--set", "epochs"], "must be written key=value"),
        ([*SMALL, "--public", "missing.csv"], "no such file"),
        ([*SMALL, "--resume"], "--resume needs --out"),
        (["no.toml"], "cannot be read: No such file"),
    ],
)
def test_mistakes_leave_nothing_behind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("train", *arguments, "--json")
    assert code == 2 and out == "" and message in err
    assert err.startswith("sordino: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run("train", *SMALL, "--out", tmp_path)
    assert code == 2 and "is not empty; choose another folder" in err
    code, _, err = run("train", "--resume", "--out", tmp_path)
    assert code == 2 and "holds no run to resume" in err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    code, _, err = run("train", *SMALL, "--out", "/proc/nowhere")
    assert code == 2 and "cannot be written" in err


def test_a_resumed_run_must_be_the_same(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("train", *SMALL, "--out", out)[0] == 0
    before = (out / "model.safetensors").read_bytes()
    code, _, err = run("train", "--resume", "--out", out, "--epochs", 5)
    assert code == 2 and "epochs was 3 when the run was started and is 5 now" in err
    code, _, err = run("train", *SMALL, "--out", out)
    assert code == 2 and "is not empty; go on with it (--resume)" in err
    code, said, _ = run("train", "--resume", "--out", out, "--json")  # complete: says so again
    assert code == 0 and json.loads(said)["steps"] == 9
    assert (out / "model.safetensors").read_bytes() == before
    (out / "config.toml").write_text("epsilon = 3")
    assert run("train", "--resume", "--out", out)[0] == 2


def test_noise_may_be_kept_elsewhere_after_a_resume(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where past noise lives is an option like any other, and the only one that a resume may change."""
    small = [*SMALL, "--noise", "bisr:4", "--sampling", "fixed-order", "--set", "seed=1"]
    assert run("train", *small, "--out", tmp_path / "whole")[0] == 0
    out, saves, save = tmp_path / "out", [0], Private.save

    def crash(self: Private, *arguments: Any, **objects: Any) -> None:
        save(self, *arguments, **objects)
        saves[0] += 1
        if saves[0] == 2:
            raise StateError("the machine is gone")

    with monkeypatch.context() as m:
        m.setattr(Private, "save", crash)
        code, _, err = run("train", *small, "--set", "noise_storage=device", "--out", out)
        assert code == 2 and "the machine is gone" in err and "past noise: 3 past vectors kept in memory" in err
    assert 'noise_storage = "device"' in (out / "config.toml").read_text()
    code, _, err = run("train", "--resume", "--out", out, "--set", "noise_storage=regenerate")
    assert code == 0 and "past noise: 3 past rows drawn again at each step" in err
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("where", ["before the save", "in the save"])
def test_a_run_cut_short_before_its_first_save_is_started_again(run: Any, tmp_path: Path, where: str) -> None:
    out = tmp_path / "out"
    killed = {
        "before the save": "import sordino.private as m; m.Private.save = lambda *a: os._exit(9)",
        "in the save": "import sordino.state.saving as m; m.write = lambda *a: os._exit(9)",
    }[where]
    script = f"import os, sys; {killed}; from sordino.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "train", *map(str, SMALL), "--out", str(out)]
    assert subprocess.run(command, capture_output=True).returncode == 9
    assert (out / "config.toml").exists() and (out / "checkpoints" / "starting").exists() == (where == "in the save")
    code, _, err = run("train", "--resume", "--out", out)
    assert code == 2 and "cut short before its first save; start it without --resume" in err and err.count("\n") == 1
    assert run("train", *SMALL, "--out", out)[0] == 0
    assert not (out / "checkpoints" / "starting").exists()
    shutil.rmtree(out / "checkpoints")  # of a run that did begin
    code, _, err = run("train", *SMALL, "--out", out)
    assert code == 2 and "is not empty" in err


LONG = [
    "--epsilon", "8", "--delta", "1e-5", "--batch-size", "75", "--epochs", "6", "--learning-rate", "0.5",
    "--noise", "lambda-cgd:0.8", "--sampling", "fixed-order", "--set", "model.hidden=[32]", "--set", "seed=1",
]  # fmt: skip


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from sordino.cli import main; sys.exit(main())", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        path = out / "private" / "training.jsonl"
        if path.exists() and path.read_text().count("\n") > step:
            return
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("no progress")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_resumed_is_the_uninterrupted_run(tmp_path: Path, how: signal.Signals) -> None:
    whole = start(*LONG, "--out", tmp_path / "whole")
    stopped = start(*LONG, "--out", tmp_path / "stopped")
    wait_for_step(tmp_path / "stopped", 50, stopped)
    stopped.send_signal(how)
    out, err = stopped.communicate(timeout=60)
    if how == signal.SIGINT:
        assert stopped.returncode == 130 and "Go on with: sordino train --resume --out" in err and out == ""
        assert not (tmp_path / "stopped" / "model.safetensors").exists()
    resumed = start("--resume", "--out", tmp_path / "stopped", "--json")
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert whole.wait(timeout=120) == 0
    assert json.loads(out)["steps"] == 120
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    metrics = [lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")]
    assert metrics[0] == metrics[1]


def test_an_example_is_held_out_by_its_own_content_alone() -> None:
    data = load("digits")
    assert data is not None
    out = held_out(data, 0.2)
    assert 0.15 < out.mean() < 0.25
    fewer = data.subset([i for i in range(len(data)) if i != 700])
    np.testing.assert_array_equal(held_out(fewer, 0.2), np.delete(out, 700))
    other = data.inputs.numpy().copy()
    other[3] = 0
    changed = held_out(Arrays(other, data.targets.numpy(), data.classes), 0.2)
    np.testing.assert_array_equal(np.delete(changed, 3), np.delete(out, 3))
