"""What a run does with a spectrum: η and momentum from its optimizer, two refusals, and a line in the guarantee.

Public curvature decides C before private data is touched, so nothing here costs privacy; what the spectrum was learnt
from gets no protection, and the guarantee says what that was.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import SordinoError, Unsupported
from .plan import Plan
from .public import Public

if TYPE_CHECKING:
    from .curvature import CurvatureWorkload, Spectrum


def curvature(
    spectrum: Spectrum | CurvatureWorkload | str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    exact: bool = False,
) -> CurvatureWorkload:
    """Eq. 1 for this model's spectrum and this optimizer; an error if it is another model's."""
    from .curvature import CurvatureWorkload, as_spectrum

    as_given = isinstance(spectrum, CurvatureWorkload)
    found = as_spectrum(spectrum)
    found.check_model(model)
    if as_given:
        if exact:
            raise SordinoError("exact_curvature is the CurvatureWorkload's own option (cap=False); leave it out")
        return spectrum  # type: ignore[return-value]
    return CurvatureWorkload(found, **sgd(optimizer), cap=not exact)


def sgd(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rate, momentum and weight decay of plain SGD.

    >>> sgd(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
    {'learning_rate': 0.1, 'momentum': 0.9, 'weight_decay': 0.0}
    """
    instead = "pass spectrum=CurvatureWorkload(spectrum, learning_rate, ...) with what it comes close to"
    if not isinstance(optimizer, torch.optim.SGD):
        raise Unsupported(
            f"spectrum= is for SGD, whose steps in a curved direction are known; of {type(optimizer).__name__} they "
            f"are not: use torch.optim.SGD, or {instead}"
        )
    groups = [
        {key: _number(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    keys = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")
    if any(group[key] != groups[0][key] for group in groups for key in keys):
        raise Unsupported(f"spectrum= is for one learning rate, and the optimizer's groups differ; {instead}")
    first = groups[0]
    if first["nesterov"] or first["maximize"] or first["dampening"]:
        raise Unsupported(f"spectrum= is for SGD without nesterov, dampening or maximize; {instead}")
    names = {"learning_rate": "lr", "momentum": "momentum", "weight_decay": "weight_decay"}
    return {name: float(first[key]) for name, key in names.items()}


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def refuse_private_examples(planned: Plan, public: Public | None, dataset: Any, allow: bool) -> None:
    """An error where examples the spectrum was learnt from are private ones. Nothing is said about how many."""
    if planned.curvature is None or allow:
        return
    from .curvature import refuse_overlap

    spectrum = planned.curvature.spectrum
    known = spectrum if spectrum.contents else public
    if known is not None:
        refuse_overlap(known, dataset)


def remark(planned: Plan, allow: bool) -> str | None:
    """What the guarantee says about a matrix that public data has shaped."""
    if planned.curvature is None or not {"curvature_score", "lambda_curvature"} & planned.strategy.certificate.keys():
        return None
    curved = planned.curvature
    text = (
        f"noise {planned.strategy.name} was shaped by the curvature of the loss on public data at learning rate "
        f"{curved.learning_rate:g} ({curved.spectrum.describe()}), which the guarantee does not cover"
    )
    if allow:
        text += "; examples may be private and in that public data too (allow_overlap), and those get no protection"
    return text
