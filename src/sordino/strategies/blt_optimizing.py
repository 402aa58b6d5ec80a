"""Decays θ and weights ω of a BLT, by L-BFGS on ``log(error · sensitivity)`` with gradients in O(T m).

C is a rational function, ``C(q) = 1 + Σ_j ω_j q/(1 − θ_j q) = Π_j (1 − θ̂_j q)/(1 − θ_j q)``, θ̂ the eigenvalues of
``diag(θ) − 1ωᵀ``: so C⁻¹ and its transpose are cascades of m first-order filters, complex where θ̂ is. The sensitivity
is the one that bounds every Toeplitz C (the leftmost columns of a majorant), so there is nothing to exploit.

The search begins at positive weights, from the quadrature ``i^{−1/2} ≈ Σ_j ω_j θ_j^i``. The others start next to 0, at
slow decays. What they are for are differences of neighbouring exponentials, whose weights would grow without bound
for nothing, and rounding with them: a small penalty keeps them near 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .problem import Problem
from .toeplitz_optimizing import Loss, Optimum, minimise, squared_error, squared_sensitivity

VERSION = 1  # of what is searched and how: part of the key of what is kept on disk

_PENALTY = 1e-4  # of Σ ω², added to the logarithm
_POSITIVE = 4  # positive weights; with more they coincide
_SCHEDULED = 2**24  # T² up to which a schedule of learning rates is minded: an evaluation is O(T²) then
_SLOW = (0.3, 1.0, 3.0)  # 1 − θ of further buffers at the start, in units of 1/b
_LONG = 2**14  # steps from which only one start is tried


def coefficients(decays: np.ndarray, weights: np.ndarray, steps: int) -> np.ndarray:
    """c_0, …, c_{T−1}."""
    return np.concatenate([[1.0], _powers(decays, steps - 1) @ weights])


def optimised(problem: Problem, buffers: int) -> dict[str, np.ndarray]:
    """`decays`, `weights`, and how flat the loss is there."""
    ignored = not problem.workload.is_toeplitz and problem.steps**2 > _SCHEDULED
    if ignored:
        problem = replace(problem, workload=replace(problem.workload, learning_rates=None))
    loss, separation = _loss(problem, _PENALTY), _separation(problem)
    tried: list[Optimum] = []
    for positive in range(max(1, min(buffers, _POSITIVE) - 1), min(buffers, _POSITIVE) + 1):
        first = minimise(_positive(loss), _quadrature(positive, separation), iterations=300)
        first = replace(first, x=np.concatenate([first.x[:positive], np.exp(first.x[positive:])]))
        further = buffers - positive
        if further == 0:
            tried.append(minimise(loss, first.x, iterations=300))
            continue
        for slow in _SLOW if problem.steps < _LONG else _SLOW[1:2]:
            gaps = slow / separation * np.arange(1.0, further + 1)
            decays = np.concatenate([first.x[:positive], -np.log(np.expm1(gaps))])
            weights = np.concatenate([first.x[positive:], np.full(further, -1e-4)])
            tried.append(minimise(loss, np.concatenate([decays, weights]), iterations=500))
    found = min(tried, key=lambda optimum: optimum.loss)
    decays, weights = _sigmoid(found.x[:buffers]), found.x[buffers:]
    order = np.argsort(-decays)
    found = replace(found, iterations=sum(optimum.iterations for optimum in tried))
    out = {"decays": decays[order], "weights": weights[order]} | found.arrays()
    return out | ({"schedule_ignored": np.array(1.0)} if ignored else {})


def _separation(problem: Problem) -> int:
    p = problem.participations
    return p.separation if min(p.epochs, -(-problem.steps // p.separation)) > 1 else problem.steps


def _quadrature(buffers: int, separation: int) -> np.ndarray:
    """``i^{−1/2} = π^{−1/2} ∫ e^{−si} s^{−1/2} ds``, log s equally spaced: θ = e^{−s}, ω = √s·Δlog s/π."""
    low = min(0.25, 5.0 / separation)
    s = np.geomspace(low, 0.5, buffers) if buffers > 1 else np.array([np.sqrt(0.5 * low)])
    weights = np.sqrt(s) * np.log(0.5 / low) / max(buffers - 1, 1) / np.pi
    return np.concatenate([-np.log(np.expm1(s)), np.log(weights)])


def _positive(loss: Loss) -> Loss:
    """The same by the logarithms of the weights."""

    def logarithmic(x: np.ndarray) -> tuple[float, np.ndarray]:
        half = len(x) // 2
        weights = np.exp(x[half:])
        value, gradient = loss(np.concatenate([x[:half], weights]))
        return value, gradient * np.concatenate([np.ones(half), weights])

    return logarithmic


def _loss(problem: Problem, penalty: float) -> Loss:
    """By ``log(θ/(1 − θ))`` and ω."""
    steps, error = problem.steps, squared_error(problem)
    lags = np.arange(steps - 1.0)
    impulse = np.zeros(steps)
    impulse[0] = 1.0

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        half = len(x) // 2
        decays, weights = _sigmoid(x[:half]), x[half:]
        zeros = np.linalg.eigvals(np.diag(decays) - weights)  # 1ωᵀ: every row is ω
        if np.abs(zeros).max() > 1.0:  # noise that grows
            return np.inf, np.zeros_like(x)
        poles, zeros = np.sort(decays)[::-1], zeros[np.argsort(-zeros.real, kind="stable")]
        powers = _powers(decays, steps - 1)
        c = np.concatenate([[1.0], powers @ weights])
        w = _cascade(impulse, poles, zeros)
        e, by_w = error(w)
        s, by_c = squared_sensitivity(c, problem.participations)
        through = _cascade(_cascade(by_w[::-1], poles, zeros), poles, zeros)[::-1]  # δw = −C⁻²δc
        by_c = 0.5 * (by_c / s - through / e)[1:]
        by_decays = weights * ((by_c * lags) @ powers) / decays
        by_weights = by_c @ powers + 2.0 * penalty * weights
        value = 0.5 * float(np.log(e * s)) + penalty * float(weights @ weights)
        return value, np.concatenate([by_decays * decays * (1.0 - decays), by_weights])

    return loss


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -20.0, 20.0))))


def _powers(decays: np.ndarray, count: int) -> np.ndarray:
    """``θ_j^i``: count × m."""
    with np.errstate(divide="ignore"):
        logs = np.log(decays)
    out = np.exp(np.arange(1.0, count)[:, None] * logs) if count > 1 else np.zeros((0, len(decays)))
    return np.concatenate([np.ones((min(count, 1), len(decays))), out])


def _cascade(x: np.ndarray, numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """``Π (1 − a_j q)/(1 − b_j q) x``."""
    from scipy.signal import lfilter

    for a, b in zip(numerator, denominator, strict=True):
        x = lfilter([1.0, -a], [1.0, -b], x)
    return np.real(x)
