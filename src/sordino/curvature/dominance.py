"""Does Ĥ bound H from above? ``ρ(H, Ĥ) = max_v vᵀHv / vᵀĤv`` (0/0 = 0), and ``H ⪯ Ĥ ⇔ ρ ≤ 1`` (NoiseCurve Thm 5.1).

Three ways: for an `Upper` that is positive, the largest eigenvalue of Ĥ^{-1/2} H Ĥ^{-1/2} by Lanczos; for any other
operator Ĥ, LOBPCG, which needs no inverse and bounds ρ from below; and for small matrices all of it, exactly, with the
null space of Ĥ (`dominance_of_matrices`).

H of private data is private, and so is ρ: `private_dominance` returns a `PrivateNumber`, which no report should print.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SordinoError
from .hessian import HessianOperator
from .lanczos import Lanczos
from .operators import Operator
from .upper import Upper


@dataclass(frozen=True)
class Dominance:
    """ρ, how far off it may be, and what it cost."""

    value: float
    residual: float  # Lanczos: some eigenvalue lies within. LOBPCG: of the generalised problem, relative
    products: int

    @property
    def dominates(self) -> bool:
        """H ⪯ Ĥ, to the accuracy of the computation."""
        return self.value <= 1.0 + self.residual


@dataclass(frozen=True)
class PrivateNumber:
    """A number computed from private data without noise. It is for whoever may see the data, and for no report.

    >>> print(PrivateNumber(1.25, "dominance"))
    dominance 1.25 (private: computed from private data without noise, covered by no guarantee)
    """

    value: float
    what: str

    def __str__(self) -> str:
        return (
            f"{self.what} {self.value:.4g} (private: computed from private data without noise, covered by no guarantee)"
        )


def dominance(hessian: Operator, upper: Operator, *, tolerance: float = 1e-3, seed: int = 0) -> Dominance:
    """ρ of two operators of one size. The error of ρ is of the order of `tolerance` squared, relative."""
    _same_size(hessian, upper)
    if isinstance(upper, Upper):
        if not upper.definite:
            raise SordinoError(
                "Ĥ is 0 in some directions, and one where H is not makes ρ infinite; give those directions a curvature "
                "(rest=1/(learning rate · steps)), or compare small matrices by dominance_of_matrices"
            )
        before = hessian.products
        found = Lanczos(_Whitened(hessian, upper), 1, tolerance=tolerance, seed=seed, repeats=False).run()
        return Dominance(float(found.values[0]), float(found.residuals[0]), hessian.products - before)
    return lobpcg(hessian, upper, tolerance=tolerance, seed=seed)


def private_dominance(
    model: nn.Module,
    losses: Callable[..., Tensor],
    dataset: Any,
    upper: Operator,
    *,
    at: nn.Module | None = None,
    examples: int | None = None,
    batch_size: int = 64,
    dtype: torch.dtype | None = None,
    tolerance: float = 1e-3,
) -> PrivateNumber:
    """ρ of the Hessian of the mean loss over *private* examples, labels as given: research only, never released."""
    from ..public import Public

    private = Public(dataset, losses, labels="given", batch_size=batch_size)  # the door's mechanics, not its meaning
    hessian = HessianOperator(model, private, at=at, dtype=dtype or upper.dtype, examples=examples)
    return PrivateNumber(dominance(hessian, upper, tolerance=tolerance).value, "dominance ρ(H, Ĥ)")


class _Whitened(Operator):
    """Ĥ^{-1/2} H Ĥ^{-1/2}."""

    def __init__(self, hessian: Operator, upper: Upper) -> None:
        self.hessian, self.upper = hessian, upper
        self.size, self.dtype, self.device = hessian.size, hessian.dtype, hessian.device

    def matvec(self, v: Tensor) -> Tensor:
        self.products += 1
        inner = self.hessian.matvec(self.upper.scaled(v.to(self.upper.dtype), -0.5).to(self.dtype))
        return self.upper.scaled(inner.to(self.upper.dtype), -0.5).to(self.dtype)


def lobpcg(
    hessian: Operator, upper: Operator, *, block: int = 4, tolerance: float = 1e-3, most: int = 500, seed: int = 0
) -> Dominance:
    """The largest generalised eigenvalue by LOBPCG (Knyazev 2001), Ĥ ⪰ 0 known by its products alone.

    Directions in which Ĥ vanishes (to rounding) are left out if H vanishes there too; if it does not, ρ is infinite.
    """
    _same_size(hessian, upper)
    block, before = min(block, hessian.size), hessian.products
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(hessian.size, block, generator=generator).to(hessian.device, hessian.dtype)
    search = X
    theta, residual = 0.0, math.inf
    for _ in range(most):
        S = _orthonormal(search)
        HS, US = hessian.matmat(S), upper.matmat(S)  # anew: sums of old ones drift, and Ĥ may be nearly singular
        found = _rayleigh_ritz(S.T @ HS, S.T @ US)
        if found is None:
            return Dominance(math.inf, 0.0, hessian.products - before)
        values, Y = found
        if not len(values):
            return Dominance(0.0, 0.0, hessian.products - before)  # 0/0 in all directions
        top = Y[:, :block]
        new, HX, UX = S @ top, HS @ top, US @ top
        R = HX - UX * values[:block]
        theta = float(values[0])
        scale = float(torch.linalg.vector_norm(HX[:, 0]) + abs(theta) * torch.linalg.vector_norm(UX[:, 0]))
        residual = float(torch.linalg.vector_norm(R[:, 0])) / scale if scale > 0 else 0.0
        if residual <= tolerance:
            break
        step = new - X @ torch.linalg.lstsq(X, new).solution  # of the new block, what the old one lacked
        X, search = new, torch.cat([new, R, step], 1)
    return Dominance(theta, residual, hessian.products - before)


def _orthonormal(S: Tensor) -> Tensor:
    """An orthonormal basis of the columns, those that depend on others left out."""
    S = S / torch.linalg.vector_norm(S, dim=0).clamp(min=torch.finfo(S.dtype).tiny)
    U, sizes, _ = torch.linalg.svd(S, full_matrices=False)
    return U[:, sizes > 1e2 * torch.finfo(S.dtype).eps * sizes[0]]


def _rayleigh_ritz(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenpairs of ``a y = λ b y``, largest first, where b is positive; None if a is positive elsewhere."""
    a, b = ((m + m.T) / 2 for m in (a, b))
    sizes, vectors = torch.linalg.eigh(b)
    small = sizes <= 1e2 * torch.finfo(b.dtype).eps * len(b) * sizes[-1].clamp(min=0)
    null = vectors[:, small]
    scale = float(torch.linalg.matrix_norm(a, 2))
    if null.shape[1] and scale > 0:
        inside = torch.linalg.eigvalsh(null.T @ a @ null)[-1]
        if float(inside) > 1e4 * torch.finfo(a.dtype).eps * scale:
            return None
    root = vectors[:, ~small] / sizes[~small].sqrt()
    values, Y = torch.linalg.eigh(root.T @ a @ root)
    return values.flip(0), (root @ Y).flip(1)


