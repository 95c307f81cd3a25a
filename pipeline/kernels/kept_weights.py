"""The weights of routes once some have been dropped.

Legend: N tokens, C choices per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def kept_weights(weight_NC: Tensor, is_dropped_NC: Tensor | None, *, renormalize: bool) -> Tensor:
    """0 where dropped; with ``renormalize`` a token's others sum to 1."""
    kept_NC = weight_NC if is_dropped_NC is None else weight_NC.masked_fill(is_dropped_NC, 0)
    if not renormalize:
        return kept_NC
    return kept_NC / kept_NC.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def kept_softmax(logits_NC: Tensor, is_dropped_NC: Tensor) -> Tensor:
    """A softmax over what was not dropped, and 0 elsewhere.

    The renormalised :func:`kept_weights` of a softmax, in few operators, for other devices than the
    CPU. Not yet run on a GPU.
    """
    weight_NC: Tensor = _KeptSoftmax.apply(logits_NC, is_dropped_NC)  # type: ignore[no-untyped-call]
    return weight_NC


class _KeptSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, is_dropped_NC: Tensor) -> Tensor:
        weight_NC = F.softmax(logits_NC.masked_fill(is_dropped_NC, -torch.inf), dim=-1)
        weight_NC.masked_fill_(is_dropped_NC, 0)
        ctx.save_for_backward(weight_NC)
        return weight_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight_NC,) = ctx.saved_tensors
        return softmax_backward(gradients[0], weight_NC), None


def softmax_backward(d_softmax: Tensor, softmax: Tensor) -> Tensor:
    """The gradient of what a softmax over the last dimension was made of, in one operator."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data(d_softmax, softmax, -1, softmax.dtype)
    return gradient
