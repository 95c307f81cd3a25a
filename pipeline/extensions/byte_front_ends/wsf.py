"""Byte-WSF: attention within words in the first layers (LOBEF, §3.2).

White space separates words; in a language with a segmenter, its boundaries separate words, too.
Each white space, each tag and the end of a sentence is a word. If attention has a kernel for packed
sentences, words are passed to it as sentences; otherwise attention is masked.

Legend: B sentences, T their length, N real tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.errors import ConfigError
from pipeline.extensions.byte_front_ends.settings import WsfConfig
from pipeline.kernels.attention import can_attend_packed
from pipeline.model.front_end import Passage, Source
from pipeline.model.spec import ModelSpec


class Wsf(nn.Module):
    """The Byte-WSF front end, which has no weights."""

    def __init__(self, config: WsfConfig, spec: ModelSpec) -> None:
        super().__init__()
        if spec.lone_ids is None:
            raise ConfigError(
                "model.front is wsf, but the model's spec has no ids of white space. Initialize "
                "the model again from its recipe and tokenizer."
            )
        self.config = config
        self._head_width = spec.model.width // spec.model.num_heads
        self._spec_lone_ids = spec.lone_ids
        self.lone_ids: Tensor
        self.register_buffer("lone_ids", torch.empty(0), persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the ids that are a word each, on a device."""
        self.lone_ids = torch.tensor(self._spec_lone_ids, device="cpu").to(device)

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        """Run the encoder's layers, the first layers within words; return the last states."""
        begins_N = word_begins(source, self.lone_ids)
        if can_attend_packed(x_ND, head_width=self._head_width, has_dropout=self.training):
            words = words_as_sentences(begins_N, source.packing)
            x_ND = passage.through(x_ND, self.config.layers, packing=words)
        else:
            mask_BTT = within_words(begins_N, source.packing)
            x_ND = passage.through(x_ND, self.config.layers, mask_BTT=mask_BTT)
        return passage.through(x_ND)


def word_begins(source: Source, lone_ids: Tensor) -> Tensor:
    """Return a mask that is True at the first token of every word, (N,)."""
    is_lone_N = torch.isin(source.ids_N, lone_ids)
    begins_N = is_lone_N | (source.tokens.position_N == 0)
    begins_N[1:] |= is_lone_N[:-1]
    if source.begins_N is not None:
        begins_N |= source.begins_N
    return begins_N


def within_words(begins_N: Tensor, packing: Packing) -> Tensor:
    """Return a mask that is True where two tokens belong to one word, (B, T, T)."""
    word_BT = packing.unpack(begins_N.cumsum(0)[:, None]).squeeze(-1)
    return word_BT[:, :, None] == word_BT[:, None, :]


def words_as_sentences(begins_N: Tensor, packing: Packing) -> Packing:
    """Return a packing with words as spans.

    It has as many spans as tokens, because the host need not know the number of words then; the
    remaining spans are empty.
    """
    tokens = len(begins_N)
    number_N = torch.arange(tokens, device=begins_N.device)
    begin_N = torch.where(begins_N, number_N, tokens).sort().values
    end = begin_N.new_full((1,), tokens)
    return replace(packing, bound_B=torch.cat([begin_N, end]).int(), batch=tokens)
