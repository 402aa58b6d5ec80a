"""The batches of a run: drawn by the sampler, fetched, collated, moved to the model's device.

A batch can be fetched again in parts, *by example and collated again*: a collated
tensor of shape (1, T) cannot be split, but the examples behind it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from .errors import SordinoError

if TYPE_CHECKING:
    from .private import Private

Fetch = Callable[[int, int], Any]  # examples lo..hi of the batch, collated, on the device


class Batch:
    """One step's examples. `data` is None if the sampler drew nobody: the step still releases noise."""

    def __init__(self, step: int, epoch: int, indices: Sequence[int], fetch: Fetch) -> None:
        self.step, self.epoch, self.indices, self._fetch = step, epoch, indices, fetch

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def data(self) -> Any:
        """All examples collated, on the model's device; fetched when first asked for."""
        return self._fetch(0, len(self.indices)) if len(self.indices) else None

    def part(self, lo: int, hi: int) -> Any:
        """Examples lo ≤ i < hi, collated."""
        return self.data if (lo, hi) == (0, len(self.indices)) else self._fetch(lo, hi)

    def __repr__(self) -> str:
        return f"<Batch: step {self.step}, epoch {self.epoch}, {len(self)} examples>"


@dataclass(frozen=True)
class OnRows:
    """An augmentation of collated rows on the device: `augment=OnRows(f)` calls `f` on the data of K·n rows.

    `f` gets the collated data (its rows already repeated) and returns the same structure. It must treat every row alone.
    """

    function: Callable[[Any], Any]


class Source:
    """Examples by index, collated; knows how to take an example K times through `augment`."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Callable[[Any], Any] | OnRows | None = None,
        augmentations: int = 1,
        device: torch.device,
        pin_memory: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise SordinoError(
                f"dataset is a {type(dataset).__name__}, which cannot be indexed; a private step must be able to draw "
                "any example by number, so pass a map-style dataset (with __len__ and __getitem__)"
            )
        if len(dataset) == 0:
            raise SordinoError("the dataset is empty; there is nothing to train on")
        if collate is not None and not callable(collate):
            raise SordinoError(f"collate={collate!r} must be a function from a list of examples to a batch")
        if isinstance(augmentations, bool) or not isinstance(augmentations, int) or augmentations < 1:
            raise SordinoError(f"augmentations={augmentations!r} must be a whole number of at least 1")
        if augment is None and augmentations > 1:
            raise SordinoError(
                f"augmentations={augmentations} needs augment=, a function from an example to an example"
            )
        self.dataset, self.augment, self.augmentations = dataset, augment, augmentations
        self.collate = collate or default_collate
        self.device, self.pin_memory = device, pin_memory
        # tensors can be taken by rows at once, which is what collating their examples would give
        self.tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __len__(self) -> int:
        return len(self.dataset)

    def samples(self, indices: Sequence[int]) -> list[Any] | None:
        """The examples themselves; None where they can be taken straight from tensors."""
        if self.tensors is not None and not (self.augment and not isinstance(self.augment, OnRows)):
            return None
        return _examples(self.dataset, indices)

    def collated(self, indices: Sequence[int], samples: list[Any] | None, seed: Callable[[int], int]) -> Any:
        """The examples as one batch on the device; `seed(i)` is the augmentation seed of example i."""
        if samples is None:
            assert self.tensors is not None
            rows = torch.as_tensor(np.asarray(indices), dtype=torch.int64)
            data: Any = tuple(t[rows.to(t.device)] for t in self.tensors)
            data = self._move(data)
        else:
            if self.augment is not None and not isinstance(self.augment, OnRows):
                samples = self._augmented(indices, samples, seed)
            try:
                data = self.collate(samples)
            except (RuntimeError, TypeError, ValueError) as error:
                raise SordinoError(
                    f"the examples could not be collated ({str(error).splitlines()[0]}); pass collate=, a function from "
                    "a list of examples to a batch"
                ) from error
            data = self._move(list_to_tuple(data))
        if isinstance(self.augment, OnRows):
            if self.augmentations > 1:
                data = tree_map(
                    lambda t: t.repeat_interleave(self.augmentations, 0) if isinstance(t, Tensor) else t, data
                )
            with torch.random.fork_rng(devices=cuda_devices(self.device)):
                torch.manual_seed(seed(indices[0]))
                data = self.augment.function(data)
        return data

    def _augmented(self, indices: Sequence[int], samples: list[Any], seed: Callable[[int], int]) -> list[Any]:
        assert callable(self.augment)
        out = []
        with torch.random.fork_rng(devices=[]):
            for index, sample in zip(indices, samples, strict=True):
                torch.manual_seed(seed(int(index)))
                out += [self.augment(sample) for _ in range(self.augmentations)]
        return out

    def _move(self, data: Any) -> Any:
        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if self.pin_memory and self.device.type == "cuda" and leaf.device.type == "cpu":
                leaf = leaf.pin_memory()
            return leaf.to(self.device, non_blocking=self.pin_memory)

        if isinstance(data, Mapping) and type(data) is not dict:
            return {key: tree_map(move, value) for key, value in data.items()}
        return tree_map(move, data)


def list_to_tuple(data: Any) -> Any:
    """default_collate gives a list for examples that are tuples; `losses` takes a tuple's items as arguments."""
    return tuple(data) if isinstance(data, list) else data


def cuda_devices(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _examples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if not len(indices):
        return []
    many = getattr(dataset, "__getitems__", None)
    return list(many([int(i) for i in indices])) if many else [dataset[int(i)] for i in indices]


class _Rows(Dataset):
    """The user's dataset, for loader processes; no key ever travels with it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return _examples(self.dataset, indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


def _as_is(samples: list[Any]) -> list[Any]:
    return samples


class Batches:
    """Sized and re-iterable; continues at the next step that has not been released."""

    def __init__(self, private: Private, workers: int) -> None:
        self.private, self.workers = private, workers

    def __len__(self) -> int:
        return self.private.steps - self.private.step

    def __iter__(self) -> Iterator[Batch]:
        private = self.private
        loaded = self._loaded() if self.workers else None
        while private.step < private.steps:
            step = private.step
            if loaded is None:
                indices = private.draw(step)
                samples = private.source.samples(indices)
            else:
                indices, samples = next(loaded)
            yield private.batch(step, indices, samples)
            while private.step == step:  # not released: the same batch again, or an error if nobody tried
                if private.attempted != step:
                    raise SordinoError(
                        f"step {step} was not released: call private.backward(losses, batch) for every batch (an empty "
                        "one too), or leave the loop with break"
                    )
                private.attempted = -1
                yield private.batch(step, indices, samples)

    def _loaded(self) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """Examples fetched ahead by loader processes; the indices are drawn here."""
        private = self.private
        drawn: list[Sequence[int]] = []

        def draws() -> Iterator[list[int]]:
            for step in range(private.step, private.steps):
                drawn.append(private.draw(step))
                yield [int(i) for i in drawn[-1]]

        loader = DataLoader(
            _Rows(private.source.dataset), batch_sampler=draws(), collate_fn=_as_is, num_workers=self.workers
        )  # type: ignore[arg-type]
        for samples in loader:
            yield drawn.pop(0), samples
