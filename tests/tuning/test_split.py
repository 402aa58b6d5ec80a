"""One example more or less moves no other between the parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from sordino.data import load
from sordino.errors import SordinoError
from sordino.tuning import split


def test_the_parts_divide_the_whole() -> None:
    data = TensorDataset(torch.arange(2000.0), torch.arange(2000))
    parts = split(data, 0.1, seed=3)
    both = np.sort(np.concatenate([parts.train_indices, parts.validation_indices]))
    assert (both == np.arange(2000)).all()
    assert parts.examples == len(parts.train) == len(parts.train_indices)
    assert type(parts.train) is TensorDataset  # quick to read from
    assert (parts.train.tensors[1].numpy() == parts.train_indices).all()
    assert (parts.validation.tensors[0].numpy() == parts.validation_indices).all()
    assert abs(len(parts.validation) - 200) < 5 * math.sqrt(2000 * 0.1 * 0.9)


def test_it_is_a_function_of_the_seed() -> None:
    first, again, other = (split(range(500), 0.3, seed=s) for s in (0, 0, 1))
    assert (first.train_indices == again.train_indices).all()
    assert set(first.train_indices.tolist()) != set(other.train_indices.tolist())


def test_appending_an_example_moves_no_other() -> None:
    """What a permutation of the positions would not do."""
    for n in (50, 51, 300):
        less, more = split(range(n), 0.3, seed=5), split(range(n + 1), 0.3, seed=5)
        assert set(less.train_indices) <= set(more.train_indices)
        assert set(less.validation_indices) <= set(more.validation_indices)


@pytest.mark.parametrize("kind", [str, int, lambda name: name.encode()])
def test_by_key_the_order_does_not_matter(kind: Any) -> None:
    names = [str(1000 + i) for i in range(200)]
    fewer = [name for name in reversed(names) if name != "1007"]
    whole = split(names, 0.4, seed=0, key=lambda i: kind(names[i]))
    part = split(fewer, 0.4, seed=0, key=lambda i: kind(fewer[i]))
    assert {*part.train} == {*whole.train} - {"1007"}
    assert {*part.validation} == {*whole.validation} - {"1007"}
    assert abs(len(whole.validation) - 80) < 5 * math.sqrt(200 * 0.4 * 0.6)
    assert {*split(names, 0.4, seed=1, key=lambda i: names[i]).train} != {*whole.train}
    assert whole.describe().endswith("held out by key (share 0.4, seed 0)")


def test_the_records_of_a_person_stay_together() -> None:
    parts = split(range(300), 0.5, seed=0, key=lambda i: i // 3)
    assert not {i // 3 for i in parts.train} & {i // 3 for i in parts.validation}


def test_other_kinds_of_data_sets() -> None:
    digits = load("digits")
    parts = split(digits, 0.2, seed=0)
    assert type(parts.train) is type(digits) and parts.train.classes == digits.classes
    assert torch.equal(parts.validation[0][0], digits[int(parts.validation_indices[0])][0])
    viewed = split([{"x": i} for i in range(50)], 0.2, seed=0)
    assert isinstance(viewed.train, Subset) and viewed.train[0] == {"x": int(viewed.train_indices[0])}


def test_the_training_part_trains_privately() -> None:
    import sordino

    data = TensorDataset(torch.randn(60, 3), torch.zeros(60, dtype=torch.long))
    parts, model = split(data, 0.2, seed=0), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = sordino.make_private(
        model,
        optimizer,
        parts.train,
        budget=sordino.Budget(math.inf, 1e-3),
        batch_size=10,
        epochs=1,
        examples=parts.examples,
    )
    assert private.plan.schedule.examples == parts.examples < 60
    private.remarks.append("a remark")
    assert "a remark" in str(private.guarantee())


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, math.nan, "0.1", True])
def test_bad_shares(share: Any) -> None:
    with pytest.raises(SordinoError, match="share="):
        split(range(100), share, seed=0)


def test_bad_input() -> None:
    with pytest.raises(SordinoError, match="validation part of 3 examples empty"):
        split(range(3), 0.001, seed=0)
    with pytest.raises(SordinoError, match="training part of 3 examples empty"):
        split(range(3), 0.999, seed=0)
    with pytest.raises(SordinoError, match="no length"):
        split(iter([1, 2]), 0.1, seed=0)
    with pytest.raises(SordinoError, match="seed=-1"):
        split(range(9), 0.1, seed=-1)
    with pytest.raises(SordinoError, match=r"key\(0\) gave 0.5"):
        split(range(9), 0.5, seed=0, key=lambda i: 0.5)  # type: ignore[arg-type,return-value]
