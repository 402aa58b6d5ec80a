"""Orthonormal vectors, on the model's device or, where they do not fit, in main memory.

Vectors are the rows of a few tensors of limited size, so that none is copied when the basis grows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SordinoError
from .surroundings import free_bytes

PIECE = 2**28  # bytes of one tensor of the basis
COLUMNS = 2**20  # entries of each vector rotated at once


class Basis:
    """Up to `capacity` orthonormal vectors of `size` entries."""

    def __init__(self, size: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.capacity, self.dtype, self.device = size, capacity, dtype, device
        self.rows = max(1, min(capacity, PIECE // (size * dtype.itemsize)))  # of one piece
        self.pieces: list[Tensor] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, v: Tensor) -> None:
        if self.count == len(self.pieces) * self.rows:
            self.pieces.append(torch.empty(self.rows, self.size, dtype=self.dtype, device=self.device))
        self.pieces[self.count // self.rows][self.count % self.rows] = v.to(self.device)
        self.count += 1

    def views(self) -> list[Tensor]:
        """The pieces, cut to the vectors they hold."""
        return [p[: self.count - i * self.rows] for i, p in enumerate(self.pieces) if i * self.rows < self.count]

    def orthogonalise(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """w without its parts along the basis, which are taken out twice; and those parts, ``Qᵀw``, in float64."""
        there, views = w.to(self.device, copy=True), self.views()
        total = torch.zeros(self.count, dtype=torch.float64)
        for _ in range(2 if views else 0):
            parts = [view @ there for view in views]
            for view, part in zip(views, parts, strict=True):
                there.addmv_(view.T, part, alpha=-1)
            total += torch.cat(parts).cpu().double()
        return there.to(w.device), total

    def rotate(self, Y: Tensor) -> None:
        """Replace the vectors by the columns of ``Q Y``, in place."""
        keep = Y.shape[1]
        turn = Y.T.to(device=self.device, dtype=self.dtype)
        for lo in range(0, self.size, COLUMNS):
            hi = min(self.size, lo + COLUMNS)
            turned = turn @ torch.cat([view[:, lo:hi] for view in self.views()])
            for i, piece in enumerate(self.pieces):
                part = turned[i * self.rows : (i + 1) * self.rows]
                piece[: len(part), lo:hi] = part
        self.count = keep
        del self.pieces[-(-keep // self.rows) :]

    def matrix(self) -> Tensor:
        """All vectors as the rows of one tensor."""
        return torch.cat(self.views()) if self.count else torch.empty(0, self.size, dtype=self.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return {"vectors": self.matrix().cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.pieces, self.count = [], 0
        for v in state["vectors"]:
            self.append(v)


def placed(size: int, wanted: int, least: int, dtype: torch.dtype, device: torch.device) -> tuple[int, torch.device]:
    """How many vectors to keep, from `least` to `wanted`, and where: on `device` if `least` of them fit."""
    one = size * dtype.itemsize
    for where in dict.fromkeys((device, torch.device("cpu"))):
        fit = free_bytes(where) // one
        if fit >= least:
            return min(wanted, fit), where
    raise SordinoError(
        f"{least} vectors of {size:,} numbers need {least * one / 2**30:.1f} GiB, more than is free on the device or "
        "in main memory; ask for fewer eigenvalues (top=...)"
    )
