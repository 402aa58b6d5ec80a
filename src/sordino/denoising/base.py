"""What happens to the noisy sum before it is un-whitened: the contract of a denoiser.

A denoiser is a function of what has already been released (the noisy averaged
sum) and of public numbers (the standard deviation of its noise), so it is
post-processing and costs no privacy.

Capabilities of an entry, as data:

``white_noise``       the noise of the step must be i.i.d. in the coordinates it is given in; a geometry
                      that has no such coordinates is refused
``correlated_noise``  "fine", or "warn" if a non-linear step breaks the cancellation between steps
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, MutableMapping
from typing import Any, ClassVar

from torch import Tensor

from ..errors import Unsupported
from ..registry import Entry, Registry


class Denoiser(ABC):
    """Called once a step, in the coordinates in which the noise is white."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, updates: MutableMapping[str, Tensor], noise_std: float, matrices: Collection[str]) -> None:
        """Denoise in place.

        `updates` maps parameter names to noisy averaged gradients, `noise_std` is the standard deviation of the noise
        in their entries (``ζσ‖row t of C⁻¹‖/B``), `matrices` names the weights of linear layers; everything else is
        left as it is.
        """

    def options(self) -> dict[str, Any]:
        """What was chosen, as JSON."""
        return {"name": self.name}


DENOISERS: Registry[Denoiser] = Registry("denoising")


def check(entry: Entry[Denoiser], *, correlated_noise: bool, white_noise: bool, geometry: str = "") -> list[str]:
    """Warnings for what is sound but usually harmful; `Unsupported` for what makes no sense."""
    if entry.capabilities.get("white_noise") and not white_noise:
        raise Unsupported(
            f"denoising={entry.name!r} needs white noise, and geometry={geometry or 'this one'!r} has no coordinates "
            "in which the noise is white; use denoising='none'"
        )
    if correlated_noise and entry.capabilities.get("correlated_noise") == "warn":
        return [
            f"denoising={entry.name!r} with correlated noise is private but usually harmful: a non-linear step breaks "
            "the cancellation of noise between steps; compare with denoising='none'"
        ]
    return []
