"""Which of the GPU's kernels can be used here."""

from __future__ import annotations

import functools
import warnings


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn("triton is not installed: noise for the GPU is drawn on the CPU, slowly", stacklevel=3)
        return False
    return True


@functools.lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Those of `triton_moves`, written for Triton 3.3 or later."""
    if not has_triton():
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
