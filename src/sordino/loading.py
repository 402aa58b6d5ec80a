"""What a loader process does: examples by index, augmented, packed for the way back.

A loader process knows a dataset, a function and, for each step, the indices and a
token: a few bytes derived from the key, good for the seeds of that step's
augmentations and nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .randomness import derived_seed, seed_all


@dataclass(frozen=True)
class Job:
    """One step to fetch."""

    step: int
    indices: tuple[int, ...]
    token: bytes


def examples(dataset: Any, augment: Callable[[Any], Any] | None, repeats: int, job: Job) -> list[Any]:
    """The examples, each `repeats` times through `augment`; the same ones for the same job, in any process.

    Leaves the ordinary generators seeded: the caller restores them.
    """
    if not job.indices:
        return []
    seed_all(derived_seed(job.token, "dataset"))
    found = fetch(dataset, job.indices)
    if augment is None:
        return found
    out = []
    for index, example in zip(job.indices, found, strict=True):
        seed_all(derived_seed(job.token, "example", index))
        out += [augment(example) for _ in range(repeats)]
    return out


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    many = getattr(dataset, "__getitems__", None)
    return list(many(list(indices))) if many else [dataset[i] for i in indices]


class Rows:
    """The user's dataset, as a loader process sees it."""

    def __init__(self, dataset: Any, augment: Callable[[Any], Any] | None, repeats: int) -> None:
        self.dataset, self.augment, self.repeats = dataset, augment, repeats

    def __getitem__(self, job: Job) -> tuple[int, bytes]:
        return job.step, pack(examples(self.dataset, self.augment, self.repeats, job))


@dataclass
class Packed:
    """A tensor as an array: a file descriptor for each of a batch's tensors would soon run out."""

    array: np.ndarray
    dtype: torch.dtype


def pack(samples: list[Any]) -> bytes:
    return pickle.dumps(tree_map(_to_array, samples), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> list[Any]:
    return tree_map(_to_tensor, pickle.loads(packed), is_leaf=lambda leaf: isinstance(leaf, Packed))


def _to_array(leaf: Any) -> Any:
    if type(leaf) is not Tensor or leaf.device.type != "cpu" or leaf.layout != torch.strided or leaf.is_complex():
        return leaf
    tensor = leaf.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return Packed(tensor.view(torch.int16).numpy(), torch.bfloat16)
    try:
        return Packed(tensor.numpy(), tensor.dtype)
    except TypeError:
        return leaf


def _to_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, Packed):
        return leaf
    tensor = torch.from_numpy(leaf.array if leaf.array.flags.writeable else leaf.array.copy())
    return tensor.view(torch.bfloat16) if leaf.dtype == torch.bfloat16 else tensor


def as_is(value: Any) -> Any:
    return value
