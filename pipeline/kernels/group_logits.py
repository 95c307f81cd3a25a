"""Logits of a router that every group of tokens has its own of, averaged with one of all.

On CPU by the products of both. On other devices, where every operator costs a launch, by one
product with the averaged weights (counted on the meta device and tested on CPU; not yet run on a
GPU).

Legend: N tokens, D model width, E experts, G groups of tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.products import linear


def averaged_logits(x_ND: Tensor, weight_ED: Tensor, weight_GED: Tensor, group_N: Tensor) -> Tensor:
    """(W x + W_g x) / 2, g the group of the token, (N, E)."""
    if x_ND.device.type == "cpu":
        return average_of_logits(x_ND, weight_ED, weight_GED, group_N)
    return logits_of_average(x_ND, weight_ED, weight_GED, group_N)


def average_of_logits(
    x_ND: Tensor, weight_ED: Tensor, weight_GED: Tensor, group_N: Tensor
) -> Tensor:
    """:func:`averaged_logits` as it is written."""
    group_logits_NE = _logits_of_groups(x_ND, weight_GED, group_N)
    return (linear(x_ND, weight_ED) + group_logits_NE) / 2


def logits_of_average(
    x_ND: Tensor, weight_ED: Tensor, weight_GED: Tensor, group_N: Tensor
) -> Tensor:
    """:func:`averaged_logits` in few operators."""
    mean_GED = _Average.apply(weight_ED, weight_GED)  # type: ignore[no-untyped-call]
    return _logits_of_groups(x_ND, mean_GED, group_N)


def _logits_of_groups(x_ND: Tensor, weight_GED: Tensor, group_N: Tensor) -> Tensor:
    """Those of all groups, of which each token takes its own."""
    num_groups, num_experts, _ = weight_GED.shape
    all_logits_NGE = linear(x_ND, weight_GED.flatten(0, 1)).view(-1, num_groups, num_experts)
    index_N1E = group_N[:, None, None].expand(-1, 1, num_experts)
    return all_logits_NGE.gather(1, index_N1E).squeeze(1)


class _Average(torch.autograd.Function):
    """(W + W_g) / 2 of every group, (G, E, D)."""

    @staticmethod
    def forward(ctx: Any, weight_ED: Tensor, weight_GED: Tensor) -> Tensor:  # noqa: ARG004
        return torch.lerp(weight_GED, weight_ED.expand_as(weight_GED), 0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        half_GED = gradients[0] / 2
        return half_GED.sum(0), half_GED
