"""Run the decoder one token per row at a time, with cached keys and values.

A sentence has one row while its prompt is fed, then as many rows as the search needs.
:class:`DecoderStates` is the interface of the searches; two caches keep keys and values:

- :class:`ListedKeys`, on CPU, keeps entries in the order in which they were computed, and each row
  lists its own. Only the lists move with the rows; nothing is padded, masked or cut into heads.
- :class:`GridKeys`, on other devices and for dtypes that the loops do not read, keeps one grid of
  entries for the rows of a sentence; a mask selects the past of each row. Between two steps that
  have room, all tensors keep their shapes and addresses, and no step waits for a value.

Legend: B unfinished sentences, J rows of each, R = B · J rows, N source tokens, D model width, H
heads, K head width, S entries of a grid, P entries of the target, T positions so far.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config.settings import Route
from pipeline.decoding.hypotheses import Source, source_begins
from pipeline.kernels.attention import (
    RowEntries,
    attend,
    attend_entries,
    attend_step,
    attention_mask,
    can_attend_step,
    list_seen,
)
from pipeline.kernels.cpu import can_loop
from pipeline.kernels.pointwise import JointParameters
from pipeline.model.attention import Attention
from pipeline.model.sublayer import Residual
from pipeline.model.tokens import Tokens, project
from pipeline.model.transformer import DecoderLayer, LayerCache, Transformer

FEWEST_POSITIONS = 16
"""Positions that a cache has room for at first; it doubles."""


def capacity(positions: int) -> int:
    """Return how many positions a cache for these has: 16, or the next power of two."""
    return max(FEWEST_POSITIONS, 1 << (positions - 1).bit_length())


class CachedKeys(Protocol):
    """Cached keys and values of all decoder layers; at first with one row per sentence."""

    layers: list[LayerCache]

    def make_room(self) -> None:
        """Make room for one more entry per row."""

    def begin_step(self) -> None:
        """Prepare every layer's past for one more entry per row, for which there is room."""

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only the sentences ``keep_B`` with their rows ``beam_BJ``, in that order."""


def cached_keys(
    layers: list[DecoderLayer], memory_ND: Tensor, packing: Packing, tokens: Tokens
) -> CachedKeys:
    """Return caches of the decoder's layers: an empty past, and the source's keys and values."""
    if can_loop(memory_ND):
        return ListedKeys(layers, memory_ND, packing, tokens)
    return GridKeys(layers, memory_ND, packing, tokens)


# ---------------------------------------------------------------- lists of entries


class ListedKeys:
    """Entries in float32 listed per row, read by loops on CPU."""

    def __init__(
        self, layers: list[DecoderLayer], memory_ND: Tensor, packing: Packing, tokens: Tokens
    ) -> None:
        bound_B = packing.bound_B.long()
        self.source = RowEntries(bound_B[:-1], bound_B[1:], packing.length)
        rows = self.sentences = len(bound_B) - 1
        listed_RT = torch.empty(rows, 0, dtype=torch.int64)
        start_R = torch.zeros(rows, dtype=torch.int64)
        self.past = RowEntries(start_R, start_R, 0, listed_RT)
        self.made = 0
        """Number of entries; entries of the last step come last."""
        room = FEWEST_POSITIONS * rows, memory_ND.shape[1]
        self.pasts: list[_Listed] = []
        self.sources: list[_Listed] = []
        this = proxy(self)  # a cycle would keep the entries until garbage is collected
        for layer in layers:
            own, cross = layer.self_attention, layer.cross_attention
            key_PD = memory_ND.new_empty(room, dtype=torch.float32)
            empty = key_PD, torch.empty_like(key_PD)
            self.pasts.append(_Listed(this, own.num_heads, *empty, is_past=True))
            key_ND, value_ND = (project(p, memory_ND, tokens) for p in (cross.key, cross.value))
            packed = key_ND.float(), value_ND.float()
            self.sources.append(_Listed(this, cross.num_heads, *packed, is_past=False))
        pairs = zip(self.pasts, self.sources, strict=True)
        self.layers = [LayerCache(past=past, memory=source) for past, source in pairs]

    def make_room(self) -> None:
        """Do nothing: every past grows on its own."""

    def begin_step(self) -> None:
        """Prepare every layer's past for one more entry per row."""
        rows = len(self.past.start_R)
        new_R = torch.arange(self.made, self.made + rows)
        assert self.past.entry_RT is not None, "the past is listed"
        listed_RT = torch.cat([self.past.entry_RT, new_R[:, None]], dim=1)
        past = self.past
        self.past = RowEntries(past.start_R, past.stop_R + 1, past.most + 1, listed_RT)
        self.made += rows

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only these sentences and rows, in that order."""
        # Entries stay where they are: rows that continue one past list the same entries.
        before = len(self.past.start_R) // self.sentences
        row_R = (keep_B[:, None] * before + beam_BJ).flatten()
        self.sentences = len(keep_B)
        self.past, self.source = self.past.select(row_R), self.source.select(row_R)

    def join(self, other: "ListedKeys") -> None:
        """Add the sentences of another cache, with as many rows each.

        Entries and source tokens that no row reads any more are dropped from both.
        """
        for keys in (self, other):
            keys._drop_unread_entries()
            keys._drop_unread_sources()
        self.past = _joined(self.past, other.past, shift=self.made)
        self.source = _joined(self.source, other.source, shift=len(self.sources[0].key_PD))
        both = (*self.pasts, *self.sources), (*other.pasts, *other.sources)
        for mine, its in zip(*both, strict=True):
            mine.key_PD = torch.cat([mine.key_PD, its.key_PD])
            mine.value_PD = torch.cat([mine.value_PD, its.value_PD])
        self.made += other.made
        self.sentences += other.sentences

    def _drop_unread_entries(self) -> None:
        past = self.past
        assert past.entry_RT is not None, "the past is listed"
        place_T = torch.arange(past.entry_RT.shape[1])
        is_read_RT = (place_T >= past.start_R[:, None]) & (place_T < past.stop_R[:, None])
        is_read_P = torch.zeros(self.made, dtype=torch.bool)
        is_read_P[past.entry_RT[is_read_RT]] = True
        entry_RT = (is_read_P.cumsum(0) - 1)[past.entry_RT]
        most = int((past.stop_R - past.start_R).max())
        self.past = RowEntries(past.start_R, past.stop_R, most, entry_RT)
        for keys in self.pasts:
            keys.key_PD = keys.key_PD[: self.made][is_read_P]
            keys.value_PD = keys.value_PD[: self.made][is_read_P]
        self.made = int(is_read_P.sum())

    def _drop_unread_sources(self) -> None:
        start_R, stop_R = self.source.start_R, self.source.stop_R
        rows = len(start_R) // self.sentences
        length_B = (stop_R - start_R)[::rows]
        end_B = length_B.cumsum(0)
        first_B = end_B - length_B
        token_N = torch.arange(int(end_B[-1])) + (start_R[::rows] - first_B).repeat_interleave(
            length_B
        )
        for keys in self.sources:
            keys.key_PD, keys.value_PD = keys.key_PD[token_N], keys.value_PD[token_N]
        first_R, end_R = (one.repeat_interleave(rows) for one in (first_B, end_B))
        self.source = RowEntries(first_R, end_R, int(length_B.max()))


def _joined(one: RowEntries, other: RowEntries, *, shift: int) -> RowEntries:
    """Return the rows of both; the entries of the other are counted from ``shift``.

    Rows that list their entries end in the same column.
    """
    most = max(one.most, other.most)
    if one.entry_RT is None or other.entry_RT is None:
        start_R = torch.cat([one.start_R, other.start_R + shift])
        return RowEntries(start_R, torch.cat([one.stop_R, other.stop_R + shift]), most)
    length_R = torch.cat([rows.stop_R - rows.start_R for rows in (one, other)])
    tables = (one.entry_RT, other.entry_RT + shift)
    entry_RT = torch.cat([of_last_columns(entry_RT, most) for entry_RT in tables])
    return RowEntries(most - length_R, torch.full_like(length_R, most), most, entry_RT)


def of_last_columns(x_XT: Tensor, length: int) -> Tensor:
    """Return the last T columns of a tensor, behind zeros if it has fewer."""
    return F.pad(x_XT, (length - x_XT.shape[-1], 0))


@dataclass
class _Listed:
    """Entries of one layer: its past, one per row and step, or the source's tokens as packed."""

    keys: ListedKeys
    num_heads: int
    key_PD: Tensor
    value_PD: Tensor
    is_past: bool

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        stop = self.keys.made
        while stop > len(self.key_PD):
            self.key_PD, self.value_PD = _doubled(self.key_PD), _doubled(self.value_PD)
        self.key_PD[stop - len(key_RD) : stop] = key_RD
        self.value_PD[stop - len(key_RD) : stop] = value_RD

    def attend(self, query_RD: Tensor) -> Tensor:
        entries = self.keys.past if self.is_past else self.keys.source
        heads = self.num_heads
        return attend_entries(query_RD, self.key_PD, self.value_PD, entries, num_heads=heads)


