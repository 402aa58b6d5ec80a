"""What public data tells about the curvature of the loss, and what that says about noise (NoiseCurve).

`prepare` brings a model where its curvature is that of the training to come, `estimate_spectrum` finds the eigenvalues
of the Hessian there, `CurvatureWorkload` makes of them what correlated noise is optimised for, and `curvature_score`
compares any two strategies by it. `HessianOperator`, `Lanczos`, `quadrature` and `dominance` are the parts.
"""

from __future__ import annotations

from .asked import as_spectrum, curvature_workload
from .dominance import Dominance, PrivateNumber, dominance, dominance_of_matrices, private_dominance
from .estimate import estimate_spectrum
from .hessian import HessianOperator
from .lanczos import Eigenvalues, Lanczos
from .objective import CurvatureWorkload, curvature_score
from .operators import Dense, Operator
from .overlap import Overlap, overlap, refuse_overlap
from .picture import draw_dominance, draw_spectrum
from .prepare import prepare
from .quadrature import Quadrature, quadrature
from .spectrum import Spectrum
from .tail import Tail, fit_tail
from .upper import Upper

__all__ = [
    "CurvatureWorkload",
    "Dense",
    "Dominance",
    "Eigenvalues",
    "HessianOperator",
    "Lanczos",
    "Operator",
    "Overlap",
    "PrivateNumber",
    "Quadrature",
    "Spectrum",
    "Tail",
    "Upper",
    "as_spectrum",
    "curvature_score",
    "curvature_workload",
    "dominance",
    "dominance_of_matrices",
    "draw_dominance",
    "draw_spectrum",
    "estimate_spectrum",
    "fit_tail",
    "overlap",
    "prepare",
    "private_dominance",
    "quadrature",
    "refuse_overlap",
]
