"""softmax(q kᵀ / sqrt(K)) v of sentences that lie one behind the other, without padding.

By the operator of flash attention that PyTorch brings for NVIDIA's cards, which takes the bounds of
sentences. ``torch.nn.attention.varlen`` calls the same one with a dropout of 0 (PyTorch 2.13), so
that training calls it itself; it has a derivative. Where it is not, attention is padded
(:mod:`pipeline.kernels.scaled_dot_product`).

What is handed over has been tested on CPU with a loop over sentences in the operator's place; not
yet run on a GPU.

Legend: N query tokens, M key tokens, B sentences, H heads, K head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

FLASH_CAPABILITY = (8, 0)
FLASH_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE = 8
MAX_HEAD_WIDTH = 128
"""Up to here all cards can go backward with dropout; beyond 192 some cannot."""


class Spans(NamedTuple):
    """Where sentences lie among packed tokens.

    Attributes:
        bound_B: (B + 1,) int32: where each sentence starts, and where the last one ends.
        longest: tokens of the longest one, known to the host.
    """

    bound_B: Tensor
    longest: int


def can_attend_packed(
    x: Tensor, *, head_width: int, capability: tuple[int, int] | None = None
) -> bool:
    """Whether the operator takes heads of this width, of states like ``x``.

    ``capability`` is by default that of the device; the meta device, on which operators are
    counted, has it.
    """
    if x.device.type == "cpu" or x.dtype not in FLASH_TYPES:
        return False
    if capability is None:
        is_cuda = x.device.type == "cuda"
        capability = torch.cuda.get_device_capability(x.device) if is_cuda else FLASH_CAPABILITY
    return (
        capability >= FLASH_CAPABILITY
        and head_width <= MAX_HEAD_WIDTH
        and head_width % WIDTH_MULTIPLE == 0
    )


def attend_packed(
    query_NHK: Tensor,
    key_MHK: Tensor,
    value_MHK: Tensor,
    *,
    queries: Spans,
    keys: Spans,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """The context of every query, (N, H, K): each sentence attends to the one of its number."""
    context_NHK, *_ = _flash_attention(
        query_NHK,
        key_MHK,
        value_MHK,
        queries.bound_B,
        keys.bound_B,
        queries.longest,
        keys.longest,
        dropout,
        is_causal,
    )
    return context_NHK


def _flash_attention(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator, without the weights that it could return for debugging."""
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*arguments, False)
    return results
