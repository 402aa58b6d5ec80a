"""GPU kernels for per-example norms and gradients, each with a twin in plain torch beside its caller.

    gram_norms        ‖Σ_t l_t r_tᵀ‖² from tiles of both Gram matrices, none of which is ever written
    conv_gradients    a convolution's per-example weight gradients (or only their norms), patches cut out on the fly
    layer_norm_sums   Σ_t g_t x̂_t and Σ_t g_t by example

Norms are formed in float32: float32 products go through three TF32 products
("tf32x3", relative error about 1e-7), half-precision ones are exact. Partial sums
are written out and added in a fixed order, so results do not change from run to run.
"""

from __future__ import annotations

from .common import INTERPRETED, usable
from .convolution import conv_gradients
from .gram import gram_norms
from .layer_norm import layer_norm_sums

__all__ = ["INTERPRETED", "conv_gradients", "gram_norms", "layer_norm_sums", "usable"]
