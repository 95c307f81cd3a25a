"""The weights of routes once some have been dropped.

Legend: N tokens, C choices per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def kept_weights(weight_NC: Tensor, is_kept_NC: Tensor | None, *, renormalize: bool) -> Tensor:
    """0 where dropped; with ``renormalize`` a token's others sum to 1."""
    kept_NC = weight_NC if is_kept_NC is None else weight_NC * is_kept_NC
    if not renormalize:
        return kept_NC
    if kept_NC.device.type != "cpu":
        return shares(kept_NC)
    return kept_NC / kept_NC.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def shares(x_NC: Tensor) -> Tensor:
    """Of every token's sum, and 0 where that is 0, with a gradient of 0 there, in few operators.

    Unlike on CPU, routes that were dropped may have a gradient. Not yet run on a GPU.
    """
    shares_NC: Tensor = _Shares.apply(x_NC)  # type: ignore[no-untyped-call]
    return shares_NC


class _Shares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor) -> Tensor:
        total_N1 = x_NC.sum(-1, keepdim=True)
        total_N1.masked_fill_(total_N1 == 0, torch.inf)
        shares_NC = x_NC / total_N1
        ctx.save_for_backward(shares_NC, total_N1)
        return shares_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        shares_NC, total_N1 = ctx.saved_tensors
        (d_shares_NC,) = gradients
        mean_N1 = (d_shares_NC * shares_NC).sum(-1, keepdim=True)
        d_x_NC: Tensor = (d_shares_NC - mean_N1) / total_N1
        return d_x_NC
