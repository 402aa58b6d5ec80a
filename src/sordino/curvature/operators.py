"""Symmetric matrices known by what they do to a vector.

Everything in this room that looks for eigenvalues takes an `Operator`: vectors have `size` entries of one dtype on one
device; matrices of several vectors are (size, m), one vector a column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Operator(ABC):
    """A symmetric matrix A of `size` rows."""

    size: int
    dtype: torch.dtype
    device: torch.device
    products: int = 0  # vectors multiplied so far

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """``A v``, a new vector."""

    def matmat(self, V: Tensor) -> Tensor:
        """``A V``."""
        return torch.stack([self.matvec(v) for v in V.unbind(1)], 1)

    def dense(self, block: int = 64) -> Tensor:
        """A itself, symmetrised: as many products as rows."""
        out = torch.empty(self.size, self.size, dtype=self.dtype, device=self.device)
        for lo in range(0, self.size, block):
            hi = min(self.size, lo + block)
            basis = torch.zeros(self.size, hi - lo, dtype=self.dtype, device=self.device)
            basis[torch.arange(lo, hi), torch.arange(hi - lo)] = 1
            out[:, lo:hi] = self.matmat(basis)
        return (out + out.T) / 2


class Dense(Operator):
    """A matrix that is at hand.

    >>> Dense(torch.diag(torch.tensor([2.0, 3.0]))).matvec(torch.ones(2))
    tensor([2., 3.])
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size, self.dtype, self.device = matrix.shape[0], matrix.dtype, matrix.device

    def matvec(self, v: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ v

    def matmat(self, V: Tensor) -> Tensor:
        self.products += V.shape[1]
        return self.matrix @ V

    def dense(self, block: int = 64) -> Tensor:
        return (self.matrix + self.matrix.T) / 2
