"""One kind of data set for all sources: rows in memory, read one by one.

Images stay bytes until they are asked for and then lie in [−1, 1]; other numbers are passed on as they are. Nothing is
standardised by statistics of the data, which would release them without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import SordinoError


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set of (float32 tensor, int64 label).

    >>> data = Arrays(np.full((2, 1, 4, 4), 255, np.uint8), np.array([0, 1]), ["cat", "dog"])
    >>> x, y = data[1]
    >>> x.dtype, float(x.max()), int(y), data.input_shape
    (torch.float32, 1.0, 1, (1, 4, 4))
    """

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> None:
        if len(inputs) != len(targets):
            raise SordinoError(f"{len(inputs)} examples but {len(targets)} labels; they must be as many")
        self.inputs = torch.from_numpy(np.ascontiguousarray(inputs))
        self.targets = torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64))
        self.classes = list(classes)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        """One example, or several if `index` is a slice or a list."""
        return self._float(self.inputs[index]), self.targets[index]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def subset(self, indices: Any) -> Arrays:
        return Arrays(self.inputs[indices].numpy(), self.targets[indices].numpy(), self.classes)

    @staticmethod
    def _float(x: Tensor) -> Tensor:
        return x.float().div_(127.5).sub_(1) if x.dtype == torch.uint8 else x


def labelled(
    source: str | Path, labels: np.ndarray, classes: Sequence[str] | None = None
) -> tuple[np.ndarray, list[str]]:
    """Labels as 0…K−1 and the names of the K classes.

    Whole numbers from 0 upwards are kept as they are, with K one more than the largest; anything else is numbered in
    sorted order. `classes`, if given, is the complete list, and labels are its names or its positions.

    >>> labelled("x.csv", np.array(["dog", "cat", "dog"]))
    (array([1, 0, 1]), ['cat', 'dog'])
    >>> labelled("x.csv", np.array([1, 0]), ["cat", "dog"])
    (array([1, 0]), ['cat', 'dog'])
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise SordinoError(f"{source}: labels have shape {labels.shape}; one label an example is needed")
    if labels.dtype.kind == "f" and (labels != np.round(labels)).any():  # NaN differs from itself
        raise SordinoError(f"{source}: labels are fractions or missing; classes must be whole numbers or names")
    whole = labels.dtype.kind in "fiub"
    labels = labels.astype(np.int64) if whole else labels.astype(str)
    if classes is None:
        if whole and len(labels) and 0 <= labels.min() and labels.max() < 100_000:
            return labels, [str(i) for i in range(int(labels.max()) + 1)]
        found, numbers = np.unique(labels, return_inverse=True)
        return numbers.reshape(-1), [str(name) for name in found]
    number = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in np.unique(labels).tolist() if str(name) not in number]
    if not unknown:
        return np.array([number[str(name)] for name in labels.tolist()], dtype=np.int64), list(classes)
    if whole and 0 <= labels.min() and labels.max() < len(number):
        return labels, list(classes)
    raise SordinoError(
        f"{source}: label {unknown[0]!r} is not one of the {len(number)} classes: {', '.join(list(number)[:12])}"
    )


def finite(source: str | Path, inputs: np.ndarray) -> np.ndarray:
    """`inputs` if all entries are finite numbers, as uint8 or float32."""
    if inputs.dtype == np.uint8:
        return inputs
    if inputs.dtype.kind not in "fiub":
        raise SordinoError(f"{source}: inputs are of type {inputs.dtype}; numbers are needed")
    inputs = inputs.astype(np.float32)
    bad = ~np.isfinite(inputs.reshape(len(inputs), -1)).all(axis=1) if len(inputs) else np.zeros(0, bool)
    if bad.any():
        raise SordinoError(
            f"{source}: {int(bad.sum())} examples hold NaN, infinity or a number beyond float32, "
            f"the first in row {int(bad.argmax())}; fill or drop them"
        )
    return inputs
