"""Tiny models whose translations differ with the source, and what they think of a translation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pipeline.batching.batch import Example, collate
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.constraints import BannedTexts
from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer
from support.tiny_models import (
    EOS_ID,
    PAD_ID,
    attend_to_source,
    embedding_table,
    source_of,
    tiny_model,
    tiny_spec,
)

TOKEN_MOE = MoEConfig(num_experts=4, top_k=2, every=1)
CAPACITY_MOE = MoEConfig(num_experts=4, top_k=2, every=2, dispatch="capacity", capacity_factor=0.5)

Kind = Literal["dense", "moe", "moe-lgr", "moe-capacity"]


def model_of(kind: Kind, *, seed: int = 1, vocabulary: int = 20, **model: object) -> Transformer:
    """A random model whose translations differ with the source, in length too.

    Fresh weights hardly look at the source and repeat one token: attention to the source is made
    stronger, and end-of-sentence more likely at the states that all positions share.
    """
    moe = {"dense": None, "moe-capacity": CAPACITY_MOE}.get(kind, TOKEN_MOE)
    groups = 3 if kind == "moe-lgr" else 0
    spec = tiny_spec(moe=moe, groups=groups, vocabulary=vocabulary, languages=4, model=model)
    made = tiny_model(spec, seed=seed).eval()
    attend_to_source(made, factor=5)
    with torch.no_grad():
        embedding_table(made).mul_(1.5)
        embedding_table(made)[EOS_ID] += raising_logit(made, by=2)
    return made


def raising_logit(model: Transformer, *, by: float) -> Tensor:
    """What, added to a token's embedding, raises its logit on average."""
    norm = model.decoder.final_norm or list(model.decoder_layers())[-1].feed_forward_norm
    return by * norm.bias / norm.bias.dot(norm.bias)


def banned_texts(*sequences: Sequence[int], vocabulary: int = 20) -> BannedTexts:
    """Ban these tokens, each of which is a character of the text."""
    pieces = ["" if index in (PAD_ID, EOS_ID) else chr(97 + index) for index in range(vocabulary)]
    texts = ["".join(map(pieces.__getitem__, sequence)) for sequence in sequences]
    return BannedTexts(texts, [piece.encode() for piece in pieces])


def translate(
    model: Transformer,
    examples: Sequence[Example],
    *,
    limit: int | None = None,
    eos_id: int = EOS_ID,
    **config: object,
) -> list[Translation]:
    """Beam search; ``limit`` is the number of tokens no hypothesis exceeds."""
    settings: dict[str, object] = {"max_length_ratio": 1.0, "beam_size": 4, **config}
    if limit is not None:
        settings |= {"max_length_ratio": 0.0, "max_extra_length": limit}
    return beam_search(
        model,
        [source_of(one) for one in examples],
        DecodingConfig.model_validate(settings),
        eos_id=eos_id,
    )


@torch.no_grad()
def next_log_p(model: Transformer, example: Example, prefix: Sequence[int]) -> Tensor:
    """Log-probabilities after every position of the prefix, without any cache."""
    alone = collate([replace(example, target=list(prefix))], eos_id=EOS_ID)
    logits_LV = model.eval()(alone).logits_LV
    return torch.log_softmax(logits_LV.double(), dim=1)


def full_score(
    model: Transformer, example: Example, tokens: Sequence[int], *, penalty: float
) -> float:
    """fairseq's score of a sentence that ends after the tokens."""
    ended = [*tokens, EOS_ID]
    log_p_LV = next_log_p(model, example, tokens)
    total = sum(float(log_p_LV[row, token]) for row, token in enumerate(ended))
    return total / float(len(ended) ** penalty)


def rounded(score: float) -> Any:
    """Equal up to rounding in float32."""
    return pytest.approx(score, rel=1e-5, abs=1e-5)