def _doubled(entry_PD: Tensor) -> Tensor:
    return torch.cat([entry_PD, torch.empty_like(entry_PD)])


# ---------------------------------------------------------------- a grid for the sentence's rows


class GridKeys:
    """Entries in one grid per sentence, for any device."""

    def __init__(
        self, layers: list[DecoderLayer], memory_ND: Tensor, packing: Packing, tokens: Tokens
    ) -> None:
        batch, width = packing.batch, memory_ND.shape[1]
        self.own_past_BJP = memory_ND.new_zeros(batch, 1, 0, dtype=torch.bool)
        self.source_BS, self.is_full = packing.mask_BT, packing.is_full
        self.source_length_B = packing.bound_B.diff()
        self.made = torch.zeros((), dtype=torch.int64, device=memory_ND.device)
        """Number of entries, on the device: a step writes behind them."""
        self.is_fused = False
        """Whether one kernel serves attention in the present step."""
        self.taken = 0
        """Number of entries for which :meth:`make_room` was called."""
        pasts, sources = [], []
        this = proxy(self)  # a cycle would keep a GPU's memory until garbage is collected
        for layer in layers:
            own, cross = layer.self_attention, layer.cross_attention
            empty_BHPK = own.heads(memory_ND.new_zeros(batch, 0, width))
            source = cross.keys(memory_ND, packing, tokens)
            pasts.append(_Entries(this, own, empty_BHPK, empty_BHPK, is_past=True))
            both = source.key_BHSK.contiguous(), source.value_BHSK.contiguous()
            sources.append(_Entries(this, cross, *both, is_past=False))
        self._use(pasts, sources)
        self._number_rows(1)

    def _number_rows(self, rows: int) -> None:
        """Make tensors that every step reads: made there, each would be a launch per step."""
        device = self.made.device
        self.row_J = torch.arange(rows, device=device)
        self.itself_JJ = torch.eye(rows, dtype=torch.bool, device=device)

    def _use(self, pasts: "list[_Entries]", sources: "list[_Entries]") -> None:
        self.pasts, self.sources = pasts, sources
        pairs = zip(pasts, sources, strict=True)
        self.layers = [LayerCache(past=past, memory=source) for past, source in pairs]

    def blank(self, batch: int, *, positions: int) -> "GridKeys":
        """Return an empty cache with as many rows per sentence, for so many positions."""
        new, (_, rows, _) = copy(self), self.own_past_BJP.shape
        new.own_past_BJP = self.own_past_BJP.new_zeros(batch, rows, rows * positions)
        new.source_BS, new.is_full = self.source_BS.new_zeros(batch, positions), False
        new.source_length_B = self.source_length_B.new_zeros(batch)
        new.made = torch.zeros_like(self.made)
        new._number_rows(rows)
        new._use(
            [one.blank(proxy(new), batch, rows * positions) for one in self.pasts],
            [one.blank(proxy(new), batch, positions) for one in self.sources],
        )
        return new

    def tensors(self) -> list[Tensor]:
        """Return all tensors of a step: one number, and others with B as the first dimension."""
        kept = [*self.pasts, *self.sources]
        entries = [x_BHSK for one in kept for x_BHSK in (one.key_BHSK, one.value_BHSK)]
        return [self.made, self.own_past_BJP, self.source_BS, self.source_length_B, *entries]

    def make_room(self) -> None:
        """Make room for one more entry per row: at first for 16, then for twice as many."""
        _, rows, room = self.own_past_BJP.shape
        self.taken += rows
        if self.taken > room:
            more = max(room, FEWEST_POSITIONS * rows)
            self.own_past_BJP = F.pad(self.own_past_BJP, (0, more))
            for past in self.pasts:
                past.key_BHSK = F.pad(past.key_BHSK, (0, 0, 0, more))
                past.value_BHSK = F.pad(past.value_BHSK, (0, 0, 0, more))

    def begin_step(self) -> None:
        """Prepare every layer's past for one more entry per row, for which there is room."""
        batch, rows, _ = self.own_past_BJP.shape
        # Every row adds an entry to the grid of its sentence, which only itself sees so far.
        self.new_J = self.made + self.row_J
        self.own_past_BJP.index_copy_(2, self.new_J, self.itself_JJ.expand(batch, -1, -1))
        self.made += rows
        like = self.pasts[0].key_BHSK
        self.is_fused = can_attend_step(like, rows=rows)
        if self.is_fused:  # the kernel reads the conditions themselves
            self.seen = list_seen(self.own_past_BJP, self.made)
            return
        self.past_mask = attention_mask(self.own_past_BJP[:, None], beside=like)
        self.source_mask = (
            None if self.is_full else attention_mask(self.source_BS[:, None, None], beside=like)
        )

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only these sentences and rows, in that order."""
        # Entries do not move with the beams, only what each row sees of them.
        batch = len(self.own_past_BJP)
        self.own_past_BJP = self.own_past_BJP[keep_B[:, None], beam_BJ]
        if beam_BJ.shape[1] != len(self.row_J):
            self._number_rows(beam_BJ.shape[1])
        if len(keep_B) == batch:
            return
        for one in (*self.pasts, *self.sources):
            one.key_BHSK, one.value_BHSK = one.key_BHSK[keep_B], one.value_BHSK[keep_B]
        self.source_BS = self.source_BS[keep_B]
        self.source_length_B = self.source_length_B[keep_B]


@dataclass
class _Entries:
    """Grid of one layer: past, where unwritten entries are 0 and masked, or source, padded."""

    keys: GridKeys
    attention: Attention
    key_BHSK: Tensor
    value_BHSK: Tensor
    is_past: bool
    new: tuple[Tensor, Tensor] | None = None
    """Keys and values that :meth:`attend` writes to the last entries."""

    def blank(self, keys: GridKeys, batch: int, entries: int) -> "_Entries":
        """Return an empty grid for so many entries."""
        _, heads, _, width = self.key_BHSK.shape
        key_BHSK = self.key_BHSK.new_zeros(batch, heads, entries, width)
        return _Entries(keys, self.attention, key_BHSK, torch.zeros_like(key_BHSK), self.is_past)

    def append(self, key_RD: Tensor, value_RD: Tensor) -> None:
        if self.keys.is_fused:
            # The kernel of attention writes them, which saves two launches per layer.
            self.new = key_RD, value_RD
            return
        new_J = self.keys.new_J
        self.key_BHSK.index_copy_(2, new_J, self._heads(key_RD))
        self.value_BHSK.index_copy_(2, new_J, self._heads(value_RD))

    def attend(self, query_RD: Tensor) -> Tensor:
        """Attend with the rows of a sentence as positions of one query."""
        keys = self.keys
        if keys.is_fused:
            seen = keys.seen if self.is_past else keys.source_length_B
            new, self.new = self.new, None
            return attend_step(query_RD, self.key_BHSK, self.value_BHSK, seen, new)
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

    def _encode(self, sources: Sequence[Source]) -> CachedKeys:
        packing = Packing.from_lengths([len(source.tokens) for source in sources]).to(self.device)
        ids = torch.tensor([token for source in sources for token in source.tokens])
        ids_N = ids.to(self.device)
        tokens = self.model.tokens_of(packing, *self.languages_B2.unbind(1), route=self.route)
        begins_N = source_begins(sources, self.device)
        embedded_ND = self.model.embedding(ids_N)
        memory_ND, _ = self.model.encode(ids_N, embedded_ND, packing, tokens, begins_N=begins_N)
        return cached_keys(list(self.model.decoder_layers()), memory_ND, packing, tokens)

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
        x = Residual(model.decoder.enter(embedded_RD, tokens, model.positions_TD), tokens)
        for layer, cache in zip(model.decoder_layers(), self.keys.layers, strict=True):
            x = layer.step(x, cache)
        return x.sum()

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Keep only the sentences ``keep_B`` with their rows ``beam_BJ``, in that order."""
        self.keys.keep(keep_B, beam_BJ)
        if len(keep_B) < len(self.languages_B2):
            self.languages_B2 = self.languages_B2[keep_B]

    def blank(self, batch: int, *, positions: int) -> "DecoderStates":
        """Return a decoder with an empty grid, in which :meth:`tensors` of this one have room."""
        assert isinstance(self.keys, GridKeys)
        # Shares the model; all tensors that steps write are its own.
        new = copy(self)
        new.keys = self.keys.blank(batch, positions=positions)
        new.languages_B2 = self.languages_B2.new_zeros(batch, 2)
        return new

    def tensors(self) -> list[Tensor]:
        """Return all tensors that steps read and write."""
        assert isinstance(self.keys, GridKeys)
        return [self.languages_B2, *self.keys.tensors()]

    def reorder(self, beam_BJ: Tensor) -> None:
        """Let the rows of every sentence continue the rows of ``beam_BJ``, in place."""
        assert isinstance(self.keys, GridKeys)
        own_past_BJP = self.keys.own_past_BJP
        index_BJP = beam_BJ[:, :, None].expand_as(own_past_BJP)
        own_past_BJP.copy_(own_past_BJP.gather(1, index_BJP))

    @property
    def can_join(self) -> bool:
        """Whether other sentences can join these: lists grow by rows, a grid does not."""
        return isinstance(self.keys, ListedKeys)

    def join(self, other: "DecoderStates") -> None:
        """Add the sentences of another decoder of the same model, with as many rows each."""
        assert isinstance(self.keys, ListedKeys)
        assert isinstance(other.keys, ListedKeys)
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
            group_of_language_L=self.model.group_of_language,
            route=self.route,
            joint=self.joint,
        )
