"""Samples for balls in bins with any Gram matrix, whose average is δ: importance samplers in b dimensions.

The privacy loss depends on the output only through ``y_i = ⟨x, m_i⟩``. In units of σ², with ``Γ = G/σ²``, y is N(0, Γ)
without the example, and ``r = mean_i exp(y_i − Γ_ii/2)``.

**Remove.** ``δ = E_Q(r − e^ε)₊ = E_Q r^{s+1} g(r)``, ``g(r) = (r − e^ε)₊/r^{s+1}``. The product of s+1 terms of r is
``exp(Σ_{j<l} Γ_{i_j i_l})`` times the density ratio of a Gaussian of mean ``Γ(e_{i_0} + … + e_{i_s})``. So: draw i_0
uniformly, then one bin after the other with probability ∝ ``exp(Σ_{l<j} Γ_{i i_l})``, multiplying a weight by the mean
of that over i; draw y; the sample is ``weight · g(r)``. It is unbiased, and at most R (`BinsBounds.log_largest`).

**Add.** ``δ = E_Q(1 − e^ε r)₊`` with x moved by −t·m̄, t ≥ 0: y is N(−t·Γ1/b, Γ), the weight ``exp(t·mean_i y_i +
t²v/2)``. As ``r ≥ exp(mean_i y_i − h)``, a sample that is not 0 has ``mean_i y_i = h − ε − u``, u > 0, and is at most
``exp(t(h − ε − u) + t²v/2)·(1 − e^{−u})``; the largest, at ``e^{−u} = t/(1+t)``, is ``R = exp(−t(ε − h) + t²v/2) ·
t^t/(1+t)^{1+t}``. t is chosen to make R least.

What is returned does not depend on ε: the logarithms of r and of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from .bernstein import Moments, moments
from .bins_bounds import BinsBounds
from .counted import Counted


@dataclass(frozen=True)
class Samples:
    """log r and log weight of each sample, and how they become samples of δ(ε)."""

    log_ratio: np.ndarray
    log_weight: np.ndarray
    bounds: BinsBounds
    order: int = 0  # s, of remove
    tilt: float | None = None  # t, of add

    def __len__(self) -> int:
        return len(self.log_ratio)

    def moments(self, epsilon: float) -> Moments:
        """The samples of δ(ε), over their largest possible value."""
        return self._add(epsilon) if self.tilt is not None else self._remove(epsilon)

    def _remove(self, epsilon: float) -> Moments:
        largest = self.bounds.log_largest(self.order, epsilon)
        samples = np.zeros(len(self))
        hit = self.log_ratio > epsilon
        r = self.log_ratio[hit]
        gain = -np.expm1(epsilon - r)  # (r − e^ε)/r
        samples[hit] = np.exp(np.minimum(0.0, self.log_weight[hit] - self.order * r + np.log(gain) - largest))
        return moments(samples, largest)

    def _add(self, epsilon: float) -> Moments:
        assert self.tilt is not None
        largest = log_largest_add(self.bounds, epsilon, self.tilt)
        samples = np.zeros(len(self))
        hit = self.log_ratio < -epsilon
        gain = -np.expm1(epsilon + self.log_ratio[hit])
        samples[hit] = np.exp(np.minimum(0.0, self.log_weight[hit] + np.log(gain) - largest))
        return moments(samples, largest)


def log_largest_add(bounds: BinsBounds, epsilon: float, tilt: float) -> float:
    """log R of the add sampler."""
    entropy = tilt * math.log(tilt) if tilt > 0.0 else 0.0
    return -tilt * (epsilon - bounds.h) + tilt**2 * bounds.v / 2 + entropy - (tilt + 1.0) * math.log1p(tilt)


def best_tilt(bounds: BinsBounds, epsilon: float) -> float:
    """The t of least R: the root of ``t·v + log(t/(1+t)) = ε − h``, which increases in t."""
    low, high = 1e-9, max(1.0, (epsilon - bounds.h + 1.0) / bounds.v + 1.0)
    for _ in range(60):
        middle = math.sqrt(low * high)
        if middle * bounds.v - math.log1p(1.0 / middle) < epsilon - bounds.h:
            low = middle
        else:
            high = middle
    return low


Draws = Iterable[tuple[torch.Tensor, torch.Tensor]]  # chunks of uniforms, and of y ~ N(0, G)


class Sampler:
    """Draws for one G. The random numbers are `Counted`: the same for the same seed, everywhere."""

    def __init__(self, gram: np.ndarray) -> None:
        self.gram = gram
        self.bins = len(gram)
        self.device = torch.device("cuda" if torch.cuda.is_available() and self.bins >= 32 else "cpu")
        self._factor = torch.from_numpy(np.linalg.cholesky(gram)).to(self.device)

    def draws(self, seed: bytes, count: int, uniforms: int = 0) -> Draws:
        """At least `count` rows; they do not depend on σ, so a search may keep them."""
        for uniform, normal in Counted(seed, self.bins, uniforms, self.device).chunks(count):
            with exact():
                noise = normal @ self._factor.T
            yield uniform, noise

    def remove(self, bounds: BinsBounds, sigma: float, orders: Sequence[int], draws: Draws) -> list[Samples]:
        """Samples of each order s, which share their random numbers (s + 1 uniforms each)."""
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in orders]
        scaled = torch.from_numpy(bounds.scaled).to(self.device)
        table, half = torch.exp(scaled), torch.diagonal(scaled) / 2
        for uniform, noise in draws:
            with exact():
                for into, (mean, log_weight) in zip(found, _walk(table, scaled, uniform, orders), strict=True):
                    into.append((self._log_ratio(mean.add_(noise, alpha=1.0 / sigma), half), log_weight))
        return [Samples(*_joined(parts), bounds, order) for order, parts in zip(orders, found, strict=True)]

    def add(self, bounds: BinsBounds, sigma: float, tilt: float, draws: Draws) -> Samples:
        scaled = torch.from_numpy(bounds.scaled).to(self.device)
        half, mean = torch.diagonal(scaled) / 2, scaled.mean(dim=1) * -tilt
        parts = []
        for _, noise in draws:
            with exact():
                y = mean + noise / sigma
                log_weight = y.mean(dim=1) * tilt + tilt * tilt * bounds.v / 2
                parts.append((self._log_ratio(y, half), log_weight))
        return Samples(*_joined(parts), bounds, tilt=tilt)

    def _log_ratio(self, y: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(y.sub_(half), dim=1) - math.log(self.bins)


@contextmanager
def exact() -> Iterator[None]:
    """No gradients, no autocast; and a sum that may be added in another order is no reason to stop (see `counted`)."""
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:  # (only then: setting it costs a second of imports)
        torch.use_deterministic_algorithms(False)
    try:
        with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warn)


def _walk(
    table: torch.Tensor, scaled: torch.Tensor, uniform: torch.Tensor, orders: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tuples of bins, one bin a step: for each order the mean Γ Σ_j e_{i_j}, and the log weight."""
    bins = len(scaled)
    chosen = (uniform[:, 0] * bins).long().clamp_(max=bins - 1)
    mean, product = scaled[chosen], table[chosen]
    log_weight = torch.zeros_like(uniform[:, 0])
    found = {0: (mean, log_weight)}
    for step in range(1, max(orders) + 1):
        cumulative = torch.cumsum(product, dim=1)
        total = cumulative[:, -1:]
        log_weight = log_weight + torch.log(total[:, 0] / bins)
        chosen = torch.searchsorted(cumulative, uniform[:, step, None] * total).squeeze(1).clamp_(max=bins - 1)
        mean = mean + scaled[chosen]
        if step in orders:
            found[step] = (mean, log_weight)
        if step < max(orders):
            product.mul_(table[chosen])
    return [found[order] for order in orders]


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    ratio, weight = (torch.cat([part[i] for part in parts]).cpu().numpy() for i in (0, 1))
    return ratio, weight
