"""Convolutions along packed sentences, and mixtures of convolutions of several scales.

Rows of zeros separate sentences and serve as their zero padding, so that no sentence sees its
neighbor and none is padded to another's length. A position may have several vectors (the heads of
queries, keys and values), which share the kernel.

On CPU, a kernel of k taps is computed as k matrix products over all rows, each shifted by one
position: rows need not be copied, and the products are large, hence fast. On other devices, it is
PyTorch's convolution over one long sequence.

:func:`mix_scales` sums several convolutions of each vector. Scale δ = 0 is the vector itself, scale
δ > 0 a convolution of 2 δ - 1 taps. Each vector has a few chosen scales. On CPU, if these are less
than half of all scales, only they are computed: the neighbors of the vectors with a scale are
gathered, one block at a time, and multiplied with all taps at once. Otherwise every scale of every
vector is computed.

Legend: N tokens, P positions (tokens and gaps), V vectors of a position (all dimensions but the
first and the last), C their width, O width of the result, K taps, S scales, E chosen ones, R rows
(vectors of all positions), B rows of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024
"""Number of vectors whose neighbors are gathered at a time, so that they stay in the caches."""


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

    Positions beyond the ends are zeros. Differentiable. On CPU, half precision is computed in
    float32, so that the sum is not rounded after every tap.
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
    """Convolution by one matrix product per tap over rows (position, vector)."""

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
    """Return, for each tap but the middle one, the rows it reads and the rows it adds to."""
    middle = taps // 2
    found = []
    for tap in range(taps):
        rows = (tap - middle) * vectors
        if rows > 0:
            found.append((tap, slice(rows, None), slice(None, -rows)))
        elif rows < 0:
            found.append((tap, slice(None, rows), slice(-rows, None)))
    return found


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

    ``convolutions`` are those of scales 1, 2, …; ``gaps`` must be as wide as the reach of the
    widest one.
    """
    vectors = x_NVC.shape[1:-1]
    x_NVC, scale_NVE = x_NVC.flatten(1, -2), scale_NVE.flatten(1, -2)
    weight_NVE = weight_NVE.flatten(1, -2)
    if computes_chosen_alone(scale_NVE, scales=len(convolutions) + 1):
        dtype = torch.promote_types(x_NVC.dtype, torch.float32)
        given = [tensor.to(dtype) for convolution in convolutions for tensor in convolution]
        states = gaps.open(x_NVC).to(dtype), weight_NVE.to(dtype)
        mixed_NVC: Tensor = _ChosenScales.apply(  # type: ignore[no-untyped-call]
            *states, scale_NVE, gaps.position_N, *given
        )
        mixed_NVC = mixed_NVC.to(x_NVC.dtype)
    else:
        mixed_NVC = _all_scales(x_NVC, scale_NVE, weight_NVE, gaps, convolutions)
    return mixed_NVC.view(x_NVC.shape[0], *vectors, -1)


def computes_chosen_alone(scale_NVE: Tensor, *, scales: int) -> bool:
    """Return whether only chosen scales are computed; this depends on shapes, not on values."""
    return scale_NVE.device.type == "cpu" and 2 * scale_NVE.shape[-1] < scales


def _all_scales(
    x_NVC: Tensor,
    scale_NVE: Tensor,
    weight_NVE: Tensor,
    gaps: Gaps,
    convolutions: Sequence[Convolution],
) -> Tensor:
    """Compute every scale of every vector; those not chosen have weight 0."""
    share_NVS = torch.zeros(
        *scale_NVE.shape[:2], len(convolutions) + 1, dtype=weight_NVE.dtype, device=x_NVC.device
    ).scatter(2, scale_NVE, weight_NVE)
    # a view for each scale, so that their gradients are added up at once
    plain_PVC, *views = gaps.open(x_NVC).expand(len(convolutions) + 1, -1, -1, -1).unbind()
    seen = [convolve(x_PVC, *one) for x_PVC, one in zip(views, convolutions, strict=True)]
    seen_PSVC = torch.stack([plain_PVC, *seen], dim=1)
    share_NSV1 = share_NVS.to(x_NVC.dtype).transpose(1, 2)[..., None]
    return (gaps.close(seen_PSVC) * share_NSV1).sum(1)


