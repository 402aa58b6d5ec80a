"""The batches of a run: drawn by the sampler, fetched, augmented, collated, moved to the model's device.

A batch can be fetched again in parts, *by example and collated again*: a collated
tensor of shape (1, T) cannot be split, but the examples behind it can.

Everything random on the way (a dataset that crops, `augment`) is a pure function of
(key, step, example): the same rows whatever the split, the retry or `workers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from .asked import flag, shown, whole
from .errors import SordinoError
from .loading import Job, Rows, as_is, examples, unpack
from .randomness import derived_seed, seeded

if TYPE_CHECKING:
    from .private import Private

# positions in the batch, and where the first of them counts as lying (None: without OnRows) → collated, on the device
Fetch = Callable[[Sequence[int], "int | None"], Any]


class Batch:
    """One step's examples. `data` is None if the sampler drew nobody: the step still releases noise.

    `data` is a tuple (then `losses(*data)` is called; a list from a collate function counts as one), a mapping
    (`losses(**data)`) or anything else (`losses(data)`).
    """

    def __init__(self, step: int, epoch: int, indices: Sequence[int], fetch: Fetch, run: object = None) -> None:
        self.step, self.epoch, self.indices = step, epoch, indices
        self._fetch, self._run = fetch, run

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def data(self) -> Any:
        """All examples collated, on the model's device; fetched when first asked for."""
        return self._fetch(range(len(self)), 0) if len(self) else None

    def part(self, lo: int, hi: int) -> Any:
        """Examples lo ≤ i < hi, collated anew: nothing that was done to `data` shows here."""
        return self._fetch(range(lo, hi), lo)

    def take(self, positions: Sequence[int], plain: bool = False) -> Any:
        """The examples at these positions, in this order; `plain` leaves `OnRows` functions out."""
        return self._fetch(positions, None if plain else 0)

    def drawn_for(self, run: object) -> bool:
        return self._run is run

    def __repr__(self) -> str:
        return f"<Batch: step {self.step}, epoch {self.epoch}, {len(self)} examples>"


@dataclass(frozen=True)
class OnRows:
    """An augmentation of collated rows on the device: `augment=OnRows(f)` calls `f` on the data of K·n rows.

    `f` gets the collated data, its tensors' rows already repeated K times, and returns the same structure. It must
    treat every row alone. Its random numbers are seeded by the first example's place in the batch, like dropout: a
    retry draws the same, another split of the batch does not. For rows that no split changes, give a function of one
    example instead.
    """

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SordinoError(f"OnRows({self.function!r}) must be given a function of the collated data")


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
        what: str = "dataset",
    ) -> None:
        self.size = _size(dataset, what)
        if collate is not None and not callable(collate):
            raise SordinoError(f"collate={shown(collate)} must be a function from a list of examples to a batch")
        augmentations = whole("augmentations", augmentations, 1)
        if augment is None and augmentations > 1:
            raise SordinoError(
                f"augmentations={augmentations} needs augment=, a function from an example to an example"
            )
        if augment is not None and not callable(augment) and not isinstance(augment, OnRows):
            raise SordinoError(f"augment={shown(augment)} must be a function from an example to an example, or OnRows")
        self.dataset, self.augmentations, self.what = dataset, augmentations, what
        self.each = None if isinstance(augment, OnRows) else augment
        self.on_rows = augment.function if isinstance(augment, OnRows) else None
        self.collate, self.default = collate or default_collate, collate is None
        self.device, self.pin_memory = device, flag("pin_memory", pin_memory)
        # tensors can be taken by rows at once, which is what collating their examples would give
        self.tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __len__(self) -> int:
        """The number of examples; it may not change during a run."""
        now = len(self.dataset)
        if now != self.size:
            raise SordinoError(
                f"the {self.what} had {self.size} examples when the run began and has {now} now; it may not change"
            )
        return self.size

    @property
    def in_memory(self) -> bool:
        return self.tensors is not None and self.each is None

    def samples(self, indices: Sequence[int], token: bytes) -> list[Any] | None:
        """The examples themselves, each K times through `augment`; None where rows are taken straight from tensors."""
        if self.in_memory or not len(indices):
            return None
        repeats = self.augmentations if self.each is not None else 1
        with seeded(0):
            return examples(self.dataset, self.each, repeats, Job(0, tuple(int(i) for i in indices), token))

    def collated(
        self,
        indices: Sequence[int],
        samples: list[Any] | None,
        positions: Sequence[int],
        token: bytes,
        place: int | None,
    ) -> Any:
        """The examples at `positions` of a step's indices as one batch on the device."""
        if samples is None:
            assert self.tensors is not None
            rows = torch.as_tensor(np.asarray(indices)[list(positions)], dtype=torch.int64)
            data: Any = self._move(tuple(t[rows.to(t.device)] for t in self.tensors))
        else:
            k = self.augmentations if self.each is not None else 1
            chosen = [samples[i * k + j] for i in positions for j in range(k)]
            try:
                data = self.collate(chosen)
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise SordinoError(
                    f"the examples could not be collated ({text}); pass collate=, a function from a list of examples "
                    "to a batch"
                ) from error
            # default_collate gives a list for examples that are tuples
            data = self._move(tuple(data) if isinstance(data, list) else data)
        if self.on_rows is not None:
            if self.augmentations > 1:
                data = tree_map(
                    lambda t: t.repeat_interleave(self.augmentations, 0) if isinstance(t, Tensor) else t, data
                )
            if place is not None:
                with seeded(derived_seed(token, "rows", place), self.device):
                    data = self.on_rows(data)
        return data

    def _move(self, data: Any) -> Any:
        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if self.pin_memory and self.device.type == "cuda" and leaf.device.type == "cpu":
                    leaf = leaf.pin_memory()
                return leaf.to(self.device, non_blocking=self.pin_memory)
            if isinstance(leaf, Mapping):  # a mapping that torch does not know, such as a tokenizer's
                return {key: tree_map(move, value) for key, value in leaf.items()}
            return leaf

        return tree_map(move, data)


