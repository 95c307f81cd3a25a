"""One micro-batch: token ids, languages and sentence ids, and how padding is left out.

Hidden states are *packed*: a batch of B sentences with N real tokens is a (N, D) matrix, so that
no linear layer, expert or vocabulary projection ever sees padding. Only attention needs the padded
(B, T, D) form; :class:`Packing` goes between the two.

Legend: B batch, S source length, T target length, N real tokens, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens lie in a right-padded (batch, length) grid.

    ``index_N`` has the flat position of every real token, ascending. ``is_full`` says, on the
    host, that nothing is padded, so that packing is a view.
    """

    index_N: Tensor
    batch: int
    length: int
    is_full: bool

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Self:
        """Packing of right-padded sentences of the given lengths (tokens, all ≥ 1)."""
        length = max(lengths, default=1)
        mask_BT = np.arange(length)[None, :] < np.asarray(lengths, dtype=np.int64)[:, None]
        index_N = torch.from_numpy(np.flatnonzero(mask_BT))
        is_full = len(index_N) == len(lengths) * length
        return cls(index_N=index_N, batch=len(lengths), length=length, is_full=is_full)

    @cached_property
    def sentence_N(self) -> Tensor:
        """Row of the batch each real token belongs to."""
        return self.index_N // self.length

    @cached_property
    def position_N(self) -> Tensor:
        """Position of each real token in its sentence, from 0."""
        return self.index_N % self.length

    @cached_property
    def mask_BT(self) -> Tensor:
        """True at real tokens."""
        mask = torch.zeros(self.batch * self.length, dtype=torch.bool, device=self.index_N.device)
        mask[self.index_N] = True
        return mask.view(self.batch, self.length)

    @cached_property
    def row_BT(self) -> Tensor:
        """The packed row of every position; N at padding."""
        num_tokens = len(self.index_N)
        rows = self.index_N.new_full((self.batch * self.length,), num_tokens)
        rows[self.index_N] = torch.arange(num_tokens, device=rows.device)
        return rows.view(self.batch, self.length)

    def pack(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (N, D)."""
        flat = x_BTD.reshape(self.batch * self.length, x_BTD.shape[-1])
        if self.is_full:
            return flat
        packed: Tensor = _Pack.apply(flat, self)  # type: ignore[no-untyped-call]
        return packed

    def unpack(self, x_ND: Tensor) -> Tensor:
        """(N, D) → (B, T, D), zero at padding."""
        if not self.is_full:
            x_ND = _Unpack.apply(x_ND, self)  # type: ignore[no-untyped-call]
        return x_ND.view(self.batch, self.length, x_ND.shape[-1])

    def to(self, device: torch.device) -> "Packing":
        return replace(self, index_N=self.index_N.to(device, non_blocking=True))


class _Pack(torch.autograd.Function):
    """(B · T, D) → (N, D). No row is taken twice, so that the gradient is copied, not added up."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return flat.index_select(0, packing.index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _with_padding(gradients[0], ctx.packing), None


class _Unpack(torch.autograd.Function):
    """(N, D) → (B · T, D), zero at padding."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return _with_padding(x_ND, packing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.packing.index_N), None


def _with_padding(x_ND: Tensor, packing: Packing) -> Tensor:
    """One gather from the rows and a row of zeros: faster than copying rows into zeros."""
    padding = x_ND.new_zeros(1, x_ND.shape[1])
    return torch.cat([x_ND, padding]).index_select(0, packing.row_BT.flatten())


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        source_N: packed source ids, tags and end-of-sentence included.
        source: packing of the source.
        target_N: packed decoder input ids: prompt, then the target.
        target: packing of the decoder input.
        label_rows_L: rows of ``target_N`` whose next token is to be predicted; the forced prompt
            is not, unless its tag is a label.
        labels_L: the tokens to predict, end-of-sentence included.
        source_language_B, target_language_B: indices into the tokenizer's languages.
        pair_B, line_B: which sentence pair each row is.
    """

    source_N: Tensor
    source: Packing
    target_N: Tensor
    target: Packing
    label_rows_L: Tensor
    labels_L: Tensor
    source_language_B: Tensor
    target_language_B: Tensor
    pair_B: Tensor
    line_B: Tensor

    @property
    def num_sentences(self) -> int:
        return self.source.batch

    @property
    def num_labels(self) -> int:
        """Real target tokens, and tags that are labels: what cross entropy is averaged over."""
        return len(self.labels_L)

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; a no-op where it is there already."""
        if self.source_N.device == device:
            return self
        values = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return Batch(**values)


@dataclass(frozen=True)
class Example:
    """One sentence pair with its tags resolved, ready to be put into a batch."""

    source: Ids
    target: Ids
    source_prefix: tuple[int, ...]
    decoder_prompt: tuple[int, ...]
    source_language: int
    target_language: int
    pair: int = 0
    line: int = 0


def collate(examples: Sequence[Example], *, eos_id: int, tag_is_label: bool = False) -> Batch:
    """Assemble a micro-batch: source = prefix, tokens, eos; decoder input = prompt, tokens.

    Labels are the target's tokens and eos; with ``tag_is_label`` the prompt's tag comes first.
    """
    sources = [np.concatenate([e.source_prefix, e.source, [eos_id]]) for e in examples]
    inputs = [np.concatenate([e.decoder_prompt, e.target]) for e in examples]
    forced = [1 if tag_is_label else len(e.decoder_prompt) for e in examples]
    labels = [
        np.concatenate([tokens[count:], [eos_id]])
        for tokens, count in zip(inputs, forced, strict=True)
    ]
    starts = np.cumsum([0, *(len(tokens) for tokens in inputs)])
    label_rows = [
        np.arange(start + count - 1, start + len(tokens))
        for count, start, tokens in zip(forced, starts[:-1], inputs, strict=True)
    ]
    return Batch(
        source_N=_ids(sources),
        source=Packing.from_lengths([len(tokens) for tokens in sources]),
        target_N=_ids(inputs),
        target=Packing.from_lengths([len(tokens) for tokens in inputs]),
        label_rows_L=_ids(label_rows),
        labels_L=_ids(labels),
        source_language_B=torch.tensor([e.source_language for e in examples]),
        target_language_B=torch.tensor([e.target_language for e in examples]),
        pair_B=torch.tensor([e.pair for e in examples]),
        line_B=torch.tensor([e.line for e in examples]),
    )


def _ids(parts: Sequence[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
