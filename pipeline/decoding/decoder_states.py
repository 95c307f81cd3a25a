"""The decoder, one token per row at a time, with cached keys and values.

A sentence has one row while its prompt is fed, and then as many as the search makes of it.

Legend: B unfinished sentences, J rows of each, R = B · J rows, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config import Route
from pipeline.decoding.cached_keys import CachedKeys, cached_keys
from pipeline.decoding.hypotheses import Source, source_begins
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer


class DecoderStates:
    """What the unfinished sentences of a batch are decoded from; the prompts have one length."""

    def __init__(
        self, model: Transformer, sources: Sequence[Source], *, route: Route = "specific"
    ) -> None:
        self.model, self.device, self.route = model, model.device, route
        self.prompt_BT = torch.tensor([source.prompt for source in sources], device=self.device)
        self.prompt_length = self.prompt_BT.shape[1]
        pairs = [(source.source_language, source.target_language) for source in sources]
        self.languages_B2 = torch.tensor(pairs, device=self.device)
        self.keys = self._encode(sources)

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
        """Feed the prompt; the decoder's states for the first token, (B, D)."""
        for position in range(self.prompt_length):
            x_BD = self.step(self.prompt_BT[:, position], position)
        return x_BD

    def step(self, ids_R: Tensor, position: int) -> Tensor:
        """Feed one token per row; the decoder's states for the next one, (R, D)."""
        model, tokens = self.model, self._tokens(ids_R, position)
        self.keys.begin_step()
        embedded_RD = model.embedding(ids_R, is_target=True)
        x_RD = model.decoder.enter(embedded_RD, tokens.position_N, model.positions_TD)
        for layer, cache in zip(model.decoder_layers(), self.keys.layers, strict=True):
            x_RD = layer.step(x_RD, cache, tokens)
        return x_RD

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """Only the sentences ``keep_B`` go on, with those of their rows, in that order."""
        self.keys.keep(keep_B, beam_BJ)
        if len(keep_B) < len(self.languages_B2):
            self.languages_B2 = self.languages_B2[keep_B]

    def _tokens(self, ids_R: Tensor, position: int) -> Tokens:
        """What layers are told about one token per row."""
        source_language_B, target_language_B = self.languages_B2.unbind(1)
        rows = len(ids_R) // len(self.languages_B2)
        return Tokens(
            sentence_N=torch.arange(len(ids_R), device=self.device) // rows,
            position_N=torch.full_like(ids_R, position),
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            language_group_B=self.model.group_of_language[target_language_B],
            route=self.route,
        )
