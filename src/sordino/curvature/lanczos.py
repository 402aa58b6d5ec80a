"""The largest eigenvalues of a symmetric operator: Lanczos with full reorthogonalisation and thick restarts.

The basis Q is kept orthonormal to rounding, and ``T = QᵀAQ`` is filled with the parts that reorthogonalisation takes
out anyway, so nothing relies on a three-term recurrence. What leaves the basis lies along a few `ahead` directions F,
``A Q = Q T + F C``, and each step takes one of them in. So the residual of a Ritz pair is known,
``‖A u − θ u‖ = ‖C y‖``, and some eigenvalue lies within that of θ.

A Krylov space holds one vector of every eigenspace. So once the top k have converged, the search goes on from a random
direction orthogonal to their vectors; what it finds above the smallest of them (further copies of a repeated
eigenvalue) takes its place, until a round finds nothing. In a round of j products, an eigenvalue that exceeds the k-th
by more than `MISSED` of its distance to the smallest eigenvalue is overlooked with probability at most
``1.648 √d exp(−√MISSED (2j−1))`` (Kuczyński and Woźniakowski 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..asked import whole
from ..errors import SordinoError, StateError
from .basis import Basis, placed
from .operators import Operator

MISSED, CHANCE = 0.04, 1e-3
Progress = Callable[[int, int, str], None]  # converged, wanted, what is going on


@dataclass(frozen=True)
class Eigenvalues:
    """The top k, largest first. `residuals[i]` bounds the distance of `values[i]` to an eigenvalue, rounding included.

    `vectors`, if asked for, are rows, on the device of the basis.
    """

    values: Tensor  # float64
    residuals: Tensor
    products: int
    restarts: int
    rounds: int  # searches for overlooked copies; 0: none was made
    vectors: Tensor | None = None


class Lanczos:
    """Finds the `top` largest eigenvalues of `operator`; may be stopped, saved and continued at any product.

    A pair has converged when its residual is below `tolerance`·|θ|, or as small as rounding lets it be. `basis` is the
    number of vectors kept: by default 2·top + 40, or what fits.
    """

    def __init__(
        self,
        operator: Operator,
        top: int,
        *,
        tolerance: float = 1e-4,
        basis: int | None = None,
        seed: int = 0,
        repeats: bool = True,
        most: int | None = None,
    ) -> None:
        self.operator, self.top = operator, whole("top", top, 1)
        size = operator.size
        if self.top > size:
            raise SordinoError(f"top={top} eigenvalues of a matrix with {size} rows; ask for at most {size}")
        if not 0 < tolerance < 1:
            raise SordinoError(f"tolerance={tolerance!r} must lie between 0 and 1; 1e-4 is the default")
        least = min(size, self.top + max(4, self.top // 10))
        if basis is not None and whole("basis", basis, 2) < least:
            raise SordinoError(f"basis={basis} vectors are too few for top={top}; use {least} or more")
        wanted = min(size, 2 * self.top + 40 if basis is None else basis)
        capacity, where = placed(size, wanted, min(least, wanted), operator.dtype, operator.device)
        self.Q = Basis(size, capacity, operator.dtype, where)
        self.T = torch.zeros(capacity, capacity, dtype=torch.float64)
        self.ahead: list[Tensor] = []  # F, orthonormal and orthogonal to Q
        self.C = torch.zeros(0, capacity, dtype=torch.float64)
        self.tolerance, self.seed, self.repeats = tolerance, seed, repeats
        self.most = most if most is not None else 40 * self.top + 1000
        self.products = self.restarts = self.rounds = self.drawn = 0
        self.since = 0  # products since the round began
        self.choice = -1  # which direction is taken in next
        self.found: Tensor | None = None  # the top values when the round began

    # -- the iteration -----------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None = None, vectors: bool = False) -> Eigenvalues:
        """Go on until the top k have converged and nothing was overlooked."""
        while True:
            if self._due():
                theta, Y, residuals = self._ritz()
                good = self._converged(theta, residuals)
                self.choice = self._most_wanted(Y, good)
                if progress is not None:
                    progress(int(good.sum()), self.top, "looking for copies" if self.rounds else "")
                if bool(good.all()) and self._settled(theta, Y, residuals):
                    return self._result(theta, Y, residuals, vectors)
                if len(self.Q) == self.Q.capacity:
                    self._restart(theta, Y)
            if self.products >= self.most:
                theta, _, residuals = self._ritz()
                raise SordinoError(
                    f"{int(self._converged(theta, residuals).sum())} of the top {self.top} eigenvalues converged in "
                    f"{self.products} products; ask for fewer, or allow a larger basis= or tolerance="
                )
            self.step()

    def step(self) -> None:
        """One product: one of the directions ahead joins the basis."""
        if not self.ahead:
            self._begin()
        column = len(self.Q)
        chosen = self.choice % len(self.ahead)
        direction = self.ahead.pop(chosen)
        self.C = torch.cat([self.C[:chosen], self.C[chosen + 1 :]])
        self.Q.append(direction)
        image, parts = self.Q.orthogonalise(self.operator.matvec(direction))
        if not bool(parts.isfinite().all()):
            raise SordinoError("a product with the operator is not finite; look for NaN or infinity in its data")
        self.T[: column + 1, column] = self.T[column, : column + 1] = parts
        for _ in range(2):
            for i, other in enumerate(self.ahead):
                along = other @ image
                image.sub_(other * along)
                self.C[i, column] += float(along)
        beta = float(torch.linalg.vector_norm(image, dtype=torch.float64))
        self.products, self.since, self.choice = self.products + 1, self.since + 1, -1
        if beta > self._floor():  # else what is left is rounding: the space is invariant
            self._look(image / beta, beta, column)
        elif self._searching() and len(self.Q) + len(self.ahead) < self.operator.size:
            self._begin()

    def _look(self, direction: Tensor, beta: float = 0.0, column: int = 0) -> None:
        row = torch.zeros(1, self.Q.capacity, dtype=torch.float64)
        row[0, column] = beta
        self.ahead.append(direction)
        self.C = torch.cat([self.C, row])

    def _begin(self) -> None:
        """A random direction ahead, the same on every device."""
        for _ in range(5):
            generator = torch.Generator().manual_seed((self.seed << 20) + self.drawn)
            self.drawn += 1
            v = torch.randn(self.operator.size, generator=generator).to(self.operator.device, self.operator.dtype)
            size = torch.linalg.vector_norm(v)
            for _ in range(2):
                v, _ = self.Q.orthogonalise(v)
                for other in self.ahead:
                    v.sub_(other * (other @ v))
            norm = torch.linalg.vector_norm(v)
            if float(norm) > 1e-4 / math.sqrt(self.operator.size) * float(size):
                return self._look(v / norm)
        raise SordinoError("no direction is left outside the basis; ask for fewer eigenvalues")

    def _floor(self) -> float:
        """What rounding may leave of a residual."""
        if not len(self.Q):
            return 0.0
        turns = 1 + math.sqrt(self.restarts + self.rounds)
        return (
            10 * turns * torch.finfo(self.operator.dtype).eps * float(self.T[: len(self.Q), : len(self.Q)].abs().amax())
        )

    def _random(self) -> Tensor:
        """A random direction orthogonal to the basis, the same on every device."""
        for _ in range(5):
            generator = torch.Generator().manual_seed((self.seed << 20) + self.drawn)
            self.drawn += 1
            v = torch.randn(self.operator.size, generator=generator).to(self.operator.device, self.operator.dtype)
            v, _ = self.Q.orthogonalise(v / torch.linalg.vector_norm(v))
            norm = torch.linalg.vector_norm(v)
            if float(norm) > 1e-3 / math.sqrt(self.operator.size):
                return self.Q.orthogonalise(v / norm)[0]
        raise SordinoError("no direction is left outside the basis; ask for fewer eigenvalues")

    def _due(self) -> bool:
        held = len(self.Q)
        every = max(5, self.Q.capacity // 10)
        return held == self.Q.capacity or (held > self.top and self.since % every == 0 and self.since > 0)

    def _ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """θ, largest first, the coordinates y of their vectors, and their residuals, rounding included."""
        held = len(self.Q)
        theta, Y = torch.linalg.eigh(self.T[:held, :held])
        theta, Y = theta.flip(0), Y.flip(1)
        return theta, Y, torch.linalg.vector_norm(self.C[:, :held] @ Y, dim=0) + self._floor()

    def _converged(self, theta: Tensor, residuals: Tensor) -> Tensor:
        bound = torch.clamp(self.tolerance * theta[: self.top].abs(), min=2 * self._floor())
        return residuals[: self.top] <= bound

    def _most_wanted(self, Y: Tensor, good: Tensor) -> int:
        """The direction in which most is missing of the pairs that have not converged; the newest if all have."""
        if bool(good.all()) or len(self.ahead) < 2 or self._searching():
            return -1
        missing = self.C[:, : len(self.Q)] @ Y[:, : self.top][:, ~good]
        return int(torch.linalg.vector_norm(missing, dim=1).argmax()) - len(self.ahead)

    def _settled(self, theta: Tensor, Y: Tensor, residuals: Tensor) -> bool:
        """Whether the round, if one was asked for, is over and found nothing; if not, the next one begins."""
        size = self.operator.size
        if not self.repeats or len(self.Q) == size:
            return True
        if self._searching():
            return False
        if self.found is not None:
            gained = theta[: self.top] - self.found
            if bool((gained <= residuals[: self.top]).all()):
                return True
        self._keep(theta, Y, self.top)
        self._begin()
        self.found, self.rounds, self.since = theta[: self.top].clone(), self.rounds + 1, 0
        return False

    def _searching(self) -> bool:
        """Whether this round's own Krylov space is still too small to tell."""
        size = self.operator.size
        return self.found is not None and self.since < min(self.enough(size), size - self.top)

    @staticmethod
    def enough(size: int) -> int:
        """Products after which a round's chance of having overlooked an eigenvalue is below `CHANCE`."""
        return math.ceil((math.log(1.648 * math.sqrt(size) / CHANCE) / math.sqrt(MISSED) + 1) / 2)

    def _restart(self, theta: Tensor, Y: Tensor) -> None:
        self._keep(theta, Y, (self.top + self.Q.capacity) // 2)
        self.restarts += 1

    def _keep(self, theta: Tensor, Y: Tensor, count: int) -> None:
        """Go on with the Ritz vectors of the `count` largest θ."""
        held = len(self.Q)
        self.C[:, :count] = self.C[:, :held] @ Y[:, :count]
        self.C[:, count:] = 0
        self.Q.rotate(Y[:, :count])
        self.T.zero_()
        self.T[:count, :count] = torch.diag(theta[:count])

    def _result(self, theta: Tensor, Y: Tensor, residuals: Tensor, vectors: bool) -> Eigenvalues:
        k, rows = self.top, None
        if vectors:
            turn = Y[:, :k].T.to(device=self.Q.device, dtype=self.Q.dtype)
            rows = torch.empty(k, self.Q.size, dtype=self.Q.dtype, device=self.Q.device)
            torch.mm(turn[:, : len(self.Q.views()[0])], self.Q.views()[0], out=rows)
            lo = len(self.Q.views()[0])
            for view in self.Q.views()[1:]:
                rows.addmm_(turn[:, lo : lo + len(view)], view)
                lo += len(view)
        return Eigenvalues(theta[:k], residuals[:k], self.products, self.restarts, self.rounds, rows)

    # -- resume ------------------------------------------------------------------------------------------------------

    _COUNTS = ("products", "restarts", "rounds", "drawn", "since", "choice")

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on; tensors and numbers only."""
        held = len(self.Q)
        return {
            **self.Q.state_dict(),
            "about": [self.operator.size, self.top, self.Q.capacity, self.seed],
            "T": self.T[:held, :held].clone(),
            "C": self.C[:, :held].clone(),
            "ahead": [direction.cpu() for direction in self.ahead],
            "found": self.found,
            **{name: getattr(self, name) for name in self._COUNTS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        size, top, capacity, seed = state["about"]
        if (size, top, seed) != (self.operator.size, self.top, self.seed):
            raise StateError(
                f"the saved search is for top={top} of {size} rows with seed={seed}, this one for top={self.top} of "
                f"{self.operator.size} with seed={self.seed}; delete it, or ask for the same"
            )
        if capacity > self.Q.capacity:
            raise StateError(f"the saved search keeps {capacity} vectors, and {self.Q.capacity} fit; pass basis= less")
        self.Q.capacity = capacity
        self.Q.load_state_dict({"vectors": state["vectors"]})
        held = len(self.Q)
        self.ahead = [v.to(self.operator.device, self.operator.dtype) for v in state["ahead"]]
        self.T = torch.zeros(capacity, capacity, dtype=torch.float64)
        self.C = torch.zeros(len(self.ahead), capacity, dtype=torch.float64)
        self.T[:held, :held], self.C[:, :held] = state["T"], state["C"]
        self.found = state["found"]
        for name in self._COUNTS:
            setattr(self, name, state[name])
