"""The noise ``x = C⁻¹ z`` of a banded C and sums of it, block by block: covariances and their adjoints in O(T p²).

A lower-triangular C with p bands is kept by columns: ``columns[j, l] = C[j+l, j]``, T × p. Cut into blocks of
s ≥ p − 1 steps, ``D_k x_k + E_k x_{k−1} = z_k``: the pair (x_k, v_k) is a Markov chain, v_k the state of whatever
filter the noise is summed with (a running sum, momentum). So every covariance that an error needs follows from one
recursion over T/s blocks, and every derivative from the reverse one; the rest is done for all blocks at once. Blocks
that T does not fill are padded in front, with independent noise that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

SMALLEST = 24  # steps a block: below it the interpreter costs more than the arithmetic


class Layout:
    """T steps in blocks of s, p bands."""

    def __init__(self, steps: int, bands: int, size: int | None = None) -> None:
        self.steps, self.bands = steps, bands
        self.size = max(bands - 1, 1, min(size or max(bands, SMALLEST), steps))
        self.count = -(-steps // self.size)
        self.pad = self.count * self.size - steps

    def rows(self, values: np.ndarray) -> np.ndarray:
        """A number for each step, by blocks; zero in the padding."""
        out = np.zeros(self.count * self.size)
        out[self.pad :] = values
        return out.reshape(self.count, self.size)

    def split(self, columns: np.ndarray) -> np.ndarray:
        """Entry [k, c]: column c of block k, from the block's first row to the next block's last (D above E)."""
        out = np.zeros((self.count, self.size, 2 * self.size))
        padded = np.zeros((self.count * self.size, self.bands))
        padded[: self.pad, 0] = 1.0
        padded[self.pad :] = columns
        self._diagonals(out)[...] = padded.reshape(self.count, self.size, self.bands)
        return out

    def merge(self, blocks: np.ndarray) -> np.ndarray:
        """The inverse of `split`: what lies on the band."""
        return np.array(self._diagonals(blocks).reshape(-1, self.bands)[self.pad :])

    def _diagonals(self, blocks: np.ndarray) -> np.ndarray:
        """A view of the band: in row c it begins at position c. Of C-ordered blocks, such as `split` makes."""
        wide = 2 * self.size
        shape = (self.count, self.size, self.bands)
        return as_strided(blocks, shape, tuple(8 * step for step in (self.size * wide, wide + 1, 1)))


@dataclass(frozen=True)
class Filter:
    """What the noise is summed into: ``v_t = Φ v_{t−1} + γ η_t x_t``, and ``y_t = L v_t`` is what has to be accurate.

    The prefix sum is Φ = γ = L = 1. Any sum of exponentially decaying memories is a filter too.
    """

    transition: np.ndarray  # Φ, m × m
    gain: np.ndarray  # γ, m
    output: np.ndarray  # L, o × m
    rates: np.ndarray  # η, T

    @property
    def states(self) -> int:
        return len(self.gain)


class Sums:
    """A filter over a block: ``y_k = J (x_k, v_{k−1})`` and ``v_k = h x_k + o v_{k−1}``."""

    def __init__(self, layout: Layout, filtered: Filter | None) -> None:
        s, m = layout.size, 0 if filtered is None else filtered.states
        self.states = m
        if filtered is None:
            self.h, self.o = np.zeros((layout.count, 0, s)), np.zeros((0, 0))
            self.outputs, self.scale = np.zeros((s, 0, s)), np.ones((layout.count, s))
            return
        powers = np.empty((s + 1, m, m))
        powers[0] = np.eye(m)
        for i in range(s):
            powers[i + 1] = filtered.transition @ powers[i]
        impulse = powers[:s] @ filtered.gain  # Φ^i γ
        jacobian = np.zeros((s, m, s + m))
        for t in range(s):
            jacobian[t, :, : t + 1] = impulse[t::-1].T
            jacobian[t, :, s:] = powers[t + 1]
        rates = layout.rows(filtered.rates)
        self.outputs = filtered.output @ jacobian  # s × o × (s + m), without η
        self.scale = np.concatenate([rates, np.ones((layout.count, m))], axis=1)
        self.h = impulse[::-1].T * rates[:, None, :]
        self.o = powers[s]

    def costs(self, weights: np.ndarray | None, ridge: np.ndarray) -> np.ndarray:
        """``Σ_t w_t J_tᵀJ_t`` of each block, and `ridge` (each T/s × s) for the noise itself on the diagonal."""
        count, s = ridge.shape
        flat = self.outputs.reshape(-1, self.outputs.shape[2])
        if weights is None:
            out = np.broadcast_to(flat.T @ flat, (count, *self.outputs.shape[2:] * 2))
        else:
            each = np.repeat(weights, self.outputs.shape[1], axis=1)
            out = np.matmul(flat.T * each[:, None, :], flat)
        out = out * self.scale[:, :, None] * self.scale[:, None, :]
        steps = np.arange(s)
        out[:, steps, steps] += ridge
        return out


class Covariances:
    """The forward recursion: Cov(x_k, v_k) and Cov(x_k, v_{k−1}) for every block."""

    def __init__(self, layout: Layout, sums: Sums, columns: np.ndarray) -> None:
        s, m, count = layout.size, sums.states, layout.count
        self.layout, self.sums = layout, sums
        blocks = layout.split(columns)
        self.inverse = _inverse(blocks[:, :, :s])  # N = D⁻¹
        subdiagonal = np.zeros((count, s, s))
        subdiagonal[1:] = blocks[:-1, :, s:].transpose(0, 2, 1)
        self.step = np.matmul(self.inverse, subdiagonal)  # F = D⁻¹E: x_k = N z_k − F x_{k−1}
        fresh = np.matmul(self.inverse, self.inverse.transpose(0, 2, 1))
        self.state = np.zeros((count + 1, s + m, s + m))  # Cov(x_k, v_k) at k + 1; nothing has happened at 0
        self.moved = np.empty((count, s, s + m))  # F Cov(x_{k−1}, ·)
        for k in range(count):
            before, after, moved = self.state[k], self.state[k + 1], self.moved[k]
            np.matmul(self.step[k], before[:s], out=moved)
            np.matmul(moved[:, :s], self.step[k].T, out=after[:s, :s])
            after[:s, :s] += fresh[k]
            if m:
                h, o, cross = sums.h[k], sums.o, -moved[:, s:]
                mixed = after[:s, :s] @ h.T + cross @ o.T
                after[:s, s:], after[s:, :s] = mixed, mixed.T
                after[s:, s:] = h @ mixed + o @ (cross.T @ h.T + before[s:, s:] @ o.T)

    @cached_property
    def summed(self) -> np.ndarray:
        """Cov(x_k, v_{k−1}), from which all outputs of a block come."""
        s = self.layout.size
        out = np.empty((self.layout.count, *self.state.shape[1:]))
        out[:, :s, :s] = self.state[1:, :s, :s]
        out[:, :s, s:] = -self.moved[:, :, s:]
        out[:, s:, :s] = out[:, :s, s:].transpose(0, 2, 1)
        out[:, s:, s:] = self.state[:-1, s:, s:]
        return out

    def noise(self) -> np.ndarray:
        """Var(x_t): the squared row norms of C⁻¹."""
        steps = np.arange(self.layout.size)
        return np.array(self.state[1:, steps, steps].reshape(-1)[self.layout.pad :])

    def errors(self) -> np.ndarray:
        """E‖y_t‖²: the squared row norms of A C⁻¹."""
        scaled = self.summed * self.sums.scale[:, :, None] * self.sums.scale[:, None, :]
        flat = self.sums.outputs.reshape(-1, self.sums.outputs.shape[2])
        squares = np.einsum("kij,ij->ki", np.matmul(flat, scaled), flat)
        squares = squares.reshape(self.layout.count * self.layout.size, -1).sum(axis=1)
        return np.array(squares[self.layout.pad :])


def curvature(forward: Covariances, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``S = X⁻¹ W X⁻¹`` and ``C S`` on the band, as `columns`, for ``Tr(W X⁻¹) = Σ_k Tr(costs_k · summed_k)``.

    −S is the derivative with respect to ``X = CᵀC``, −2CS that with respect to C.
    """
    layout, sums, step, inverse = forward.layout, forward.sums, forward.step, forward.inverse
    s, m, count = layout.size, sums.states, layout.count
    adjoint = np.empty((count, s + m, s + m))  # of Cov(x_k, v_{k−1})
    later = np.zeros((s + m, s + m))  # of Cov(x_k, v_k)
    for k in range(count - 1, -1, -1):
        here = adjoint[k]
        if m:
            h, o = sums.h[k], sums.o
            mixed = np.concatenate([later[:, :s] + later[:, s:] @ h, later[:, s:] @ o], axis=1)
            np.add(mixed[:s], h.T @ mixed[s:], out=here[:s])
            here[s:] = o.T @ mixed[s:]
            here += costs[k]
        else:
            np.add(later, costs[k], out=here)
        moved = here[:, :s] @ step[k]
        later = np.empty((s + m, s + m))
        np.matmul(step[k].T, moved[:s], out=later[:s, :s])
        if m:
            later[s:, :s], later[:s, s:], later[s:, s:] = -moved[s:], -moved[s:].T, here[s:, s:]
    transposed = inverse.transpose(0, 2, 1)
    diagonal = np.matmul(transposed, np.matmul(adjoint[:, :s], forward.summed[:, :, :s]))  # (C S)_{k,k}
    previous = np.concatenate([-forward.moved[:, :, :s], forward.state[:-1, s:, :s]], axis=1)  # Cov(·, x_{k−1})
    below = np.matmul(transposed, np.matmul(adjoint[:, :s], previous))  # (C S)_{k,k−1}
    gradient = layout.merge(_joined(diagonal, below))
    diagonal, below = np.matmul(inverse, diagonal), np.matmul(inverse, below)
    for k in range(1, count):  # S = C⁻¹ (C S)
        below[k] -= step[k] @ diagonal[k - 1]
        diagonal[k] -= step[k] @ below[k].T
    return layout.merge(_joined(diagonal, below)), gradient


def _joined(diagonal: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Blocks (k, k) and (k, k−1) of a matrix as `Layout.split` has them."""
    count, s, _ = diagonal.shape
    out = np.zeros((count, s, 2 * s))
    out[:, :, :s] = diagonal.transpose(0, 2, 1)
    out[:-1, :, s:] = below[1:].transpose(0, 2, 1)
    return out


def _inverse(upper: np.ndarray) -> np.ndarray:
    """D⁻¹ for Dᵀ given, all blocks at once."""
    import torch

    given = torch.from_numpy(np.ascontiguousarray(upper))
    unit = torch.eye(given.shape[-1], dtype=torch.float64).expand_as(given)
    return np.ascontiguousarray(torch.linalg.solve_triangular(given, unit, upper=True).numpy().transpose(0, 2, 1))