class _ChosenScales(torch.autograd.Function):
    """Mixture of the chosen scales only; the backward pass recomputes what it needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PVC: Tensor,
        weight_NVE: Tensor,
        scale_NVE: Tensor,
        position_N: Tensor,
        *convolutions: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_PVC, weight_NVE, scale_NVE, position_N, *convolutions)
        work = _Work(x_PVC, weight_NVE, scale_NVE, position_N, convolutions)
        mixed = x_PVC.new_zeros(weight_NVE.shape[0] * weight_NVE.shape[1], x_PVC.shape[2])
        for one in work.of_itself():
            mixed.index_add_(0, one.vector_B, work.x_RC[one.row_B] * one.weight_B1)
        for scale, bias_O, one in work.of_neighbors():
            seen = torch.addmm(bias_O, work.gathered(scale, one), work.taps(scale))
            mixed.index_add_(0, one.vector_B, seen.mul_(one.weight_B1))
        return mixed.view(*weight_NVE.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PVC, weight_NVE, scale_NVE, position_N, *convolutions = ctx.saved_tensors
        work = _Work(x_PVC, weight_NVE, scale_NVE, position_N, convolutions)
        dy = gradients[0].flatten(0, 1)
        dx = torch.zeros_like(work.x_RC)
        d_weight = torch.zeros_like(weight_NVE).flatten()
        d_taps = [torch.zeros_like(work.taps(scale)) for scale in range(1, work.scales)]
        d_biases = [torch.zeros_like(bias_O) for bias_O in convolutions[1::2]]
        for one in work.of_itself():
            dy_BO = dy[one.vector_B]
            d_weight[one.entry_B] = (dy_BO * work.x_RC[one.row_B]).sum(1)
            dx.index_add_(0, one.row_B, dy_BO * one.weight_B1)
        for scale, bias_O, one in work.of_neighbors():
            dy_BO, gathered_BI = dy[one.vector_B], work.gathered(scale, one)
            d_gathered_BI = dy_BO @ work.taps(scale).t()
            d_weight[one.entry_B] = (d_gathered_BI * gathered_BI).sum(1) + dy_BO @ bias_O
            weighted_BO = dy_BO * one.weight_B1
            d_taps[scale - 1].addmm_(gathered_BI.t(), weighted_BO)
            d_biases[scale - 1].add_(weighted_BO.sum(0))
            d_gathered_BI.mul_(one.weight_B1)
            columns = d_gathered_BI.split(dx.shape[1], dim=1)
            for offset, d_column_BC in zip(work.offsets(scale), columns, strict=True):
                dx.index_add_(0, one.row_B + offset, d_column_BC.contiguous())
        of_convolutions: list[Tensor] = []
        for taps_IO, d_bias, weight_OCK in zip(d_taps, d_biases, convolutions[::2], strict=True):
            by_tap_KCO = taps_IO.view(weight_OCK.shape[2], weight_OCK.shape[1], -1)
            of_convolutions += [by_tap_KCO.permute(2, 1, 0).contiguous(), d_bias]
        return dx.view_as(x_PVC), d_weight.view_as(weight_NVE), None, None, *of_convolutions


class _Block(NamedTuple):
    """A block of vectors that share a scale.

    Attributes:
        entry_B: index of each (vector, choice).
        vector_B: index of the vector.
        row_B: row of the vector among those of all positions.
        weight_B1: weight of the scale.
    """

    entry_B: Tensor
    vector_B: Tensor
    row_B: Tensor
    weight_B1: Tensor


class _Work:
    """Iteration of :class:`_ChosenScales` over scales and blocks."""

    def __init__(
        self,
        x_PVC: Tensor,
        weight_NVE: Tensor,
        scale_NVE: Tensor,
        position_N: Tensor,
        convolutions: Sequence[Tensor],
    ) -> None:
        self.x_RC = x_PVC.flatten(0, 1)
        self.scales = len(convolutions) // 2 + 1
        self._vectors = x_PVC.shape[1]
        self._convolutions = convolutions
        self._taps_of: dict[int, Tensor] = {}
        self._weight, self._scale = weight_NVE.flatten(), scale_NVE.flatten()
        self._choices = scale_NVE.shape[2]
        number_V = torch.arange(self._vectors)
        self._row = (position_N[:, None] * self._vectors + number_V).flatten()

    def of_itself(self) -> Iterator[_Block]:
        """Yield the blocks of scale 0."""
        yield from self._blocks(0)

    def of_neighbors(self) -> Iterator[tuple[int, Tensor, _Block]]:
        """Yield the blocks of all other scales, each with its scale and bias."""
        for scale in range(1, self.scales):
            for block in self._blocks(scale):
                yield scale, self._convolutions[2 * scale - 1], block

    def taps(self, scale: int) -> Tensor:
        """Return the weights of a scale, (K · C, O)."""
        if scale not in self._taps_of:
            weight_OCK = self._convolutions[2 * scale - 2]
            self._taps_of[scale] = weight_OCK.permute(2, 1, 0).flatten(0, 1).contiguous()
        return self._taps_of[scale]

    def offsets(self, scale: int) -> list[int]:
        """Return the distances from a row to those of its neighbors."""
        return [(tap - scale + 1) * self._vectors for tap in range(2 * scale - 1)]

    def gathered(self, scale: int, block: _Block) -> Tensor:
        """Return each vector's neighbors, side by side, (B, K · C)."""
        rows_BK = block.row_B[:, None] + torch.tensor(self.offsets(scale))
        gathered = self.x_RC.index_select(0, rows_BK.flatten())
        return gathered.view(*rows_BK.shape, self.x_RC.shape[1]).flatten(1)

    def _blocks(self, scale: int) -> Iterator[_Block]:
        for entry_B in (self._scale == scale).nonzero().flatten().split(BLOCK):
            vector_B = entry_B.div(self._choices, rounding_mode="floor")
            weight_B1 = self._weight[entry_B][:, None]
            yield _Block(entry_B, vector_B, self._row[vector_B], weight_B1)
