"""Attention of packed sentences by fused kernels, and slices whose gradients need no copies.

A tile of 64 queries visits the keys of its first to its last sentence: short sentences share a
tile, and no work is spent on padding.

Legend: B sentences, N query tokens, M key tokens, H heads, K head width, X width of a product.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.launching import launch, power_of_two
from pipeline.kernels.noise import Dropout
from pipeline.kernels.residuals import signed_threshold

TILES = {
    "attention_forward": (64, 32, 4, 3),
    "attention_backward_queries": (64, 32, 4, 3),
    "attention_backward_keys": (32, 64, 4, 3),
}
"""Queries and keys of a tile, warps, and tiles that are loaded ahead, by kernel."""


def fused_attention(
    query_NHK: Tensor,
    key_MHK: Tensor,
    value_MHK: Tensor,
    bound_B: Tensor,
    key_bound_B: Tensor,
    span_N: Tensor,
    span_M: Tensor,
    dropout: Dropout | None,
    *,
    is_causal: bool,
) -> Tensor:
    """Return the context of every query, (N, H, K).

    The arguments are as in :func:`pipeline.kernels.attention.attend_packed`, with bounds and
    sentences of queries and keys.
    """
    keys = (None, None) if dropout is None else dropout.noise
    site, rate = (0, 0.0) if dropout is None else dropout[1:]
    context_NHK: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
        *(query_NHK, key_MHK, value_MHK, bound_B, key_bound_B, span_N, span_M),
        *(*keys, is_causal, site, rate),
    )
    return context_NHK


class _PackedAttention(torch.autograd.Function):
    """Attention by a kernel forward and two backward, of which the first serves the second."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NHK: Tensor,
        key_MHK: Tensor,
        value_MHK: Tensor,
        bound_B: Tensor,
        key_bound_B: Tensor,
        sentence_N: Tensor,
        sentence_M: Tensor,
        seed_N: Tensor | None,
        row_N: Tensor | None,
        is_causal: bool,
        site: int,
        rate: float,
    ) -> Tensor:
        states = [_in_rows(x) for x in (query_NHK, key_MHK, value_MHK)]
        rows, heads, width = query_NHK.shape
        context_NHK = query_NHK.new_empty(rows, heads, width)
        normalizer_NH = query_NHK.new_empty(rows, heads, dtype=torch.float32)
        ctx.strides = tuple(x.stride(0) for x in states)
        ctx.numbers = width**-0.5, 1 / (1 - rate), site, signed_threshold(rate)
        ctx.options = {"HEADS": heads, "K": width, "BK": max(power_of_two(width), 16)}
        ctx.options["CAUSAL"] = is_causal
        given = *states, sentence_N, bound_B, key_bound_B, seed_N, row_N
        _over_tiles(
            "attention_forward",
            rows,
            *(*given, context_NHK, normalizer_NH, rows, *ctx.strides, *ctx.numbers),
            **ctx.options,
        )
        ctx.save_for_backward(*given, sentence_M, context_NHK, normalizer_NH)
        return context_NHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a layer that is recomputed refuses a second time
        *states, sentence_N, bound_B, key_bound_B, seed_N, row_N = saved[:8]
        sentence_M, context_NHK, normalizer_NH = saved[8:]
        d_context_NHK = gradients[0].contiguous()
        bounds = bound_B, key_bound_B, seed_N, row_N
        inner_NH = torch.empty_like(normalizer_NH)
        d_query, d_key, d_value = _beside_each_other(states)
        _over_tiles(
            "attention_backward_queries",
            len(d_query),
            *(*states, sentence_N, *bounds, context_NHK, normalizer_NH, d_context_NHK, inner_NH),
            *(d_query, len(d_query), *ctx.strides, d_query.stride(0), *ctx.numbers),
            **ctx.options,
        )
        _over_tiles(
            "attention_backward_keys",
            len(d_key),
            *(*states, sentence_M, *bounds, normalizer_NH, d_context_NHK, inner_NH, d_key, d_value),
            *(len(d_key), *ctx.strides, d_key.stride(0), d_value.stride(0), *ctx.numbers),
            **ctx.options,
        )
        return d_query, d_key, d_value, *(None,) * 9


def _over_tiles(kernel: str, rows: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel of packed attention for all tiles of rows and all heads."""
    queries, keys, warps, stages = TILES[kernel]
    tile = keys if kernel == "attention_backward_keys" else queries
    sizes = {"BN": queries, "BM": keys, "num_warps": warps, "num_stages": stages}
    launch(kernel, (-(-rows // tile), options["HEADS"]), *arguments, **options, **sizes)


def _in_rows(x_NHK: Tensor) -> Tensor:
    """Return states in which the heads of a token follow each other, as kernels expect."""
    return x_NHK if x_NHK.stride()[1:] == (x_NHK.shape[2], 1) else x_NHK.contiguous()


def _beside_each_other(states: Sequence[Tensor]) -> list[Tensor]:
    """Return an empty gradient for each state; slices of a tensor share a gradient, too."""
    made: list[Tensor] = []
    for group in _groups_of_slices(states):
        rows, *sizes = group[0].shape
        whole = group[0].new_empty(rows, len(group), *sizes)
        made += whole.unbind(1)
    return made


def _groups_of_slices(states: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return runs of tensors that lie beside each other, row by row, in one tensor."""
    groups: list[list[Tensor]] = []
    for state in states:
        if groups and _follows(state, groups[-1][-1]):
            groups[-1].append(state)
        else:
            groups.append([state])
    return groups


def _follows(x: Tensor, before: Tensor) -> bool:
    """Return whether the rows of x begin where the rows of another slice end."""
    is_shared = x.untyped_storage()._cdata == before.untyped_storage()._cdata
    distance = x.storage_offset() - before.storage_offset()
    is_beside = distance == prod(before.shape[1:]) < before.stride(0)
    return is_shared and is_beside and x.stride() == before.stride() and x.shape == before.shape


def sliced(x_NX: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return equally wide slices of rows, such as queries, keys and values of one product.

    Gradients that lie beside each other, as :func:`attend_packed` writes them, are not copied.
    """
    slices: tuple[Tensor, ...] = _Slices.apply(x_NX, count)  # type: ignore[no-untyped-call]
    return slices


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x_NX: Tensor, count: int) -> tuple[Tensor, ...]:
        width = x_NX.shape[1] // count
        return tuple(x_NX.narrow(1, part * width, width) for part in range(count))

    @staticmethod
    @once_differentiable
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, total = gradients[0], sum(d.shape[1] for d in gradients)
        if len(_groups_of_slices(gradients)) == 1 and first.stride() == (total, 1):
            return first.as_strided((len(first), total), (total, 1)), None
        return torch.cat(gradients, 1), None
