"""Convolutions along packed sentences, and mixtures of convolutions of several scales.

Rows of zeros separate sentences and serve as their zero padding: no sentence sees its neighbor, and
none is padded to another's length. A position may have several vectors (the heads of queries, keys
and values), which share the kernel.

:func:`mix_scales` sums several convolutions of each vector. Scale δ = 0 is the vector itself, scale
δ > 0 a convolution of 2 δ - 1 taps. Every scale of every vector is computed, chosen or not: on CPU,
a training step of Ada-MSHA takes up to a tenth longer for it.

Legend: N tokens, P positions (tokens and gaps), V vectors of a position (all dimensions but the
first and the last), C their width, O width of the result, K taps, S scales, E chosen ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.products import is_on_cpu


@dataclass(frozen=True)
class Gaps:
    """Positions of tokens with ``size`` rows of zeros around every sentence.

    Attributes:
        sentence_N: sentence of each token, ascending.
        sentences: number of sentences.
        size: number of rows between two sentences, before the first and after the last.
    """

    sentence_N: Tensor
    sentences: int
    size: int

    @cached_property
    def position_N(self) -> Tensor:
        """Return the row of each token."""
        stop = self.size + len(self.sentence_N)
        number_N = torch.arange(self.size, stop, device=self.sentence_N.device)
        return torch.add(number_N, self.sentence_N, alpha=self.size)

    @property
    def positions(self) -> int:
        """Return P, the number of rows."""
        return len(self.sentence_N) + self.size * (self.sentences + 1)

    def open(self, x_ND: Tensor) -> Tensor:
        """Insert zeros between sentences, (N, D) → (P, D)."""
        x_PD: Tensor = _Move.apply(x_ND, self, True)  # type: ignore[no-untyped-call]
        return x_PD

    def close(self, x_PD: Tensor) -> Tensor:
        """Leave out the rows between sentences, (P, D) → (N, D)."""
        x_ND: Tensor = _Move.apply(x_PD, self, False)  # type: ignore[no-untyped-call]
        return x_ND


class _Move(torch.autograd.Function):
    """Open or close gaps between sentences; each is the gradient of the other.

    PyTorch's gradient of ``index_select`` adds row by row, which is slow and not needed here: no
    row is selected twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gaps: Gaps, opens: bool) -> Tensor:
        ctx.gaps, ctx.opens = gaps, opens
        return _moved(x, gaps, opens=opens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _moved(gradients[0], ctx.gaps, opens=not ctx.opens), None, None


def _moved(x: Tensor, gaps: Gaps, *, opens: bool) -> Tensor:
    if not opens:
        return x.index_select(0, gaps.position_N)
    x_PD = x.new_zeros(gaps.positions, *x.shape[1:])
    return x_PD.index_copy_(0, gaps.position_N, x)


def convolve(x_PVC: Tensor, weight_OCK: Tensor, bias_O: Tensor) -> Tensor:
    """Return Σ_k W_k x[p + k - K // 2] + bias along the positions, (P, V, O); K is odd.

    Positions beyond the ends are zeros. On CPU, half precision is computed in float32: some
    processors have no other convolution.
    """
    dtype = x_PVC.dtype
    if is_on_cpu(x_PVC):
        dtype = torch.promote_types(dtype, torch.float32)
    x_VCP, weight_OCK, bias_O = (x.to(dtype) for x in (x_PVC.permute(1, 2, 0), weight_OCK, bias_O))
    y_VOP = F.conv1d(x_VCP, weight_OCK, bias_O, padding=weight_OCK.shape[-1] // 2)
    return y_VOP.permute(2, 0, 1).to(x_PVC.dtype)


class Convolution(NamedTuple):
    """Weight and bias of the convolution of one scale."""

    weight_OCK: Tensor
    bias_O: Tensor


def mix_scales(
    x_NVC: Tensor,
    scale_NVE: Tensor,
    weight_NVE: Tensor,
    gaps: Gaps,
    convolutions: Sequence[Convolution],
) -> Tensor:
    """Return Σ_e weight_e · g_{scale_e}(x), of the shape of ``x_NVC``.

    ``convolutions`` have the scales 1, 2, …; ``gaps`` must be as wide as the reach of the
    widest one.
    """
    vectors = x_NVC.shape[1:-1]
    x_NVC, scale_NVE, weight_NVE = (x.flatten(1, -2) for x in (x_NVC, scale_NVE, weight_NVE))
    share_NVS = torch.zeros(
        *scale_NVE.shape[:2], len(convolutions) + 1, dtype=weight_NVE.dtype, device=x_NVC.device
    ).scatter(2, scale_NVE, weight_NVE)
    # a view for each scale: their gradients are added up at once
    plain_PVC, *views = gaps.open(x_NVC).expand(len(convolutions) + 1, -1, -1, -1).unbind()
    seen = [convolve(x_PVC, *scale) for x_PVC, scale in zip(views, convolutions, strict=True)]
    seen_PSVC = torch.stack([plain_PVC, *seen], dim=1)
    share_NSV1 = share_NVS.to(x_NVC.dtype).transpose(1, 2)[..., None]
    return (gaps.close(seen_PSVC) * share_NSV1).sum(1).view(x_NVC.shape[0], *vectors, -1)
