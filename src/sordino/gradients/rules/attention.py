"""`F.multi_head_attention_forward` written out in projections and `scaled_dot_product_attention`.

The same mathematics as torch's, so that each projection is an ordinary linear
use; tested against torch over its options.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """query (L, n, E), key and value (S, n, ·), as torch has it."""
    length, n, width = query.shape
    head = width // num_heads
    weights: Any
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.split(width)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        if query is key and key is value:
            q, k, v = F.linear(query, in_proj_weight, in_proj_bias).split(width, dim=-1)
        else:
            weights = in_proj_weight.split(width)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    else:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    padding = _additive(key_padding_mask, q.dtype)
    mask = _additive(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(n, num_heads, *mask.shape[1:])
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, n, width)])
        v = torch.cat([v, bias_v.expand(1, n, width)])
        mask = None if mask is None else F.pad(mask, (0, 1))
        padding = None if padding is None else F.pad(padding, (0, 1))
    q, k, v = (x.reshape(x.shape[0], n, num_heads, head).permute(1, 2, 0, 3) for x in (q, k, v))
    if static_k is not None:
        k = static_k.view(n, num_heads, -1, head)
    if static_v is not None:
        v = static_v.view(n, num_heads, -1, head)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
        padding = None if padding is None else F.pad(padding, (0, 1))
    if padding is not None:
        padding = padding.view(n, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    dropout = dropout_p if training else 0.0
    if need_weights:
        scores = (q * head**-0.5) @ k.transpose(-2, -1)
        weights_ = (scores if mask is None else scores + mask).softmax(-1)
        weights_ = F.dropout(weights_, dropout) if dropout > 0 else weights_
        out = weights_ @ v
    else:
        causal = is_causal and mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    out = F.linear(out.permute(2, 0, 1, 3).reshape(length, n, -1), out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    return out, weights_.mean(1) if average_attn_weights else weights_


DECOMPOSITIONS: dict[Any, Any] = {F.multi_head_attention_forward: multi_head_attention_forward}
