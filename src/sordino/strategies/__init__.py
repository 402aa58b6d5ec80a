"""The matrices C: which noise is added at which step, and how much of it later steps take back.

``STRATEGIES`` is the registry of the choice ``noise``; `make_strategy` builds one from
the text a user writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..errors import SordinoError
from ..registry import Entry, Registry
from .band_inv_mf import band_inv_mf
from .band_mf import band_mf
from .band_mf_general import band_mf_general
from .base import Recurrence, Strategy
from .best_lambda import lambda_cgd, normalized_lambda_cgd
from .bisr import bisr
from .blt import BLT, blt
from .bsr import bsr
from .dense_matrix import DenseMatrix, dense_matrix
from .diagonal import Diagonal
from .identity import Identity
from .lambda_cgd import LambdaCGD, NormalizedLambdaCGD
from .noise_curve import NoiseCurve, noise_curve
from .problem import Problem
from .sensitivity import Sensitivity
from .toeplitz import Toeplitz, parse_bandwidth
from .workload import PREFIX_SUM, Workload

STRATEGIES: Registry[Strategy] = Registry("noise")
STRATEGIES.add(
    Entry(
        "identity",
        lambda argument, problem, definition: Identity(problem.steps),
        "independent noise at every step (DP-SGD)",
        paper="Abadi et al. 2016, Deep Learning with Differential Privacy",
        capabilities={"regenerates": True, "identity": True, "bands": 1},
    )
)
STRATEGIES.add(
    Entry(
        "lambda-cgd",
        lambda argument, problem, definition: lambda_cgd(argument, problem),
        "takes back λ times the previous step's noise, drawn again rather than stored",
        paper="DP-λCGD",
        argument="0.95",
        capabilities={"regenerates": True, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "lambda-cgd-normalized",
        lambda argument, problem, definition: normalized_lambda_cgd(argument, problem),
        "the same, with every column of C scaled to norm 1",
        paper="DP-λCGD, column normalisation",
        argument="0.95",
        capabilities={"regenerates": True, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "bisr",
        lambda argument, problem, definition: bisr(argument, problem),
        "the inverse square root of the prefix sum, cut to a band: past noise is drawn again",
        paper="Kalinin et al. 2025, Back to Square Roots",
        argument="16",
        capabilities={"regenerates": True, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "bsr",
        lambda argument, problem, definition: bsr(argument, problem),
        "the square root of the prefix sum, cut to a band: past outputs are kept",
        paper="Kalinin & Lampert 2024, Banded Square Root Matrix Factorization",
        argument="16",
        capabilities={"regenerates": False, "identity": False, "bands": "argument"},
    )
)
STRATEGIES.add(
    Entry(
        "band-inv-mf",
        band_inv_mf,
        "a banded Toeplitz inverse, its coefficients optimised: past noise is drawn again",
        paper="Kalinin et al. 2025, Back to Square Roots",
        argument="16",
        capabilities={"regenerates": True, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "band-mf",
        band_mf,
        "a banded Toeplitz matrix, its coefficients optimised: past outputs are kept",
        paper="McKenna 2025, Scaling up the Banded Matrix Factorization Mechanism",
        argument="16",
        capabilities={"regenerates": False, "identity": False, "bands": "argument"},
    )
)
STRATEGIES.add(
    Entry(
        "band-mf-general",
        band_mf_general,
        "a banded matrix with unit columns, all its entries optimised: past outputs are kept",
        paper="Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization",
        argument="16",
        capabilities={"regenerates": False, "identity": False, "bands": "argument"},
    )
)
STRATEGIES.add(
    Entry(
        "noise-curve",
        noise_curve,
        "a banded matrix with unit columns, optimised for the curvature of the loss on public data",
        paper="Gu et al. 2026, NoiseCurve",
        argument="16",
        capabilities={"regenerates": False, "identity": False, "bands": "argument", "needs_spectrum": True},
    )
)
STRATEGIES.add(
    Entry(
        "blt",
        blt,
        "a Toeplitz matrix that is a sum of exponentials, optimised: one kept vector for each of them",
        paper="Dvijotham et al. 2024; McMahan & Pillutla 2025, An Inversion Theorem for Buffered Linear Toeplitz",
        argument="4",
        capabilities={"regenerates": False, "identity": False},
    )
)
STRATEGIES.add(
    Entry(
        "diagonal",
        lambda argument, problem, definition: Diagonal(problem.steps),
        "independent noise, less of it in early steps: the best diagonal with full batches",
        paper="DP-λCGD, Theorem 4",
        capabilities={"regenerates": True, "identity": False, "bands": 1},
    )
)
STRATEGIES.add(
    Entry(
        "dense",
        dense_matrix,
        "a lower-triangular matrix of your own, from a .npy or .npz file",
        argument="PATH",
        capabilities={"regenerates": False, "identity": False},
    )
)


_BY_CURVATURE = ("lambda-cgd", "lambda-cgd-normalized", "band-inv-mf", "noise-curve")


def make_strategy(
    text: str | Strategy, problem: int | Problem, definition: Mapping[str, np.ndarray] | None = None
) -> Strategy:
    """The strategy a user means by ``text`` for a problem, or over so many steps.

    A `definition` (of the same name, from an earlier run) is taken as it is; nothing is optimised again. With
    ``objective="curvature"`` λ and BandInvMF's coefficients are chosen by the curvature score; the others are
    optimised for the RMSE.

    >>> make_strategy("lambda-cgd:0.9", 100).terms(3)
    [(3, 1.0), (2, -0.9)]
    """
    problem = problem if isinstance(problem, Problem) else Problem(problem)
    if isinstance(text, Strategy):
        if text.steps != problem.steps:
            raise SordinoError(f"noise={text!r} was built for {text.steps} steps, the run has {problem.steps}")
        return text
    entry, argument = STRATEGIES.parse(text)
    if problem.objective == "curvature" and entry.name not in _BY_CURVATURE:
        problem = replace(problem, objective="rmse")
    return entry.build(argument, problem, definition)


__all__ = [
    "PREFIX_SUM",
    "BLT",
    "STRATEGIES",
    "DenseMatrix",
    "Diagonal",
    "Identity",
    "LambdaCGD",
    "NoiseCurve",
    "NormalizedLambdaCGD",
    "Problem",
    "Recurrence",
    "Sensitivity",
    "Strategy",
    "Toeplitz",
    "Workload",
    "make_strategy",
    "parse_bandwidth",
]
