"""What the examples and experiments train."""

from __future__ import annotations

from . import dense, residual, small_cnn, vgg  # noqa: F401  (each adds its entries)
from .base import MODELS, build, options_of

__all__ = ["MODELS", "build", "options_of"]
