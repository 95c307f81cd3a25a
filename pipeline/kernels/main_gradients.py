"""Gradients that are added to float32 sums as soon as they have been computed.

Else the gradients of all experts of a rank, in 16 bits, would live beside their sums until a pass
ends. Grouped products cannot write or add to float32 (PyTorch 2.13), so that a gradient exists on
its own until the layer below computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Settings:
    keeps_gradients = False


def add_gradients_to(total: Tensor, parameter: nn.Parameter) -> None:
    """Let passes add the gradient of a parameter, which modules read by :func:`summed`, to a sum.

    The parameter has no gradient then, which ``torch.autograd.grad`` refuses unless
    ``allow_unused`` is set.
    """
    parameter.main_gradient = total  # type: ignore[attr-defined]


@contextmanager
def keeping_gradients() -> Iterator[None]:
    """Let all parameters have their gradients inside the context, and add none to sums."""
    _Settings.keeps_gradients = True
    try:
        yield
    finally:
        _Settings.keeps_gradients = False


def summed(parameter: Tensor) -> Tensor:
    """Return a parameter whose gradient goes into its ``main_gradient``, if there is one."""
    total: Tensor | None = getattr(parameter, "main_gradient", None)
    if total is None or _Settings.keeps_gradients or not torch.is_grad_enabled():
        return parameter
    same: Tensor = _Summed.apply(parameter, total)  # type: ignore[no-untyped-call]
    return same


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.total.add_(gradients[0])
        return None, None
