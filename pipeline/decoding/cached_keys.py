"""Run the decoder one token per row at a time, with cached keys and values.

A sentence has one row while its prompt is fed, then as many rows as the search needs.
:class:`DecoderStates` is the interface of the searches. :class:`GridKeys` keeps one grid of entries
for the rows of a sentence; a mask selects the past of each row. Between two steps that have room,
all tensors keep their shapes and addresses, and no step waits for a value.

Legend: B unfinished sentences, J rows of each, R = B · J rows, N source tokens, D model width, H
heads, K head width, S entries of a grid, P entries of the target, T positions so far.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config.settings import Route
from pipeline.decoding.hypotheses import Source, source_begins
from pipeline.kernels.attention import (
    attend,
    attend_grid,
    attend_step,
    attention_mask,
    can_attend_step,
)
from pipeline.kernels.cpu import can_loop
from pipeline.kernels.pointwise import JointParameters
from pipeline.model.attention import Attention
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import DecoderLayer, LayerCache, Transformer

FEWEST_POSITIONS = 16
"""Fewest positions of a cache of fixed shape."""
MORE_POSITIONS = 16
"""Positions that other caches make room for at a time."""


def capacity(positions: int) -> int:
    """Return how many positions a cache for these has: 16, or the next power of two."""
    return max(FEWEST_POSITIONS, 1 << (positions - 1).bit_length())


class GridKeys:
    """Cached keys and values of all decoder layers, a grid per sentence; at first with one row."""

    def __init__(
        self, layers: list[DecoderLayer], memory_ND: Tensor, packing: Packing, tokens: Tokens
    ) -> None:
        batch, width = packing.batch, memory_ND.shape[1]
        self.own_past_BJP = memory_ND.new_zeros(batch, 1, 0, dtype=torch.bool)
        self.source_BS, self.is_full = packing.mask_BT, packing.is_full
        self.made = torch.zeros((), dtype=torch.int64, device=memory_ND.device)
        """Number of entries, on the device: a step writes behind them."""
        self.is_fused = False
        """Whether one kernel serves attention in the present step."""
        self.is_looped = False
        """Whether a compiled loop does."""
        self.taken = 0
        """Number of entries for which there must be room, on the host."""
        pasts, sources = [], []
        for layer in layers:
            own, cross = layer.self_attention, layer.cross_attention
            empty_BHPK = own.heads(memory_ND.new_zeros(batch, 0, width))
            source = cross.keys(memory_ND, packing, tokens)
            pasts.append(_Entries(self, own, empty_BHPK, empty_BHPK, is_past=True))
            both = source.key_BHSK.contiguous(), source.value_BHSK.contiguous()
            sources.append(_Entries(self, cross, *both, is_past=False))
        self._use(pasts, sources)

    def _use(self, pasts: "list[_Entries]", sources: "list[_Entries]") -> None:
        self.pasts, self.sources = pasts, sources
        pairs = zip(pasts, sources, strict=True)
        self.layers = [LayerCache(past=past, memory=source) for past, source in pairs]

    def blank(self, batch: int, *, positions: int) -> "GridKeys":
        """Return an empty cache with as many rows per sentence, for so many positions."""
        new, (_, rows, _) = copy(self), self.own_past_BJP.shape
        new.own_past_BJP = self.own_past_BJP.new_zeros(batch, rows, rows * positions)
        new.source_BS, new.is_full = self.source_BS.new_zeros(batch, positions), False
        new.made = torch.zeros_like(self.made)
        new._use(
            [one.blank(new, batch, rows * positions) for one in self.pasts],
            [one.blank(new, batch, positions) for one in self.sources],
        )
        return new

    def tensors(self) -> list[Tensor]:
        """Return all tensors of a step: one number, and others with B as the first dimension."""
        kept = [*self.pasts, *self.sources]
        entries = [x_BHSK for one in kept for x_BHSK in (one.key_BHSK, one.value_BHSK)]
        return [self.made, self.own_past_BJP, self.source_BS, *entries]

    def make_room(self) -> None:
        """Make room for one more entry per row, in the place of entries that no row reads."""
        _, rows, room = self.own_past_BJP.shape
        self.taken += rows
        if self.taken <= room:
            return
        self._drop_unread(more=MORE_POSITIONS * rows)
        self.taken += rows

    def begin_step(self) -> None:
        """Prepare every layer's past for one more entry per row, for which there is room."""
        batch, rows, _ = self.own_past_BJP.shape
        # Every row adds an entry to the grid of its sentence, which only itself sees so far.
        itself_JJ = torch.eye(rows, dtype=torch.bool, device=self.made.device)
        self.new_J = self.made + torch.arange(rows, device=self.made.device)
        self.own_past_BJP.index_copy_(2, self.new_J, itself_JJ.expand(batch, -1, -1))
        self.made += rows
        like = self.pasts[0].key_BHSK
        self.is_fused = can_attend_step(like, rows=rows)
        self.is_looped = can_loop(like) and not self.is_fused
        if self.is_fused or self.is_looped:
            return  # they read the conditions themselves
        self.past_mask = attention_mask(self.own_past_BJP[:, None], beside=like)
        self.source_mask = (
            None if self.is_full else attention_mask(self.source_BS[:, None, None], beside=like)
        )

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only these sentences and rows, in that order."""
        # Entries do not move with the beams, only what each row sees of them.
        batch = len(self.own_past_BJP)
        self.own_past_BJP = self.own_past_BJP[keep_B[:, None], beam_BJ]
        if len(keep_B) == batch:
            return
        for one in (*self.pasts, *self.sources):
            one.key_BHSK, one.value_BHSK = one.key_BHSK[keep_B], one.value_BHSK[keep_B]
        self.source_BS = self.source_BS[keep_B]

    def join(self, other: "GridKeys") -> None:
        """Add the sentences of another cache, with as many rows each.

        The entries of both end in one place, behind which the next ones are written. Entries that
        no row reads any more are dropped from both.
        """
        for keys in (self, other):
            keys._drop_unread()
        self.is_full &= other.is_full and self.source_BS.shape[1] == other.source_BS.shape[1]
        self.source_BS = _joined(self.source_BS, other.source_BS, dim=-1)
        self.own_past_BJP = _joined(self.own_past_BJP, other.own_past_BJP, dim=-1)
        self.taken = self.own_past_BJP.shape[2]
        self.made.fill_(self.taken)
        both = (*self.pasts, *self.sources), (*other.pasts, *other.sources)
        for mine, its in zip(*both, strict=True):
            mine.key_BHSK = _joined(mine.key_BHSK, its.key_BHSK, dim=-2)
            mine.value_BHSK = _joined(mine.value_BHSK, its.value_BHSK, dim=-2)

    def _drop_unread(self, *, more: int = 0) -> None:
        """Drop entries that no row of their sentence reads, and make room for ``more``.

        Beams soon have a common past: they read few entries more than there are positions.
        """
        is_read_BP = self.own_past_BJP.any(1)
        batch, before = is_read_BP.shape
        self.taken = int(is_read_BP.sum(1).max()) if before else 0
        self.made.fill_(self.taken)
        # Entries that are read come last, in their order.
        order_BP = is_read_BP.byte().argsort(dim=1, stable=True)[:, before - self.taken :]
        sentence_B1 = torch.arange(batch, device=order_BP.device)[:, None]

        def moved(x_BXPK: Tensor) -> Tensor:
            _, others, _, width = x_BXPK.shape
            new_BXPK = x_BXPK.new_zeros(batch, others, self.taken + more, width)
            read_BPXK = x_BXPK.transpose(1, 2)[sentence_B1, order_BP]
            new_BXPK[:, :, : self.taken] = read_BPXK.transpose(1, 2)
            return new_BXPK

        self.own_past_BJP = moved(self.own_past_BJP[..., None])[..., 0]
        for one in self.pasts:
            one.key_BHSK, one.value_BHSK = moved(one.key_BHSK), moved(one.value_BHSK)


def _joined(one: Tensor, other: Tensor, *, dim: int) -> Tensor:
    """Return the sentences of both; zeros precede the shorter tensor along a dimension."""
    longest = max(one.shape[dim], other.shape[dim])
    behind = (0, 0) * (-1 - dim)
    return torch.cat([F.pad(x, (*behind, longest - x.shape[dim], 0)) for x in (one, other)])


@dataclass
class _Entries:
    """Grid of one layer: past, where unwritten entries are 0 and masked, or source, padded."""

    keys: GridKeys
    attention: Attention
    key_BHSK: Tensor
    value_BHSK: Tensor
    is_past: bool
    new: tuple[Tensor, Tensor, Tensor] | None = None
    """Number of entries, and keys and values that :meth:`attend` is to write to the last ones."""

    def blank(self, keys: GridKeys, batch: int, entries: int) -> "_Entries":
        """Return an empty grid for so many entries."""
        _, heads, _, width = self.key_BHSK.shape
        key_BHSK = self.key_BHSK.new_zeros(batch, heads, entries, width)
        return _Entries(keys, self.attention, key_BHSK, torch.zeros_like(key_BHSK), self.is_past)

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        if self.keys.is_fused:
            # The kernel of attention writes them, which saves two launches per layer.
            self.new = self.keys.made, key_RD, value_RD
            return
        new_J = self.keys.new_J
        self.key_BHSK.index_copy_(2, new_J, self._heads(key_RD))
        self.value_BHSK.index_copy_(2, new_J, self._heads(value_RD))

    def attend(self, query_RD: Tensor) -> Tensor:
        """Attend with the rows of a sentence as positions of one query."""
        keys = self.keys
        is_seen_BJS = keys.own_past_BJP if self.is_past else keys.source_BS[:, None]
        if keys.is_looped:
            return attend_grid(query_RD, self.key_BHSK, self.value_BHSK, is_seen_BJS)
        if keys.is_fused:
            new, self.new = self.new, None
            return attend_step(query_RD, self.key_BHSK, self.value_BHSK, is_seen_BJS, new)
        mask = keys.past_mask if self.is_past else keys.source_mask
        context_BHJK = attend(self._heads(query_RD), self.key_BHSK, self.value_BHSK, mask=mask)
        return context_BHJK.transpose(1, 2).reshape(query_RD.shape)

    def _heads(self, x_RD: Tensor) -> Tensor:
        """Reshape (R, D) to (B, H, J, K)."""
        return self.attention.heads(x_RD.view(len(self.key_BHSK), -1, x_RD.shape[1]))


class DecoderStates:
    """Decoder and caches of the unfinished sentences of a batch; prompts have one length."""

    def __init__(
        self, model: Transformer, sources: Sequence[Source], *, route: Route = "specific"
    ) -> None:
        self.model, self.device, self.route = model, model.device, route
        self.prompt_BT = torch.tensor([source.prompt for source in sources], device=self.device)
        self.prompt_length = self.prompt_BT.shape[1]
        pairs = [(source.source_language, source.target_language) for source in sources]
        self.languages_B2 = torch.tensor(pairs, device=self.device)
        self.keys = self._encode(sources)
        self.joint: JointParameters | None = None
        """Copies of the model's parameters for steps; None: they are read as they are."""

    def _encode(self, sources: Sequence[Source]) -> GridKeys:
        packing = Packing.from_lengths([len(source.tokens) for source in sources]).to(self.device)
        ids = torch.tensor([token for source in sources for token in source.tokens])
        ids_N = ids.to(self.device)
        tokens = self.model.tokens_of(packing, *self.languages_B2.unbind(1), route=self.route)
        begins_N = source_begins(sources, self.device)
        embedded_ND = self.model.embedding(ids_N)
        memory_ND, _ = self.model.encode(ids_N, embedded_ND, packing, tokens, begins_N=begins_N)
        return GridKeys(list(self.model.decoder_layers()), memory_ND, packing, tokens)

    def begin(self) -> Tensor:
        """Feed the prompt; return the decoder's states for the first token, (B, D)."""
        for position in range(self.prompt_length):
            x_BD = self.step(self.prompt_BT[:, position], position)
        return x_BD

    def step(self, ids_R: Tensor, position: int | Tensor) -> Tensor:
        """Feed one token per row; return the decoder's states for the next one, (R, D).

        Args:
            ids_R: the tokens.
            position: position of all of them, or of each, (R,).
        """
        self.keys.make_room()
        return self.step_in_place(ids_R, position)

    def step_in_place(self, ids_R: Tensor, position: int | Tensor) -> Tensor:
        """Make a :meth:`step` for which the caches have room."""
        model, tokens = self.model, self._tokens(ids_R, position)
        self.keys.begin_step()
        embedded_RD = model.embedding(ids_R, is_target=True)
        x_RD = model.decoder.enter(embedded_RD, tokens, model.positions_TD)
        for layer, cache in zip(model.decoder_layers(), self.keys.layers, strict=True):
            x_RD = layer.step(x_RD, cache, tokens)
        return x_RD

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only the sentences ``keep_B`` with their rows ``beam_BJ``, in that order."""
        self.keys.keep(keep_B, beam_BJ)
        if len(keep_B) < len(self.languages_B2):
            self.languages_B2 = self.languages_B2[keep_B]

    def blank(self, batch: int, *, positions: int) -> "DecoderStates":
        """Return a decoder with an empty grid, in which :meth:`tensors` of this one have room."""
        # Shares the model; all tensors that steps write are its own.
        new = copy(self)
        new.keys = self.keys.blank(batch, positions=positions)
        new.languages_B2 = self.languages_B2.new_zeros(batch, 2)
        return new

    def tensors(self) -> list[Tensor]:
        """Return all tensors that steps read and write."""
        return [self.languages_B2, *self.keys.tensors()]

    def reorder(self, beam_BJ: Tensor) -> None:
        """Let the rows of every sentence continue the rows of ``beam_BJ``, in place."""
        own_past_BJP = self.keys.own_past_BJP
        index_BJP = beam_BJ[:, :, None].expand_as(own_past_BJP)
        own_past_BJP.copy_(own_past_BJP.gather(1, index_BJP))

    def join(self, other: "DecoderStates") -> None:
        """Add the sentences of another decoder of the same model, with as many rows each."""
        self.keys.join(other.keys)
        self.languages_B2 = torch.cat([self.languages_B2, other.languages_B2])

    def _tokens(self, ids_R: Tensor, position: int | Tensor) -> Tokens:
        """Return the token information of one token per row."""
        source_language_B, target_language_B = self.languages_B2.unbind(1)
        rows = len(ids_R) // len(self.languages_B2)
        return Tokens(
            sentence_N=torch.arange(len(ids_R), device=self.device) // rows,
            position_N=position
            if isinstance(position, Tensor)
            else torch.full_like(ids_R, position),
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            language_group_B=self.model.group_of_language[target_language_B],
            route=self.route,
            joint=self.joint,
        )
