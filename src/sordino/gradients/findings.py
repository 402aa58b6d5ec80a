"""What the sensitivity check can find wrong, in one line each."""

from __future__ import annotations

from ..errors import PrivacyError, SordinoError


def mixing(name: str) -> PrivacyError:
    return PrivacyError(
        f"sensitivity check failed at parameter {name!r}: the gradient of one example depends on who else is in the "
        "batch; look for batch statistics, a mean over the batch, mixed-up examples, padding to the longest example "
        "that the model does not mask, or a divisor counted over the batch, and make each loss depend on its own "
        "example alone"
    )


def unreached(missing: list[str]) -> SordinoError:
    names = ", ".join(repr(name) for name in missing[:5]) + (" …" if len(missing) > 5 else "")
    return SordinoError(
        f"no loss reaches {len(missing)} trainable parameter(s): {names}; freeze what is not used with "
        "requires_grad_(False), or make the loss depend on it"
    )


def still_zero(stuck: list[str]) -> SordinoError:
    """After the first update: whoever is still at exactly zero while the others moved trains nothing."""
    names = ", ".join(repr(name) for name in stuck[:5]) + (" …" if len(stuck) > 5 else "")
    return SordinoError(
        f"the gradient of {names} is exactly zero, before and after the first update; it trains nothing: freeze it "
        "with requires_grad_(False), look for a multiplication by zero in front of it, or pass check=False if its turn "
        "comes later"
    )
