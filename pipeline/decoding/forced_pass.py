"""Score given translations: one pass over all their tokens at once.

A token has the attention of the position that predicts it, averaged over the heads of one
layer, as in fairseq's ``SequenceGeneratorWithAlignment``.

Legend: B batch, N real tokens, D model width, H heads, T target length, S source length, K head
width, L predicted tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config.settings import Route
from pipeline.decoding.hypotheses import Source, Translation, source_begins
from pipeline.model.sublayer import Residual
from pipeline.model.tokens import Tokens, project
from pipeline.model.transformer import DecoderLayer, Transformer

LOGIT_ROWS = 256
"""Most tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class ForcedPass:
    """Scores of a translation of T tokens from a source of S, tags and end-of-sentence included."""

    log_p: tuple[float, ...]
    """Log-probability of every token given those before it, then of end-of-sentence, (T + 1)."""
    attention_TS: Tensor | None
    """Attention of each token to the source, on the CPU; None if no layer was named."""


@torch.inference_mode()
def forced_pass(
    model: Transformer,
    sources: Sequence[Source],
    translations: Sequence[Translation],
    *,
    eos_id: int,
    attention_of: int | None = None,
    route: Route = "specific",
) -> list[ForcedPass]:
    """Return log-probabilities of the tokens, and attention of decoder layer ``attention_of``."""
    model.eval()
    device = model.device
    inputs = [(*s.prompt, *t.tokens) for s, t in zip(sources, translations, strict=True)]
    source = Packing.from_lengths([len(one.tokens) for one in sources]).to(device)
    target = Packing.from_lengths([len(one) for one in inputs]).to(device)
    source_N = _flat([one.tokens for one in sources], device)
    pairs = [(one.source_language, one.target_language) for one in sources]
    languages = torch.tensor(pairs, device=device).unbind(1)
    tokens = model.tokens_of(target, *languages, route=route)
    memory_ND, _ = model.encode(
        source_N,
        model.embedding(source_N),
        source,
        model.tokens_of(source, *languages, route=route),
        begins_N=source_begins(sources, device),
    )
    embedded_ND = model.embedding(_flat(inputs, device), is_target=True)
    x = Residual(model.decoder.enter(embedded_ND, tokens, model.positions_TD), tokens)
    attention_BTS = None
    for number, layer in enumerate(model.decoder_layers()):
        if number == attention_of:
            attention_BTS = _attention(layer, x.sum(), target, tokens, memory_ND, source).cpu()
        x = layer(x, target, memory_ND, source)
    prompts = [len(one.prompt) for one in sources]
    log_p_BT = _log_probabilities(model, x.sum(), inputs, prompts, eos_id=eos_id)
    found = []
    for row, (one, ids) in enumerate(zip(sources, inputs, strict=True)):
        first = len(one.prompt) - 1  # the position that predicts the first token
        attention_TS = (
            None
            if attention_BTS is None
            else attention_BTS[row, first : len(ids) - 1, : len(one.tokens)]
        )
        found.append(ForcedPass(tuple(log_p_BT[row][first:]), attention_TS))
    return found


def _flat(parts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor([token for part in parts for token in part]).to(device)


def _log_probabilities(
    model: Transformer,
    x_ND: Tensor,
    inputs: Sequence[Sequence[int]],
    prompts: Sequence[int],
    *,
    eos_id: int,
) -> list[list[float]]:
    """Return the log-probability of the token behind every position, sentence by sentence.

    Within the prompt it is end-of-sentence's: a model may not be able to predict tags.
    """
    behind = zip(inputs, prompts, strict=True)
    labels = [(*[eos_id] * (prompt - 1), *ids[prompt:], eos_id) for ids, prompt in behind]
    label_N = _flat(labels, x_ND.device)
    parts = []
    # By parts: logits of all tokens would take more memory than the model.
    for rows_LD, label_L in zip(x_ND.split(LOGIT_ROWS), label_N.split(LOGIT_ROWS), strict=True):
        log_p_LV = F.log_softmax(model.project(rows_LD), dim=1, dtype=torch.float32)
        parts.append(log_p_LV.gather(1, label_L[:, None])[:, 0])
    by_sentence = torch.cat(parts).cpu().split([len(ids) for ids in inputs])
    return [log_p_T.tolist() for log_p_T in by_sentence]


def _attention(
    layer: DecoderLayer,
    x_ND: Tensor,
    target: Packing,
    tokens: Tokens,
    memory_ND: Tensor,
    memory: Packing,
) -> Tensor:
    """Return the weights of the layer's cross-attention, averaged over heads, (B, T, S)."""
    norm = layer.self_attention_norm
    context_ND = layer.self_attention(norm.enter(x_ND), target, tokens, is_causal=True)
    x_ND = norm.leave(x_ND, context_ND)

    cross = layer.cross_attention
    query_ND = project(cross.query, layer.cross_attention_norm.enter(x_ND), tokens)
    query_BHTK = cross.heads(target.unpack(query_ND)).float()
    key_BHSK = cross.keys(memory_ND, memory, tokens.over(memory)).key_BHSK.float()
    score_BHTS = query_BHTK @ key_BHSK.transpose(2, 3) / math.sqrt(query_BHTK.shape[3])
    is_padding = ~memory.mask_BT[:, None, None, :]
    return score_BHTS.masked_fill(is_padding, -torch.inf).softmax(3).mean(1)
