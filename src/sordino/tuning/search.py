"""`tune`: trials of a function of the settings, chosen by Optuna (Akiba et al. 2019).

Trial n is a function of the seed, n and what the trials before it gave: nothing else is remembered. So a search that
goes on from its folder makes the trials that the uninterrupted one would have made, if `train` gives the same scores.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..asked import flag, shown, whole
from ..budget import SordinoWarning
from ..errors import SordinoError, Unsupported
from .records import Log, Trial, TuningRecord
from .space import SPACE, Choice, Range, Space, checked
from .split import Split

PATIENCE = 2.0  # seconds without a bar
Tick = Callable[[Sequence[Trial]], None]


def tune(
    train: Callable[[dict[str, Any]], float],
    space: Space = SPACE,
    trials: int = 30,
    seed: int = 0,
    *,
    validation: Split | str,
    folder: Any = None,
    maximize: bool = True,
    show: bool = True,
) -> TuningRecord:
    """Look for the settings with the best score; at most `trials` calls of `train`, those of earlier calls included.

    `train(settings)` trains a model with these settings and gives its score on the validation part. If it raises, or
    the score is not finite, the trial is recorded as failed, and the search goes elsewhere. `validation` is that part
    (a `Split`, or in your own words what the scores are measured on): the record's `remark()` names it. With a `folder`
    every trial is written down when it ends, and the same call goes on after a stop; more `trials` go further. One
    folder is for one `train`: that it is the same function is not checked.
    """
    if not callable(train):
        raise SordinoError(f"train={shown(train)} must be a function from settings to a score")
    space, trials, seed = checked(space), whole("trials", trials, 1), whole("seed", seed, 0)
    words = validation.describe() if isinstance(validation, Split) else validation
    if not isinstance(words, str) or not words.strip():
        raise SordinoError(f"validation={shown(validation)} must be a Split, or say what the scores are measured on")
    words = " ".join(words.split())
    _optuna()
    record = TuningRecord((), space, seed, flag("maximize", maximize), words)
    with Log(folder, record) as log, _bar(trials, len(log.trials), flag("show", show)) as tick:
        for number in range(len(log.trials), trials):
            settings = propose(log.trials, space, seed, maximize)
            trial = _try(train, number, settings)
            log.add(trial)
            tick(log.trials)
            if trial.failure is not None:
                text = f"trial {number} with {settings} failed: {trial.failure}"
                warnings.warn(text, SordinoWarning, stacklevel=2)
    record = TuningRecord(tuple(log.trials), space, seed, maximize, words)
    _ = record.best  # an error if there is none
    return record


def propose(trials: Sequence[Trial], space: Space, seed: int, maximize: bool = True) -> dict[str, Any]:
    """The settings of the next trial."""
    optuna = _optuna()
    wanted = {name: _distribution(optuna, space[name]) for name in sorted(space)}
    state = optuna.trial.TrialState
    number = int(np.random.SeedSequence([seed, len(trials)]).generate_state(1)[0])
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that one version calls experimental
            sampler = optuna.samplers.TPESampler(seed=number, multivariate=True)
            study = optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")
            for t in trials:
                # a pruned trial without a value counts as worse than all others
                end = state.PRUNED if t.score is None else state.COMPLETE
                study.add_trial(
                    optuna.trial.create_trial(state=end, value=t.score, params=t.settings, distributions=wanted)
                )
            found = study.ask(fixed_distributions=wanted).params
            return {name: found[name] for name in space}
    finally:
        optuna.logging.set_verbosity(verbosity)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise Unsupported(f"tune needs optuna ({error}); install it with: pip install 'sordino[tune]'") from None
    return optuna


def _distribution(optuna: Any, values: Range | Choice) -> Any:
    if isinstance(values, Choice):
        return optuna.distributions.CategoricalDistribution(values.values)
    kind = optuna.distributions.IntDistribution if values.whole else optuna.distributions.FloatDistribution
    return kind(values.low, values.high, log=values.log)


def _try(train: Callable[[dict[str, Any]], float], number: int, settings: dict[str, Any]) -> Trial:
    began = time.monotonic()
    try:
        value: Any = train(dict(settings))
    except Exception as error:  # whatever it was: the next settings may work
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        seconds = round(time.monotonic() - began, 3)
        return Trial(number, settings, None, text, seconds, traceback.format_exc())
    seconds = round(time.monotonic() - began, 3)
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        score = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise SordinoError(f"train gave {shown(value)} for {settings}; it must return one number, the score") from None
    if not math.isfinite(score):
        return Trial(number, settings, None, f"the score is {score}", seconds)
    return Trial(number, settings, score, None, seconds)


@contextmanager
def _bar(total: int, done: int, show: bool) -> Iterator[Tick]:
    """On stderr, if that is a terminal, from two seconds on.

    tqdm's (it comes with optuna): it lets what `train` itself shows pass, where two live displays of rich may collide.
    """
    if not show or not sys.stderr.isatty():
        yield lambda trials: None
        return
    from tqdm import tqdm

    bar = tqdm(total=total, initial=done, desc="trials", unit="trial", delay=PATIENCE, file=sys.stderr, leave=False)
    timer = threading.Timer(PATIENCE, bar.refresh)
    timer.daemon = True
    timer.start()

    def tick(trials: Sequence[Trial]) -> None:
        failed = sum(t.score is None for t in trials)
        bar.set_postfix_str(f"{failed} failed" if failed else "", refresh=False)
        bar.update()

    try:
        yield tick
    finally:
        timer.cancel()
        timer.join()
        bar.close()
