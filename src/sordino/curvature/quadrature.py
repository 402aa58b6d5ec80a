"""Stochastic Lanczos quadrature: how many eigenvalues lie above a threshold, and how the bulk is spread.

For a probe v uniform on the sphere, m steps of Lanczos give nodes θ_j and weights ω_j that integrate polynomials up to
degree 2m−1 exactly against the measure ``Σ_i (vᵀu_i)² δ(μ_i)``; d times its mean over probes is the spectrum. Two
errors, both stated: the probes' (the weight of c eigenvalues of d has variance ``2c(d−c)/(d+2)``, in units of
eigenvalues), and the nodes': by Chebyshev, Markov and Stieltjes the probes' own count beyond a threshold lies between
the weight of the nodes beyond it without, and with, their next neighbours.

Eigenvalues that are known already are better taken out: probes are then drawn orthogonal to their vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..asked import whole
from ..errors import SordinoError
from .basis import Basis, placed
from .operators import Operator

Progress = Callable[[int, int], None]  # products done, products in all
TOGETHER = 5  # probes that advance side by side


@dataclass(frozen=True)
class Count:
    """A number of eigenvalues: the estimate, the standard deviation due to the probes, the bounds due to the nodes."""

    value: float
    deviation: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} ± {self.deviation:,.0f} (nodes: {self.low:,.0f} to {self.high:,.0f})"


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of some probes over the `size` eigenvalues that are not in `known`.

    >>> both = Quadrature(np.array([[0.0, 1.0]]), np.array([[0.8, 0.2]]), 10, np.array([5.0]))
    >>> both.count(0.5).value, both.count(2.0).value
    (3.0, 1.0)
    """

    nodes: np.ndarray  # (probes, steps), ascending; unused places: weight 0 at the last node
    weights: np.ndarray  # (probes, steps), each row's sum is 1
    size: int
    known: np.ndarray  # eigenvalues that were taken out, exact

    @property
    def probes(self) -> int:
        return len(self.nodes)

    def count(self, threshold: float) -> Count:
        """Eigenvalues ≥ `threshold`."""
        exact = float((self.known >= threshold).sum())
        beyond = self.nodes >= threshold
        first = beyond.argmax(axis=1) + np.where(beyond.any(axis=1), 0, beyond.shape[1])
        place = np.arange(self.nodes.shape[1])[None]
        inside = np.where(beyond, self.weights, 0.0).sum(1)
        low = np.where(place > first[:, None], self.weights, 0.0).sum(1)
        high = np.where(place >= first[:, None] - 1, self.weights, 0.0).sum(1)
        value, least, most = (float(self.size * w.mean()) for w in (inside, low, high))
        likely = min(max(value, 0.0), float(self.size))
        deviation = math.sqrt(2 * max(likely * (self.size - likely), 1.0) / (self.size + 2) / self.probes)
        return Count(exact + value, deviation, exact + least, exact + most)

    def density(self, points: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues per unit at `points`, smoothed by a normal curve of standard deviation `width`; and its own."""
        distance = (np.asarray(points)[:, None, None] - self.nodes[None]) / width
        bumps = np.exp(-0.5 * distance**2) / (width * math.sqrt(2 * math.pi))
        each = self.size * (bumps * self.weights[None]).sum(2)
        known = (np.asarray(points)[:, None] - self.known[None]) / width
        exact = np.exp(-0.5 * known**2).sum(1) / (width * math.sqrt(2 * math.pi))
        spread = each.std(1, ddof=1) if self.probes > 1 else np.full(len(each), np.nan)
        return exact + each.mean(1), spread / math.sqrt(self.probes)

    @property
    def trace(self) -> float:
        return float(self.known.sum() + self.size * (self.nodes * self.weights).sum(1).mean())

    @property
    def least(self) -> float:
        """The smallest node: an upper bound of the smallest eigenvalue, and close to it."""
        return float(self.nodes.min())

    def joined(self, other: Quadrature) -> Quadrature:
        """Both sets of probes."""
        nodes, weights = (np.concatenate([a, b]) for a, b in ((self.nodes, other.nodes), (self.weights, other.weights)))
        return Quadrature(nodes, weights, self.size, self.known)


def quadrature(
    operator: Operator,
    probes: int = 10,
    steps: int = 80,
    *,
    known: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    done: Quadrature | None = None,
    saved: Callable[[Quadrature], None] | None = None,
    progress: Progress | None = None,
) -> Quadrature:
    """The quadrature of `probes` probes; `known` are (eigenvalues, their vectors as rows) to be taken out.

    `done` is what an earlier call, stopped on the way, handed to `saved`; its probes are not run again.
    """
    probes, size = whole("probes", probes, 1), operator.size - (0 if known is None else len(known[0]))
    steps = min(whole("steps", steps, 2), max(size, 1))
    if size < 1:
        raise SordinoError("all eigenvalues are known; there is nothing left to count")
    values = np.zeros(0) if known is None else known[0].double().cpu().numpy()
    together, where = placed(operator.size, TOGETHER * steps, steps, operator.dtype, operator.device)
    result, first = done, 0 if done is None else done.probes
    for lo in range(first, probes, max(1, together // steps)):
        some = range(lo, min(probes, lo + max(1, together // steps)))
        bases = [Basis(operator.size, steps, operator.dtype, where) for _ in some]
        told = None if progress is None else (lambda n, lo=lo: progress(lo * steps + n, probes * steps))
        nodes, weights = _run(operator, [(seed << 20) + 2**19 + i for i in some], steps, known, bases, told)
        part = Quadrature(nodes, weights, size, values)
        result = part if result is None else result.joined(part)
        if saved is not None:
            saved(result)
    assert result is not None
    return result


def _run(
    operator: Operator,
    seeds: list[int],
    steps: int,
    known: tuple[Tensor, Tensor] | None,
    bases: list[Basis],
    progress: Callable[[int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Lanczos from several probes at once."""
    alpha, beta = (torch.zeros(len(seeds), steps, dtype=torch.float64) for _ in range(2))
    length = [steps] * len(seeds)
    vectors: dict[int, Tensor] = {}
    for i, seed in enumerate(seeds):
        v = torch.randn(operator.size, generator=torch.Generator().manual_seed(seed))
        v = without(v.to(operator.device, operator.dtype), known)
        vectors[i] = v / torch.linalg.vector_norm(v)
    largest, eps = 0.0, torch.finfo(operator.dtype).eps
    for j in range(steps):
        images = operator.matmat(torch.stack([vectors[i] for i in vectors], 1))
        for i, image in zip(list(vectors), images.unbind(1), strict=True):
            bases[i].append(vectors[i])
            w, parts = bases[i].orthogonalise(without(image, known))
            alpha[i, j], norm = parts[-1], float(torch.linalg.vector_norm(w, dtype=torch.float64))
            beta[i, j], largest = norm, max(largest, float(parts.abs().max()), norm)
            if norm <= 10 * eps * largest:  # the probe's own space is complete
                length[i] = j + 1
                del vectors[i]
            else:
                vectors[i] = without(w, known) / norm
        if progress is not None:
            progress((j + 1) * len(seeds))
        if not vectors:
            break
    nodes, weights = (np.zeros((len(seeds), steps)) for _ in range(2))
    for i, m in enumerate(length):
        T = torch.diag(alpha[i, :m]) + torch.diag(beta[i, : m - 1], 1) + torch.diag(beta[i, : m - 1], -1)
        theta, Y = torch.linalg.eigh(T)
        nodes[i, :m], weights[i, :m] = theta.numpy(), Y[0].square().numpy()
        nodes[i, m:] = nodes[i, m - 1]
    return nodes, weights


def without(v: Tensor, known: tuple[Tensor, Tensor] | None) -> Tensor:
    """v without its parts along the known vectors."""
    if known is None:
        return v
    rows = known[1]
    there = v.to(rows.device)
    for _ in range(2):
        there = there - rows.T @ (rows @ there)
    return there.to(v.device)
