"""Batches: sized, re-iterable, the same whatever the split, the retry and the number of loader processes."""

from __future__ import annotations

import os
import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, clipped_sum, close, grads, make, mlp, points, step
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import sordino
from sordino import SordinoError

NOISY = {"noise_multiplier": 1.0, "delta": 1e-6}


class Items(Dataset):
    """Examples as a list, some of them random, some of them nested."""

    def __init__(self, n: int = 24, noisy: bool = False) -> None:
        self.x, self.y = points(n).tensors
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = self.x[i]
        if self.noisy:
            x = x + torch.randn(5) + random.random() + np.random.rand()
        return x, int(self.y[i])


def flip(example):
    """An augmentation that draws from everything there is."""
    x, y = example
    return x * (1 + torch.rand(()) + random.random()) + float(np.random.rand()), y


# -- the iterator -------------------------------------------------------------------------------------


def test_sized_and_re_iterable_and_goes_on_at_the_next_step() -> None:
    model = mlp()
    private = make(model, batch_size=6, epochs=2, **NOISY)
    assert len(private.batches()) == 8 == private.steps
    seen = []
    for batch in private.batches():
        private.backward(ce(model), batch)
        seen.append((batch.step, batch.epoch, len(batch)))
        if private.step == 3:
            break
    assert len(private.batches()) == 5
    for batch in private.batches():
        private.backward(ce(model), batch)
        seen.append((batch.step, batch.epoch, len(batch)))
    assert seen == [(t, t // 4, 6) for t in range(8)]
    assert len(private.batches()) == 0 and list(private.batches()) == []


def test_a_step_that_was_not_tried_is_an_error_and_one_that_failed_comes_again() -> None:
    model = mlp()
    private = make(model, batch_size=6, **NOISY)
    batches = iter(private.batches())
    first = next(batches)
    with pytest.raises(SordinoError, match="step 0 was not released"):
        next(batches)
    batches = iter(private.batches())
    assert list(next(batches).indices) == list(first.indices)
    batch = next(iter(private.batches()))
    with pytest.raises(ZeroDivisionError):
        private.backward(lambda x, y: 1 / 0, batch)
    private.backward(ce(model), batch)


def test_two_iterators_never_give_the_examples_of_one_step_for_another() -> None:
    model = mlp()
    private = make(model, batch_size=6, **NOISY)
    a, b = iter(private.batches()), iter(private.batches())
    for iterator in (a, b, b, a, b):
        batch = next(iterator)
        assert batch.step == private.step and list(batch.indices) == list(private.draw(private.step))
        private.backward(ce(model), batch)


def test_batches_of_another_run_and_old_ones_are_refused() -> None:
    model, twin = mlp(), mlp()
    one, two = make(model, **NOISY), make(twin, **NOISY)
    foreign = next(iter(one.batches()))
    with pytest.raises(SordinoError, match="drawn for another run"):
        two.backward(ce(twin), foreign)
    one.backward(ce(model), foreign)
    with pytest.raises(SordinoError, match="step 0 was released already"):
        one.backward(ce(model), foreign)
    forged = sordino.Batch(1, 0, [0, 1], lambda positions, place: None)
    with pytest.raises(SordinoError, match="another run"):
        one.backward(ce(model), forged)


def test_the_indices_cannot_be_written_to() -> None:
    for sampling in ("poisson", "fixed-order", "balls-in-bins"):
        batch = next(iter(make(mlp(), batch_size=6, sampling=sampling).batches()))
        with pytest.raises(ValueError):
            batch.indices[0] = 5


def test_a_data_set_that_changes_its_size_is_an_error() -> None:
    model, data = mlp(), Items()
    private = make(model, data, batch_size=6, **NOISY)
    step(private, ce(model))
    data.x, data.y = data.x[:20], data.y[:20]
    with pytest.raises(SordinoError, match="had 24 examples when the run began and has 20 now"):
        next(iter(private.batches()))


def test_what_is_done_to_data_does_not_reach_the_step() -> None:
    model, twin = mlp(), mlp()
    want = step(make(twin), ce(twin))
    private = make(model)
    batch = next(iter(private.batches()))
    batch.data[0].zero_()
    private.backward(ce(model), batch)
    close(grads(model), want)


# -- how losses is called -------------------------------------------------------------------------------


Pair = namedtuple("Pair", "x y")
CALLS = {
    "a tuple": (None, lambda model: lambda x, y: ce(model)(x, y)),
    "a list": (lambda items: [torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])],
               lambda model: lambda x, y: ce(model)(x, y)),
    "a named tuple": (lambda items: Pair(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])),
                      lambda model: lambda x, y: ce(model)(x, y)),
    "a dict": (lambda items: {"x": torch.stack([x for x, _ in items]), "y": torch.tensor([y for _, y in items])},
               lambda model: lambda y, x: ce(model)(x, y)),
    "another mapping": (
        lambda items: UserDict(x=torch.stack([x for x, _ in items]), y=torch.tensor([y for _, y in items])),
        lambda model: lambda y, x: ce(model)(x, y)),
    "one tensor": (lambda items: torch.stack([torch.cat([x, torch.tensor([y])]) for x, y in items]),
                   lambda model: lambda both: ce(model)(both[:, :5], both[:, 5].long())),
}  # fmt: skip


