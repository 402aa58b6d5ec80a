"""The samplers in a run: the batches of the plan's own sampler, saved and resumed, with the guarantee that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.common import ce, make, mlp, points

import sordino

CASES = [
    ("bsr:3", "cyclic-poisson", "cyclic Poisson sampling from 3 parts at rate 0.5"),
    ("bsr:2", "cyclic-poisson:4", "cyclic Poisson sampling from 4 parts at rate 0.666667"),
    ("identity", "balls-in-bins:fresh", "with 6 bins, drawn anew every epoch"),
]


@pytest.mark.parametrize(("noise", "sampling", "said"), CASES)
def test_a_run(noise: str, sampling: str, said: str, tmp_path: Path) -> None:
    options = {"noise": noise, "sampling": sampling, "batch_size": 4, "epochs": 2, "noise_multiplier": 1.0}

    def start() -> sordino.Private:
        return make(mlp(), points(24), **options)

    whole, cut = start(), start()
    drawn = [np.asarray(whole.draw(step)) for step in range(12)]
    assert whole.steps == 12 and said in whole.plan.sampling.describe()
    if "fresh" in sampling:
        assert sorted(np.concatenate(drawn[:6])) == sorted(np.concatenate(drawn[6:])) == list(range(24))
        assert any(list(a) != list(b) for a, b in zip(drawn[:6], drawn[6:], strict=True))
    else:  # an example always has its turn in the same part
        parts = whole.plan.sampling.participation.separation
        turns = [set(np.concatenate(drawn[part::parts])) for part in range(parts)]
        assert sum(map(len, turns)) == len(set().union(*turns)) <= 24
    seen = []
    for batch in cut.batches():
        seen.append(np.asarray(batch.indices))
        cut.backward(ce(cut.model), batch)
        cut.optimizer.step()
        if cut.step == 7:
            break
    cut.save(tmp_path / "run")
    cut.close()
    again = start()
    again.load(tmp_path / "run")
    for batch in again.batches():
        seen.append(np.asarray(batch.indices))
        again.backward(ce(again.model), batch)
        again.optimizer.step()
    assert len(seen) == 12 and all(list(a) == list(b) for a, b in zip(seen, drawn, strict=True))
    assert said in str(again.guarantee()) and "add/remove one example" in str(again.guarantee())
    again.close()
