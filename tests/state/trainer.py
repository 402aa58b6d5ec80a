"""Runs in a process of its own: trains, saves, resumes, and dies where it is told to.

Reads one JSON request a line and answers with one: each is carried out in a forked child, so that importing torch is
paid once and a SIGKILL hits nothing else. The server itself uses no torch threads.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = sys.argv[1:3]

import torch
from tests.state.tiny import Run, make

from sordino.errors import SordinoError
from sordino.state import digest, has_save


def opened(folder: str, **options: Any) -> Run:
    """The run in the folder, or a new one there."""
    run = make(**options)
    if has_save(folder):
        run.load(Path(folder))
    else:
        run.save(Path(folder))
    return run


def train(
    folder: str, every: int, log: str, die_at: int | None = None, half: bool = False, durable: bool = True,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end, saving every few steps, writing down what the guarantee says before every step."""
    operations = Durable(die_at, half) if durable else None
    run = opened(folder, **options)
    private = run.private
    with open(log, "a") as file:
        spent(run, file)
        for batch in private.batches():
            private.backward(run.losses, batch)
            run.optimizer.step()
            run.schedule.step()
            spent(run, file)
            if private.step % every == 0 or private.step == private.steps:
                run.save(Path(folder))
    found = private.guarantee()
    return {
        "digest": digest(private.parameters),
        "optimizer": str(run.optimizer.state_dict()),
        "rng": torch.get_rng_state().sum().item(),
        "epsilon": found.epsilon,
        "remarks": list(found.remarks),
        "operations": operations and operations.count,
    }


def spent(run: Run, file: Any) -> None:
    found = run.private.guarantee()
    file.write(json.dumps([run.private.step, found.steps_released, found.epsilon]) + "\n")
    file.flush()


class Durable:
    """Counts what reaches the disk, and kills the process just before the n-th of it, or in the middle."""

    def __init__(self, die_at: int | None, half: bool) -> None:
        self.count, self.die_at, self.half = 0, die_at, half
        for name in ("fsync", "write", "rename", "replace", "link", "unlink", "mkdir", "ftruncate", "rmdir"):
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        original = getattr(os, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.die_at:
                if name == "write" and self.half:
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(os, name, counted)


def full_disk(folder: str, room: int, which: str) -> dict[str, Any]:
    """A save, or a journal line, that meets the end of the disk; then there is room again."""
    run = make()
    messages = []
    if which != "first save":
        run.save(Path(folder))
    run.go(3)
    if which == "journal":
        room += (Path(folder) / "journal").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        run.go(4) if which == "journal" else run.save(Path(folder))
    except SordinoError as error:
        messages.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = sorted(p.name for p in Path(folder).iterdir()) if Path(folder).exists() else []
    step = run.private.step
    run.go(6)
    run.save(Path(folder))
    run.private.close()
    again = make()
    again.load(Path(folder))
    again.go()
    return {
        "messages": messages, "left": left, "step": step, "digest": digest(again.private.parameters),
        "remarks": list(again.private.guarantee().remarks),
    }  # fmt: skip


def try_load(folder: str) -> dict[str, Any]:
    try:
        make().load(Path(folder))
    except SordinoError as error:
        return {"message": str(error)}
    return {"message": None}


def announced(folder: str) -> dict[str, Any]:
    """Everything a run says while it is saved and resumed, with a secret key."""
    import logging

    out = tempfile.TemporaryFile("w+")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    logging.basicConfig(level=0, stream=sys.stderr)
    logging.getLogger("sordino.tests").debug("this log is looked at")
    texts = []
    run = make(seed=None)
    run.save(Path(folder))
    key = (Path(folder) / "key").read_text().split()[2]
    run.go(3)
    for thing in (run.private, run.private.keys, run.private.journal, run.private.folder, run.private.noise):
        texts += [repr(thing), str(thing), repr(vars(thing)) if hasattr(thing, "__dict__") else ""]
    texts += [run.private.describe(), str(run.private.guarantee()), json.dumps(run.private.guarantee().as_dict())]
    run.save(Path(folder))
    run.private.close()
    again = make(seed=None)
    again.load(Path(folder))
    again.optimizer.param_groups[0]["lr"] *= 2
    again.go(5)
    again.save(Path(folder))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    out.seek(0)
    return {"texts": texts, "key": key, "output": out.read()}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                result = globals()[request["function"]](**request["arguments"])
            except BaseException:
                result = {"error": traceback.format_exc()}
            Path(out.name).write_text(json.dumps(result))
            os._exit(0)
        if request["kill_after"] is not None:
            time.sleep(request["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        text = out.read()
        result = json.loads(text) if text and not killed else {}
        return {**result, "killed": killed, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # everything is imported once, here
        train(f"{warm}/run", 100, f"{warm}/log", durable=False)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