@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("name", CALLS)
def test_losses_is_called_with_the_batch_as_it_is(name: str, physical: int | None) -> None:
    collate, losses = CALLS[name]
    model, twin = mlp(), mlp()
    want = step(make(twin), ce(twin))
    close(step(make(model, Items(), collate=collate, physical_batch_size=physical), losses(model)), want)


def test_position_ids_of_one_row_are_collated_again_not_split() -> None:
    """(1, T) cannot be split by example."""

    def collate(items):
        return {"x": torch.stack([x for x, _ in items]), "y": torch.tensor([y for _, y in items]),
                "positions": torch.arange(5)[None]}  # fmt: skip

    model, twin = mlp(), mlp()

    def losses(x: Tensor, y: Tensor, positions: Tensor) -> Tensor:
        assert positions.shape == (1, 5)
        return ce(model)(x + 0 * positions, y)

    want = step(make(twin), ce(twin))
    close(step(make(model, Items(), collate=collate, physical_batch_size=5), losses), want)


def test_tensors_taken_by_rows_are_what_collating_gives() -> None:
    a, b = mlp(), mlp()
    one = step(make(a, points(), batch_size=7), ce(a))
    two = step(make(b, Items(), batch_size=7), ce(b))
    assert all(torch.equal(one[k], two[k]) for k in one)


# -- augmentation ------------------------------------------------------------------------------------------


def test_augmentations_are_averaged_before_clipping() -> None:
    model, data = mlp(), points(6)
    rows: list[tuple[Tensor, Tensor]] = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        rows.append((x, y))
        return ce(model)(x, y)

    private = make(model, data, augment=flip, augmentations=4, clip_norm=0.3, check=False)
    got = step(private, losses)
    x, y = next((x, y) for x, y in rows if len(x) == 24)
    each = []
    for i in range(6):
        value = ce(model)(x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]).mean()
        names = [n for n, _ in model.named_parameters()]
        each.append(dict(zip(names, torch.autograd.grad(value, list(model.parameters())), strict=True)))
    close({k: 6 * g for k, g in got.items()}, clipped_sum(each, 0.3))
    assert len({tuple(r.tolist()) for r in x}) == 24 and private.last.batch_size == 6


@pytest.mark.parametrize("physical", [1, 5])
def test_an_augmentation_by_example_is_the_same_for_every_split(physical: int) -> None:
    a, b = mlp(), mlp()
    options = {"augment": flip, "augmentations": 3}
    close(step(make(a, **options), ce(a)), step(make(b, physical_batch_size=physical, **options), ce(b)))


def test_augmentations_and_random_datasets_differ_between_steps_and_repeat_in_a_retry() -> None:
    for dataset, options in ((Items(noisy=True), {}), (points(), {"augment": flip})):
        private = make(mlp(), dataset, **options)
        model, seen = private.model, []
        for batch in private.batches():
            seen.append((batch.data[0], batch.part(0, 24)[0], batch.part(3, 9)[0]))
            private.backward(ce(model), batch)
            if private.step == 2:
                break
        for whole, again, part in seen:
            assert torch.equal(whole, again) and torch.equal(whole[3:9], part)
        twin = make(mlp(), dataset, **options)
        torch.manual_seed(99)
        random.seed(99)
        first = next(iter(twin.batches()))
        assert torch.equal(first.data[0], seen[0][0])
        order = [int(i) for i in first.indices]
        assert not torch.equal(seen[0][0], seen[1][0]) and len(order) == 24


def test_rows_on_the_device() -> None:
    model = mlp()
    shapes = []

    def noisy(data):
        shapes.append(data[0].shape)
        return data[0] + torch.randn_like(data[0]), data[1]

    private = make(model, augment=sordino.OnRows(noisy), augmentations=3)
    batch = next(iter(private.batches()))
    torch.manual_seed(4)
    one = batch.data[0]
    torch.manual_seed(5)
    assert torch.equal(one, batch.part(0, 24)[0]) and one.shape == (72, 5) and shapes[0] == (72, 5)
    assert not torch.equal(one[0], one[1])
    private.backward(ce(model), batch)


