"""From what a user gives (a spectrum, or its file, a learning rate, what the noise is summed into) to a workload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..asked import shown
from ..errors import SordinoError, Unsupported
from .objective import CurvatureWorkload
from .spectrum import Spectrum

if TYPE_CHECKING:
    from ..strategies import Workload


def curvature_workload(
    spectrum: Spectrum | CurvatureWorkload | str | os.PathLike[str],
    learning_rate: float | None = None,
    exact: bool = False,
    workload: Workload | None = None,
) -> CurvatureWorkload:
    """Eq. 1 for these eigenvalues, with the momentum, weight decay and schedule of `workload`.

    `learning_rate` is the largest of a schedule, of which only the ratios count. `exact` takes eigenvalues beyond 1/η
    as they are. A `CurvatureWorkload` is what it is.

    >>> curvature_workload(Spectrum.given([1.0, 0.5]), 0.1).learning_rate
    0.1
    """
    if isinstance(spectrum, CurvatureWorkload):
        if learning_rate is not None or exact:
            raise SordinoError(
                "spectrum is a CurvatureWorkload, which has its learning rate and its options; leave out learning_rate "
                "and exact_curvature"
            )
        return spectrum
    found = as_spectrum(spectrum)
    if learning_rate is None:
        raise SordinoError(
            "a spectrum was given without the learning rate of the run, which says how fast curved directions forget; "
            "pass learning_rate= (--learning-rate η)"
        )
    options: dict[str, Any] = {"cap": not exact}
    if workload is not None and not workload.is_prefix_sum:
        options["momentum"] = workload.momentum
        if workload.learning_rates is not None:
            largest = max(workload.learning_rates)
            options["schedule"] = tuple(rate / largest for rate in workload.learning_rates)
        if workload.shrink != 1.0:
            if len(options) > 2 or workload.momentum:
                raise Unsupported(
                    "weight decay apart from the gradient, together with momentum or a schedule, has no curvature "
                    "score yet; leave out one of them, or pass spectrum=CurvatureWorkload(spectrum, learning_rate, ...)"
                )
            options["weight_decay"] = (1.0 - workload.shrink) / learning_rate if learning_rate else 0.0
    return CurvatureWorkload(found, learning_rate, **options)


def as_spectrum(spectrum: Any) -> Spectrum:
    """A `Spectrum`, or the one in a file."""
    if isinstance(spectrum, CurvatureWorkload):
        return spectrum.spectrum
    if isinstance(spectrum, Spectrum):
        return spectrum
    if isinstance(spectrum, (str, Path, os.PathLike)):
        return Spectrum.load(spectrum)
    raise SordinoError(
        f"spectrum={shown(spectrum)} must be a Spectrum or the path of its .npz file; Spectrum.given([...]) takes "
        "numbers"
    )