def dominance_of_matrices(hessian: Tensor, upper: Tensor, tolerance: float = 1e-10) -> float:
    """ρ of two small matrices, exactly; Ĥ's eigenvalues below `tolerance` of its largest count as 0.

    In the null space N of Ĥ the ratio is 0/0 = 0 where H vanishes, −∞ where H is negative, +∞ where it is positive. A
    v with parts inside and outside gains ``bᵀ(−H_NN)⁺b``, b = H_NR r, from the inside: a Schur complement, or +∞ where
    b leaves the range of H_NN.

    >>> round(dominance_of_matrices(torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([2.0, 0.0]))), 9)
    0.5
    >>> dominance_of_matrices(torch.diag(torch.tensor([1.0, 1.0])), torch.diag(torch.tensor([2.0, 0.0])))
    inf
    """
    h, u = hessian.double(), upper.double()
    h, u = (h + h.T) / 2, (u + u.T) / 2
    sizes, vectors = torch.linalg.eigh(u)
    held = sizes > tolerance * sizes[-1].clamp(min=0)
    least = tolerance * float(torch.linalg.matrix_norm(h, 2))
    null, root = vectors[:, ~held], vectors[:, held] / sizes[held].sqrt()
    if not null.shape[1]:
        return float(torch.linalg.eigvalsh(root.T @ h @ root)[-1])
    inside, basis = torch.linalg.eigh(null.T @ h @ null)
    if float(inside[-1]) > least:
        return math.inf
    idle = bool((inside >= -least).any())  # a direction of 0/0
    coupling = basis.T @ null.T @ h @ vectors[:, held]
    negative = inside < -least
    if coupling.numel() and float(coupling[~negative].abs().max() if bool((~negative).any()) else 0.0) > least:
        return math.inf
    if not root.shape[1]:
        return 0.0 if idle else -math.inf
    coupling = coupling / sizes[held].sqrt()
    schur = root.T @ h @ root + coupling[negative].T @ (coupling[negative] / -inside[negative, None])
    value = float(torch.linalg.eigvalsh(schur)[-1])
    return max(value, 0.0) if idle else value


def _same_size(hessian: Operator, upper: Operator) -> None:
    if hessian.size != upper.size:
        raise SordinoError(
            f"H has {hessian.size} rows and Ĥ {upper.size}: they are of different parameter sets; estimate both for one"
        )