def _size(dataset: Any, what: str) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise SordinoError(f"{what} is a DataLoader; pass its data set (loader.dataset): batches are drawn here")
    if isinstance(dataset, (str, bytes, Mapping)):
        raise SordinoError(f"{what} is a {kind}, not a data set; pass one with __len__ and __getitem__ by number")
    if isinstance(dataset, tuple) and any(isinstance(t, (Tensor, np.ndarray)) for t in dataset):
        raise SordinoError(
            f"{what} is a tuple of {len(dataset)} arrays, which would be {len(dataset)} examples; pass "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise SordinoError(
            f"{what} is a {kind}, which cannot be indexed; a private step must be able to draw any example by number, "
            "so pass a map-style dataset (with __len__ and __getitem__)"
        )
    try:
        size = len(dataset)
    except TypeError as error:
        raise SordinoError(f"{what} is a {kind} without a length ({str(error).splitlines()[0]})") from None
    if size == 0:
        raise SordinoError(f"the {what} is empty; there is nothing to train on")
    return size


class Batches:
    """Sized and re-iterable; continues at the next step that has not been released."""

    def __init__(self, private: Private, workers: int) -> None:
        self.private, self.workers = private, workers

    def __len__(self) -> int:
        return self.private.steps - self.private.step

    def __iter__(self) -> Iterator[Batch]:
        private = self.private
        ahead: _Ahead | None = None
        try:
            while private.step < private.steps:
                step = private.step
                if self.workers and not private.source.in_memory:
                    if ahead is None or not ahead.fits():  # somebody else released steps, or loaded a run
                        if ahead is not None:
                            ahead.close()
                        ahead = _Ahead(private, self.workers)
                    batch = ahead.next()
                else:
                    indices = private.draw(step)
                    batch = private._batch(step, indices, private.source.samples(indices, private.token(step)))
                yield batch
                while private.step == step:  # not released: the same batch again, or an error if nobody tried
                    if private.attempted != step:
                        raise SordinoError(
                            f"step {step} was not released: call private.backward(losses, batch) for every batch (an "
                            "empty one too), or leave the loop with break"
                        )
                    private.attempted = -1
                    yield batch
        finally:
            if ahead is not None:
                ahead.close()


class _Ahead:
    """Batches fetched ahead by loader processes. Who is in them is drawn here; no key leaves this process.

    The processes are started afresh rather than forked: a fork would copy the key, and whatever locks the threads of
    this process happen to hold.
    """

    def __init__(self, private: Private, workers: int) -> None:
        self.private, self.step, self.run = private, private.step, private.run
        self.drawn: list[Sequence[int]] = []
        source = private.source
        loader: Any = DataLoader(
            Rows(source.dataset, source.each, source.augmentations if source.each is not None else 1),  # type: ignore[arg-type]
            sampler=self._jobs(),
            batch_size=None,
            collate_fn=as_is,
            num_workers=workers,
            multiprocessing_context="spawn",
            generator=torch.Generator(),  # or it would draw from the user's
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # said below, with the remedy that applies here
                self.iterator = iter(loader)
        except (AttributeError, TypeError, RuntimeError, ImportError, OSError) as error:
            raise self._failed(error) from error
        except Exception as error:
            if type(error).__name__ != "PicklingError":
                raise
            raise self._failed(error) from error

    def _jobs(self) -> Iterator[Job]:
        private = self.private
        for step in range(self.step, private.steps):
            self.drawn.append(private.draw(step))
            yield Job(step, tuple(int(i) for i in self.drawn[-1]), private.token(step))

    def next(self) -> Batch:
        try:
            step, packed = next(self.iterator)
        except RuntimeError as error:
            if "DataLoader worker" in str(error) and "exited" in str(error):
                raise self._failed(error) from error
            raise
        indices = self.drawn.pop(0)
        assert step == self.step
        self.step += 1
        return self.private._batch(step, indices, unpack(packed))

    def fits(self) -> bool:
        return self.step == self.private.step and self.run is self.private.run

    @staticmethod
    def _failed(error: Exception) -> SordinoError:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        return SordinoError(
            f"workers: the loader processes could not run ({text}); they are started afresh, so dataset and augment "
            'must be importable (defined in a module) and a script needs if __name__ == "__main__":, or use workers=0'
        )

    def close(self) -> None:
        stop = getattr(self.iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()
