"""softmax(q kᵀ / sqrt(K)) v by two arithmetically equal kernels.

PyTorch's scaled-dot-product attention, and plain matrix products, which are faster on CPU in
bfloat16, for a few queries and with dropout. :func:`fused_attention_pays` chooses.

Legend: B batch, T query length, S key length, H heads, K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.cpu_choice import cpu_kernels
from pipeline.kernels.products import batched_product


def fused_attention_pays(query_BHTK: Tensor, *, dropout: float = 0.0) -> bool:
    """Whether scaled-dot-product attention is the faster kernel, as measured.

    With dropout PyTorch has none for CPUs: it computes plain products as we do, with more copies.
    """
    if query_BHTK.device.type != "cpu":
        return True
    queries, width = query_BHTK.shape[-2:]
    kernels = cpu_kernels()
    return not dropout and kernels.fuses_attention(query_BHTK.dtype, queries=queries, width=width)


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
    if fused_attention_pays(query_BHTK, dropout=dropout):
        return F.scaled_dot_product_attention(
            query_BHTK,
            key_BHSK,
            value_BHSK,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=dropout,
        )
    scale = 1.0 / math.sqrt(query_BHTK.shape[-1])
    scores_BHTS = batched_product(query_BHTK * scale, key_BHSK.transpose(-1, -2))
    if is_causal:
        length = scores_BHTS.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is not None:
        minus_infinity = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS + scores_BHTS.new_zeros(()).where(mask, minus_infinity)
    weights_BHTS = F.softmax(scores_BHTS, dim=-1)  # summed up in float32 whatever the dtype
    weights_BHTS = F.dropout(weights_BHTS, dropout, training=dropout > 0)
    return batched_product(weights_BHTS, value_BHSK)
