"""A spectrum of many eigenvalues as a few points with weights, for sums of smooth functions of an eigenvalue.

Eigenvalues are sorted into bins that double (by distance to 0, and to the edge of stability), and in each bin replaced
by the Gauss rule of its weights: `POINTS` points that give the same sum for every polynomial of degree up to
2·POINTS − 1. The powers ``(1−ημ)^n`` of NoiseCurve's workloads decay as e^{−s} with s = nημ, and within a bin such a
polynomial is within ``(s/8)^{2m} e^{−s}/(2m)!`` of them: below 1e-15 at m = 12 for every s.
"""

from __future__ import annotations

import numpy as np

POINTS = 12


def gauss(places: np.ndarray, weights: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """The Gauss rule of ``Σ_i weights_i δ(places_i)``: Lanczos on the diagonal matrix of the places.

    >>> x, w = gauss(np.linspace(0, 1, 1001), np.full(1001, 1 / 1001), 3)
    >>> [bool(abs(w @ x**n - np.mean(np.linspace(0, 1, 1001) ** n)) < 1e-15) for n in range(6)]
    [True, True, True, True, True, True]
    """
    places, back = np.unique(places, return_inverse=True)
    weights = np.bincount(back, weights)
    if len(places) <= points:
        return places, weights
    middle, half = (places[0] + places[-1]) / 2, (places[-1] - places[0]) / 2
    y = (places - middle) / half
    basis = np.zeros((points, len(y)))
    alpha, beta = np.zeros(points), np.zeros(points)
    total = float(weights.sum())
    basis[0] = np.sqrt(weights / total)
    for j in range(points):
        image = y * basis[j]
        alpha[j] = basis[j] @ image
        for _ in range(2):
            image -= basis[: j + 1].T @ (basis[: j + 1] @ image)
        beta[j] = float(np.linalg.norm(image))
        if j + 1 < points:
            if beta[j] < 1e-14:  # fewer places count than points
                alpha, beta = alpha[: j + 1], beta[: j + 1]
                break
            basis[j + 1] = image / beta[j]
    nodes, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1))
    return middle + half * nodes, total * vectors[0] ** 2


def compressed(
    places: np.ndarray, weights: np.ndarray, finest: float, edge: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Points for ``Σ_i weights_i f(places_i)``, places > 0; f is nearly linear below `finest`, or as near to `edge`."""
    distance = np.minimum(places, edge - places)
    low = places <= edge - places
    number = np.ceil(np.log2(np.maximum(distance / finest, 1.0))).astype(int)
    found = [
        gauss(places[chosen], weights[chosen])
        for side in (low, ~low)
        for n in np.unique(number[side])
        if (chosen := side & (number == n)).any()
    ]
    return np.concatenate([x for x, _ in found]), np.concatenate([w for _, w in found])
