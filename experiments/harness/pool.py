"""Do the most important run that is missing, on every worker, until nothing is left or the time is up.

Workers are processes that live through many runs, so that a library is imported and a GPU is opened once. Only this
process writes results: a run that is cut off leaves nothing. A run that fails is named and left for the next time, and
its process is replaced: a GPU that failed once would fail every run after it.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from .results import Results, Run, name_of

MOST_FAILURES = 5  # and more than half of all runs: then something is wrong with all of them

Function = Callable[[Run], Mapping[str, Any]]  # a run's result; picklable: defined in a module, or in the script
Available = Callable[[Results], Iterable[Run]]  # the runs that could be done now, the most important first


@dataclass
class Summary:
    """What one call of `work` did."""

    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # name → the error's last line
    cut_off: int = 0
    out_of_time: bool = False  # something was left that could have been started
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.done} runs done in {self.seconds:.0f} s"
        text += f", {len(self.failed)} failed" if self.failed else ""
        text += f", {self.cut_off} cut off" if self.cut_off else ""
        return text + (", more left" if self.out_of_time else ", nothing left" if not self.failed else "")


def work(
    available: Available,
    function: Function,
    results: Results,
    *,
    workers: int = 0,
    minutes: float = float("inf"),
    expected: float = 0.0,
    say: Callable[[str], None] = print,
    describe: Callable[[Run, Mapping[str, Any]], str] = lambda run, result: f"{dict(run)} {dict(result)}",
) -> Summary:
    """Do runs until none is available or `minutes` are over; `workers=0` does them here, one after the other.

    A run is started only if the longest run so far (`expected` seconds, before there is one) would end in time; a
    process's first run, which waits for its imports, counts only until there is another. `describe` says in a line what
    came out of a run.
    """
    pool = _Pool(available, function, results, minutes, expected, say, describe)
    return pool.alone() if workers == 0 else pool.together(workers)


class _Pool:
    def __init__(
        self,
        available: Available,
        function: Function,
        results: Results,
        minutes: float,
        expected: float,
        say: Callable[[str], None],
        describe: Callable[[Run, Mapping[str, Any]], str],
    ) -> None:
        self.available, self.function, self.results = available, function, results
        self.say, self.describe = say, describe
        self.start = time.monotonic()
        self.deadline = self.start + 60 * minutes
        self.at_first = expected
        self.longest: dict[bool, float] = {}  # seconds, by whether it was a process's first run
        self.summary = Summary()
        self.in_flight: set[str] = set()

    def next(self) -> Run | None:
        """The most important run that is neither done, nor failed, nor under way; None if there is none or no time."""
        if len(self.summary.failed) >= max(MOST_FAILURES, self.summary.done):
            return None
        for run in self.available(self.results):
            name = name_of(run)
            if run in self.results or name in self.in_flight or name in self.summary.failed:
                continue
            if time.monotonic() + self.expected > self.deadline:
                self.summary.out_of_time = True
                return None
            return run
        return None

    @property
    def expected(self) -> float:
        """Seconds that the next run may take."""
        return self.longest.get(False, self.longest.get(True, self.at_first))

    def finished(
        self, run: Run, result: Mapping[str, Any] | None, error: str, seconds: float, first: bool = False
    ) -> None:
        name = name_of(run)
        self.in_flight.discard(name)
        if result is None:
            self.summary.failed[name] = error.strip().splitlines()[-1] if error.strip() else "the process ended"
            self.say(f"FAILED {name} {dict(run)}\n{error}")
            return
        self.longest[first] = max(self.longest.get(first, 0.0), seconds)
        self.results.put(run, result)
        self.summary.done += 1
        self.say(f"{time.monotonic() - self.start:5.0f} s  {name}  took {seconds:3.0f} s  {self.describe(run, result)}")

    def alone(self) -> Summary:
        while (run := self.next()) is not None:
            start = time.monotonic()
            try:
                result, error = self.function(run), ""
            except Exception:
                result, error = None, traceback.format_exc()
            self.finished(run, result, error, time.monotonic() - start)
        self.summary.seconds = time.monotonic() - self.start
        return self.summary

    def together(self, count: int) -> Summary:
        context = multiprocessing.get_context("spawn")  # a fork could not use a GPU
        crew = [_Worker(context, self.function) for _ in range(count)]
        try:
            while True:
                for worker in crew:
                    if worker.run is None and (run := self.next()) is not None:
                        self.in_flight.add(name_of(run))
                        worker.begin(run)
                busy = {worker.pipe: worker for worker in crew if worker.run is not None}
                left = self.deadline - time.monotonic()
                if not busy or left <= 0:
                    break
                for pipe in wait(list(busy), timeout=min(left, 60.0)):
                    assert isinstance(pipe, Connection)
                    worker = busy[pipe]
                    run, seconds = worker.run, time.monotonic() - worker.since
                    assert run is not None
                    result, error = worker.answer()
                    self.finished(run, result, error, seconds, worker.fresh)
                    worker.fresh = False
                    if result is None:
                        worker.end()
                        crew[crew.index(worker)] = _Worker(context, self.function)
        finally:
            self.summary.cut_off = sum(worker.run is not None for worker in crew)
            for worker in crew:
                worker.end()
        self.summary.out_of_time |= bool(self.summary.cut_off)
        self.summary.seconds = time.monotonic() - self.start
        return self.summary


class _Worker:
    def __init__(self, context: Any, function: Function) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()  # or the end of the process would not be heard
        self.run: Run | None = None
        self.since, self.fresh = 0.0, True

    def begin(self, run: Run) -> None:
        self.run, self.since = run, time.monotonic()
        self.pipe.send(dict(run))

    def answer(self) -> tuple[Mapping[str, Any] | None, str]:
        self.run = None
        try:
            result, error = self.pipe.recv()
            return result, error
        except (EOFError, OSError):
            return None, "the process ended"

    def end(self) -> None:
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.pipe.close()


def _serve(pipe: Connection, function: Function) -> None:
    while True:
        try:
            run = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer: tuple[Any, str] = (function(run), "")
        except Exception:
            answer = (None, traceback.format_exc())
        pipe.send(answer)
