"""The decoder, one token per row at a time, with cached keys and values.

Every sentence has as many rows as the search has beams. Beams are never copied: those of a sentence
share one cache, to which every step adds one entry per beam, and a mask tells which entries are a
beam's own past. When beams move, only the mask moves.

Legend: B unfinished sentences, J beams, R = B · J rows, S source length, P entries of the cache
(positions · J).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config import Route
from pipeline.decoding.hypotheses import Source
from pipeline.model.attention import KeyValues
from pipeline.model.layers import LayerCache
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer

CACHE_STEP = 16
"""The cache grows by this many positions at a time."""


class DecoderStates:
    """What the unfinished sentences of a batch are decoded from; the prompts have one length."""

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        *,
        beams: int,
        route: Route = "specific",
    ) -> None:
        self.model, self.beams, self.route = model, beams, route
        self.device = model.device
        prompt_BT = torch.tensor([source.prompt for source in sources], device=self.device)
        self.prompt_RT = prompt_BT.repeat_interleave(beams, dim=0)
        self.prompt_length = prompt_BT.shape[1]
        pairs = [(source.source_language, source.target_language) for source in sources]
        self.languages_B2 = torch.tensor(pairs, device=self.device)
        self.caches = self._encode(sources)
        self.own_past_BJP = torch.zeros(
            len(sources), beams, 0, dtype=torch.bool, device=self.device
        )

    def _encode(self, sources: Sequence[Source]) -> list[LayerCache]:
        packing = Packing.from_lengths([len(source.tokens) for source in sources]).to(self.device)
        ids = torch.tensor([token for source in sources for token in source.tokens])
        ids_N = ids.to(self.device)
        tokens = self.model.tokens_of(packing, *self.languages_B2.unbind(1), route=self.route)
        memory_ND, _ = self.model.encode(ids_N, self.model.embedding(ids_N), packing, tokens)
        self.memory_mask = None if packing.is_full else packing.mask_BT[:, None, None, :]
        caches = []
        for layer in self.model.decoder_layers():
            memory = layer.cross_attention.keys(memory_ND, packing, tokens)
            empty = memory.key_BHSK[:, :, :0]
            contiguous = KeyValues(memory.key_BHSK.contiguous(), memory.value_BHSK.contiguous())
            caches.append(LayerCache(past=KeyValues(empty, empty), memory=contiguous))
        return caches

    def begin(self) -> Tensor:
        """Feed the prompt; the decoder's states for the first token, (R, D)."""
        for position in range(self.prompt_length):
            x_RD = self.step(self.prompt_RT[:, position], position)
        return x_RD

    def step(self, ids_R: Tensor, position: int) -> Tensor:
        """Feed one token per row; the decoder's states for the next one, (R, D)."""
        start = position * self.beams
        if start == self.own_past_BJP.shape[2]:
            self._grow()
        itself = torch.eye(self.beams, dtype=torch.bool, device=self.device)
        self.own_past_BJP[:, :, start : start + self.beams] = itself
        model, tokens = self.model, self._tokens(ids_R, position)
        x_RD = model.decoder.enter(model.embedding(ids_R), tokens.position_N, model.positions_TD)
        for layer, cache in zip(model.decoder_layers(), self.caches, strict=True):
            x_RD = layer.step(x_RD, cache, tokens, length=start, memory_mask=self.memory_mask)
        return x_RD

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Only the sentences in rows ``keep_B`` go on, with those of their beams, in that order."""
        self.own_past_BJP = self.own_past_BJP[keep_B[:, None], beam_BJ]
        if len(keep_B) == len(self.languages_B2):
            self._replace_past(lambda x: x)
            return
        self.languages_B2 = self.languages_B2[keep_B]
        self._replace_past(lambda x_BHPK: x_BHPK[keep_B])
        for cache in self.caches:
            memory = cache.memory
            cache.memory = KeyValues(memory.key_BHSK[keep_B], memory.value_BHSK[keep_B])
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask[keep_B]

    def _tokens(self, ids_R: Tensor, position: int) -> Tokens:
        """What layers are told about one token per row."""
        source_language_B, target_language_B = self.languages_B2.unbind(1)
        return Tokens(
            sentence_N=torch.arange(len(ids_R), device=self.device) // self.beams,
            position_N=torch.full_like(ids_R, position),
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            language_group_B=self.model.group_of_language[target_language_B],
            route=self.route,
        )

    def _grow(self) -> None:
        """Room for ``CACHE_STEP`` more positions; entries not yet written are masked, and 0."""
        more = CACHE_STEP * self.beams
        self.own_past_BJP = F.pad(self.own_past_BJP, (0, more))
        self._replace_past(lambda x_BHPK: F.pad(x_BHPK, (0, 0, 0, more)))

    def _replace_past(self, change: Callable[[Tensor], Tensor]) -> None:
        mask = self.own_past_BJP[:, None]
        for cache in self.caches:
            past = cache.past
            cache.past = KeyValues(change(past.key_BHSK), change(past.value_BHSK), mask)