def test_without_augment_rows_may_still_be_repeated_by_on_rows_only() -> None:
    with pytest.raises(SordinoError, match="augmentations=3 needs augment="):
        make(mlp(), augmentations=3)


# -- loader processes ----------------------------------------------------------------------------------------


class Where(Items):
    """Says in which process an example was made, and what that process knows."""

    def __getitem__(self, i: int):
        import gc

        from sordino.noise import Keys, Stream

        held = sum(type(o) in (Keys, Stream) for o in gc.get_objects())
        return super().__getitem__(i)[0], {"pid": os.getpid(), "held": held, "half": torch.ones(2).bfloat16()}


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_hold_no_key_and_give_the_same_batches(workers: int) -> None:
    options = {"batch_size": 6, "epochs": 2, "sampling": "poisson", "workers": workers, "augment": flip}
    torch.manual_seed(7)
    model = mlp()
    private = make(model, Items(noisy=True), augmentations=2, **options, **NOISY)
    before = torch.get_rng_state()
    got = []
    for batch in private.batches():
        if batch.data is not None:
            got.append(batch.data[0].clone())
        private.backward(ce(model), batch)
        if private.step == 3:
            break  # early: the processes end
    for batch in private.batches():
        private.backward(ce(model), batch)
        got.append(grads(model)["0.weight"])
        if private.step == 4:
            break
    assert torch.equal(before, torch.get_rng_state())
    KEPT.append(got)
    if len(KEPT) == 2:
        assert all(torch.equal(a, b) for a, b in zip(*KEPT, strict=True))


KEPT: list[list[Tensor]] = []


def test_what_a_loader_process_knows() -> None:
    """It is started afresh: neither the key nor a stream can be in its memory; tensors come back as they were."""
    private = make(mlp(), Where(), batch_size=6, sampling="fixed-order", workers=1)
    batches = iter(private.batches())
    batch = next(batches)
    about = batch.data[1]
    assert (about["pid"] != os.getpid()).all() and (about["held"] == 0).all()
    assert about["half"].dtype == torch.bfloat16 and len(batch) == 6
    batches.close()
    with_key = make(mlp(), Where(), batch_size=6)
    assert (next(iter(with_key.batches())).data[1]["held"] > 0).all()


def test_a_data_set_that_cannot_be_sent_to_a_process_is_one_line() -> None:
    data = Items()
    data.transform = lambda x: x
    private = make(mlp(), data, batch_size=6, workers=1)
    with pytest.raises(SordinoError, match="workers=0") as error:
        next(iter(private.batches()))
    assert "\n" not in str(error.value)


def test_tensors_in_memory_need_no_loader_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("sordino.batches._Ahead", never)
    model = mlp()
    step(make(model, workers=2), ce(model), 2)


# -- data that a library brings ------------------------------------------------------------------------------


class Words(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, 40, (7,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones(7, dtype=torch.long), "labels": torch.tensor(i % 2)}


def test_a_transformers_model_with_a_dict_data_set() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    model.train()

    def losses(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        out = model(input_ids=input_ids, attention_mask=attention_mask)
        return F.cross_entropy(out.logits, labels, reduction="none")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    private = make(model, Words(), optimizer=optimizer, batch_size=8, physical_batch_size=5, **NOISY)
    for batch in private.batches():
        private.backward(losses, batch)
        optimizer.step()
        if private.step == 3:
            break
    assert private.check_report.complete and all(p.grad is not None for p in model.parameters())


def test_a_peft_model_trains_its_adapters_alone() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config),
        peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1),
    )

    def losses(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").mean(1)

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = make(model, Words(), optimizer=optimizer, batch_size=8, **NOISY)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    for batch in private.batches():
        private.backward(losses, batch)
        optimizer.step()
        if private.step == 3:
            break
    assert not private.zero_first
    for name, p in model.named_parameters():
        assert (p.grad is not None) == ("lora" in name)
        assert "lora" in name or torch.equal(base[name], p)


def test_a_data_set_of_bare_tensors() -> None:
    x = torch.randn(20, 5)
    model = nn.Linear(5, 5)
    private = make(model, x, batch_size=10)
    step(private, lambda inputs: (model(inputs) - inputs).square().mean(1))
    step(make(model, TensorDataset(x), batch_size=10), lambda inputs: (model(inputs) - inputs).square().mean(1))
