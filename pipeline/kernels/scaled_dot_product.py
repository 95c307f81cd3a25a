"""softmax(q kᵀ / sqrt(K)) v by two arithmetically equal kernels.

PyTorch's scaled-dot-product attention, and plain matrix products, which are faster on CPU in
bfloat16 and for a few queries. :func:`fused_attention_pays` chooses.

Legend: B batch, T query length, S key length, H heads, K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_QUERIES = 16
"""Up to here (decoding: one per beam) plain matrix products are the faster kernel on CPU."""


def fused_attention_pays(query_BHTK: Tensor) -> bool:
    """Whether scaled-dot-product attention is the faster kernel, as measured."""
    if query_BHTK.device.type != "cpu":
        return True
    return query_BHTK.dtype != torch.bfloat16 and query_BHTK.shape[-2] > FEW_QUERIES


def attention_mask(is_allowed: Tensor, *, beside: Tensor) -> Tensor:
    """A mask as :func:`attend` takes it at the least cost.

    Other devices than the CPU add numbers to the scores: 0 where allowed, else -inf.
    """
    if beside.device.type == "cpu":
        return is_allowed
    bias = torch.zeros_like(is_allowed, dtype=beside.dtype)
    return bias.masked_fill_(~is_allowed, -torch.inf)


def attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """The context of every query.

    ``mask`` broadcasts to (B, H, T, S) and is True where allowed, or what
    :func:`attention_mask` makes of it on the device.
    """
    if fused_attention_pays(query_BHTK):
        return F.scaled_dot_product_attention(
            query_BHTK,
            key_BHSK,
            value_BHSK,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=dropout,
        )
    scale = 1.0 / math.sqrt(query_BHTK.shape[-1])
    scores_BHTS = (query_BHTK * scale) @ key_BHSK.transpose(-1, -2)
    if is_causal:
        length = scores_BHTS.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is not None:
        minus_infinity = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS + scores_BHTS.new_zeros(()).where(mask, minus_infinity)
    weights_BHTS = F.softmax(scores_BHTS, dim=-1)  # summed up in float32 whatever the dtype
    weights_BHTS = F.dropout(weights_BHTS, dropout, training=dropout > 0)
    return weights_BHTS @ value_BHSK
