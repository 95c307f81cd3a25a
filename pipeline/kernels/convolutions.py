"""Convolutions along sentences that lie one behind the other.

Rows of zeros between sentences stand for what lies beyond them, so that no sentence sees its
neighbour and none is padded to another's length. A position may have several vectors, which are
convolved alike (the heads of queries, keys and values).

On CPU a kernel of k taps is k matrix products over all rows, each shifted by one position: the rows
lie as they are, and the products run at the speed of large ones. Elsewhere it is PyTorch's
convolution over one long sequence.

Legend: N tokens, P positions (tokens and gaps), V vectors of a position, C their width, O width of
the result, K taps.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Gaps:
    """Where tokens lie when ``size`` rows of zeros stand around every sentence.

    Attributes:
        sentence_N: sentence of each token, ascending.
        sentences: how many there are.
        size: rows between two sentences, before the first and behind the last.
    """

    sentence_N: Tensor
    sentences: int
    size: int

    @cached_property
    def position_N(self) -> Tensor:
        """Row of each token."""
        stop = self.size + len(self.sentence_N)
        number_N = torch.arange(self.size, stop, device=self.sentence_N.device)
        return torch.add(number_N, self.sentence_N, alpha=self.size)

    @property
    def positions(self) -> int:
        """P."""
        return len(self.sentence_N) + self.size * (self.sentences + 1)

    def open(self, x_ND: Tensor) -> Tensor:
        """(N, D) → (P, D), with zeros between sentences."""
        x_PD: Tensor = _Open.apply(x_ND, self)  # type: ignore[no-untyped-call]
        return x_PD

    def close(self, x_PD: Tensor) -> Tensor:
        """(P, D) → (N, D): what lies between sentences is left out."""
        x_ND: Tensor = _Close.apply(x_PD, self)  # type: ignore[no-untyped-call]
        return x_ND


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gaps: Gaps) -> Tensor:
        ctx.gaps = gaps
        return _opened(x_ND, gaps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.gaps.position_N), None


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, gaps: Gaps) -> Tensor:
        ctx.gaps = gaps
        return x_PD.index_select(0, gaps.position_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _opened(gradients[0], ctx.gaps), None


def _opened(x_ND: Tensor, gaps: Gaps) -> Tensor:
    x_PD = x_ND.new_zeros(gaps.positions, *x_ND.shape[1:])
    return x_PD.index_copy_(0, gaps.position_N, x_ND)


def convolve(x_PVC: Tensor, weight_OCK: Tensor, bias_O: Tensor) -> Tensor:
    """Σ_k W_k x[p + k - K // 2] + bias along the positions, (P, V, O); K is odd.

    Beyond the first and the last position there are zeros. Differentiable. On CPU half precision is
    computed in float32, so that taps are not rounded one by one.
    """
    if x_PVC.device.type != "cpu":
        x_VCP = x_PVC.permute(1, 2, 0)
        y_VOP = F.conv1d(x_VCP, weight_OCK, bias_O, padding=weight_OCK.shape[-1] // 2)
        return y_VOP.permute(2, 0, 1)
    dtype = torch.promote_types(x_PVC.dtype, torch.float32)
    states = x_PVC.to(dtype), weight_OCK.to(dtype), bias_O.to(dtype)
    y_PVO: Tensor = _Convolution.apply(*states)  # type: ignore[no-untyped-call]
    return y_PVO.to(x_PVC.dtype)


class _Convolution(torch.autograd.Function):
    """By one matrix product per tap over rows (position, vector)."""

    @staticmethod
    def forward(ctx: Any, x_PVC: Tensor, weight_OCK: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(x_PVC, weight_OCK)
        x, weight_KCO = x_PVC.flatten(0, 1), weight_OCK.permute(2, 1, 0).contiguous()
        y = torch.addmm(bias_O, x, weight_KCO[len(weight_KCO) // 2])
        for tap, there, here in _shifted(len(weight_KCO), vectors=x_PVC.shape[1]):
            y[here].addmm_(x[there], weight_KCO[tap])
        return y.view(*x_PVC.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PVC, weight_OCK = ctx.saved_tensors
        x, dy = x_PVC.flatten(0, 1), gradients[0].flatten(0, 1)
        weight_KOC = weight_OCK.permute(2, 0, 1).contiguous()
        taps, middle = len(weight_KOC), len(weight_KOC) // 2
        dx = dy @ weight_KOC[middle]
        d_weight_KOC = torch.empty_like(weight_KOC)
        torch.mm(dy.t(), x, out=d_weight_KOC[middle])
        for tap, there, here in _shifted(taps, vectors=x_PVC.shape[1]):
            dx[there].addmm_(dy[here], weight_KOC[tap])
            torch.mm(dy[here].t(), x[there], out=d_weight_KOC[tap])
        return dx.view_as(x_PVC), d_weight_KOC.permute(1, 2, 0).contiguous(), dy.sum(0)


def _shifted(taps: int, *, vectors: int) -> list[tuple[int, slice, slice]]:
    """Of each tap beside the middle: which rows it reads, and to which rows it adds."""
    middle = taps // 2
    found = []
    for tap in range(taps):
        rows = (tap - middle) * vectors
        if rows > 0:
            found.append((tap, slice(rows, None), slice(None, -rows)))
        elif rows < 0:
            found.append((tap, slice(None, rows), slice(-rows, None)))
    return found
