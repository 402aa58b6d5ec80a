"""A Hessian upper bound Ĥ that can be inverted: some eigenpairs, and one value for all other directions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SordinoError
from .lanczos import Eigenvalues
from .operators import Operator


class Upper(Operator):
    """``Ĥ = Σ_i max(μ_i, rest) u_i u_iᵀ + rest·(I − Σ_i u_i u_iᵀ)``: negative eigenvalues count as `rest`.

    `vectors` are the u_i as orthonormal rows. A direction of curvature below 1/(ηT) hardly moves in T steps at learning
    rate η: that is a sensible `rest`.

    >>> bound = Upper(torch.tensor([4.0, -1.0]), torch.eye(3)[:2], rest=0.25)
    >>> bound.matvec(torch.ones(3)), bound.scaled(torch.ones(3), -0.5)
    (tensor([4.0000, 0.2500, 0.2500]), tensor([0.5000, 2.0000, 2.0000]))
    """

    def __init__(self, values: Tensor, vectors: Tensor, rest: float = 0.0) -> None:
        if vectors.dim() != 2 or values.shape != vectors.shape[:1]:
            raise SordinoError(
                f"{tuple(values.shape)} eigenvalues need as many vectors, as rows, not {tuple(vectors.shape)}"
            )
        if not rest >= 0:
            raise SordinoError(f"rest={rest!r}, the curvature of all other directions, must be at least 0")
        self.values, self.vectors, self.rest = values.to(vectors).clamp(min=rest), vectors, float(rest)
        self.size, self.dtype, self.device = vectors.shape[1], vectors.dtype, vectors.device

    @classmethod
    def of(cls, found: Eigenvalues, rest: float) -> Upper:
        """From what `Lanczos.run(vectors=True)` found."""
        if found.vectors is None:
            raise SordinoError("these eigenvalues came without vectors; search with run(vectors=True)")
        return cls(found.values, found.vectors, rest)

    @classmethod
    def exact(cls, operator: Operator, rest: float = 0.0) -> Upper:
        """From all eigenpairs of a small operator."""
        values, vectors = torch.linalg.eigh(operator.dense().double())
        return cls(values.to(operator.dtype), vectors.T.contiguous().to(operator.dtype), rest)

    @property
    def definite(self) -> bool:
        least = float(self.values.min()) if len(self.values) else torch.inf
        return least > 0 and (self.rest > 0 or len(self.values) == self.size)

    def matvec(self, v: Tensor) -> Tensor:
        self.products += 1
        return self.scaled(v, 1.0)

    def scaled(self, v: Tensor, power: float) -> Tensor:
        """``Ĥ^power v``."""
        there = v.to(self.device)
        parts = self.vectors @ there
        outside = self.rest**power if self.rest > 0 else 0.0
        out = outside * there + self.vectors.T @ ((self.values**power - outside) * parts)
        return out.to(v.device)
