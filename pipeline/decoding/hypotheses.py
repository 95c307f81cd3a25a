"""Sources and translations of a search, and the rules for their lengths and for stopping.

:func:`forced_pass` scores given translations in one pass over all their tokens.

To add a stopping rule, write a class like :class:`FairseqRule`, add its name to
``DecodingConfig.stopping`` and a case to :func:`stopping_rule`.

Legend: B batch, N real tokens, D model width, H heads, T target length, S source length, K head
width, L predicted tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config.settings import Route
from pipeline.decoding.constraints import BannedTexts
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError, without_case
from pipeline.model.sublayer import Residual
from pipeline.model.tokens import project
from pipeline.model.transformer import DecoderLayer, Transformer
from pipeline.terminal import counted

Number = TypeVar("Number", int, Tensor)
"""A length, or the lengths of several sentences."""


@dataclass(frozen=True)
class Source:
    """One sentence to translate, tags and end-of-sentence included."""

    tokens: Sequence[int]
    prompt: tuple[int, ...]
    """Forced decoder input; ends with the target tag where the tag scheme has one."""
    source_language: int
    """Index into the tokenizer's languages."""
    target_language: int
    """Index into the tokenizer's languages."""
    prefix: tuple[int, ...] = ()
    """Tokens that every hypothesis begins with; they count in the result and in its score."""
    banned: BannedTexts | None = None
    """Texts that no hypothesis may contain."""
    required: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that every hypothesis must contain."""
    begins: tuple[bool, ...] = ()
    """Whether each token begins a word of the segmenter; empty if the language has no segmenter."""


@dataclass(frozen=True)
class Translation:
    """A hypothesis: its tokens without prompt and end-of-sentence, and its score."""

    tokens: tuple[int, ...]
    score: float


@runtime_checkable
class StoppingRule(Protocol):
    """Decide when a sentence is done and which length divides a score."""

    forces_end_at_limit: bool
    """Whether a hypothesis must end at the length limit; otherwise it is taken unfinished."""

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:
        """Return the length that divides the score of a hypothesis.

        Args:
            length: tokens of the hypothesis, end-of-sentence included.
            prompt_length: tokens of the forced prompt, the decoder's start token included.
        """

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> Tensor | bool:
        """Return whether each sentence with ``beam_size`` ended hypotheses is done.

        Args:
            worst_ended: score of the worst ended hypothesis, (B,).
            best_running: score of the best unfinished hypothesis if it ended now, (B,).
        """


class FairseqRule:
    """Stop as soon as ``beam_size`` hypotheses have ended; the prompt does not count.

    Matches fairseq's ``sequence_generator.py``.
    """

    forces_end_at_limit = True

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:  # noqa: ARG002
        """Return the length without the prompt."""
        return length

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> bool:  # noqa: ARG002
        """Return True: ``beam_size`` hypotheses are enough."""
        return True


class HuggingFaceRule:
    """Stop when no running hypothesis can overtake the worst ended one.

    The forced tag counts as generated. Matches the beam search of transformers with
    ``early_stopping = False`` (``generation/utils.py``).
    """

    forces_end_at_limit = False

    def counted_length(self, length: Number, *, prompt_length: int) -> Number:
        """Return the length with the prompt, the decoder's start token excluded."""
        return length + prompt_length - 1

    def is_done(self, *, worst_ended: Tensor, best_running: Tensor) -> Tensor:
        """Return whether the worst ended hypothesis scores at least the best running one."""
        # With a penalty above 0, a longer one may still overtake it: transformers compares so, too.
        return worst_ended >= best_running


def stopping_rule(config: DecodingConfig) -> StoppingRule:
    """Return the stopping rule of a recipe; ConfigError if its case makes none."""
    rule: object = _configured_rule(config)
    if isinstance(rule, type) or not isinstance(rule, StoppingRule):
        raise ConfigError(
            f"stopping_rule has no case for {config.stopping!r} that returns an object with "
            "forces_end_at_limit, counted_length and is_done. Add it."
        )
    return rule


def _configured_rule(config: DecodingConfig) -> StoppingRule:
    match config.stopping:
        case "fairseq":
            return FairseqRule()
        case "huggingface":
            return HuggingFaceRule()
        case unknown:
            raise without_case("stopping_rule", unknown)


def counted_length(
    rule: StoppingRule, length: Number, *, prompt_length: int, reads: bool = False
) -> Number:
    """Return the rule's :meth:`~StoppingRule.counted_length`; ``reads`` checks values of a tensor.

    Raises:
        ConfigError: it is not as ``length``, a number or a tensor of one per sentence.
    """
    found = rule.counted_length(length, prompt_length=prompt_length)
    if isinstance(length, Tensor):
        fits = isinstance(found, Tensor) and found.shape == length.shape
        fits = fits and (not reads or bool((found > 0).all()))
    else:
        fits = isinstance(found, int | float) and found > 0
    if not fits:
        numbers = "numbers above 0, a tensor with one per sentence"
        wanted = numbers if isinstance(length, Tensor) else "a number above 0"
        raise ConfigError(
            f"counted_length of {type(rule).__name__} returned a {type(found).__name__} for "
            f"lengths of which it is to make {wanted}. Correct it."
        )
    return found


def max_target_length(source_tokens: int, config: DecodingConfig, *, positions: int) -> int:
    """Return the most tokens of a hypothesis, end-of-sentence included, for a source's length."""
    wanted = int(config.max_length_ratio * source_tokens) + config.max_extra_length
    return max(1, min(wanted, positions))


def length_limit(source: Source, config: DecodingConfig, *, positions: int) -> int:
    """Return :func:`max_target_length`, raised where the forced tokens need more.

    Raises:
        ConfigError: the forced tokens and end-of-sentence exceed the model's positions.
    """
    forced = len(source.prefix) + sum(map(len, set(source.required)))
    needed = forced + 1  # end-of-sentence
    if forced and needed > positions:
        raise ConfigError(
            f"The prefix and required phrases of a translation have {counted(forced, 'token')}, "
            f"and the model has positions for {positions - 1:,}. Shorten them."
        )
    return max(max_target_length(len(source.tokens), config, positions=positions), needed)


def source_begins(sources: Sequence[Source], device: torch.device) -> Tensor | None:
    """Return whether each source token begins a word of a segmenter; None without segmenters.

    Returns:
        Shape (N,), the tokens of all sources one after the other.
    """
    if not any(source.begins for source in sources):
        return None
    flags = [source.begins or (False,) * len(source.tokens) for source in sources]
    return torch.tensor([flag for of_source in flags for flag in of_source]).to(device)


def not_numbers() -> CheckpointError:
    """Return the error for a model that gives no hypothesis a finite score."""
    return CheckpointError(
        "The model cannot translate: its scores are not numbers, because its weights are finite "
        "but too large. Name another checkpoint."
    )


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
    """Return log-probabilities of the tokens, and attention of decoder layer ``attention_of``.

    A token has the attention of the position that predicts it, averaged over heads, as in
    fairseq's ``SequenceGeneratorWithAlignment``.
    """
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
            attention_BTS = _attention(layer, x, target, memory_ND, source).cpu()
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
    layer: DecoderLayer, x: Residual, target: Packing, memory_ND: Tensor, memory: Packing
) -> Tensor:
    """Return the weights of the layer's cross-attention, averaged over heads, (B, T, S)."""
    x = layer.sublayers["self_attention"](x, target, x.tokens, is_causal=True)
    _, entered_ND = x.enter(layer.cross_attention_norm)
    cross = layer.cross_attention
    query_BHTK = cross.heads(target.unpack(project(cross.query, entered_ND, x.tokens))).float()
    key_BHSK = cross.keys(memory_ND, memory, x.tokens.over(memory)).key_BHSK.float()
    score_BHTS = query_BHTK @ key_BHSK.transpose(2, 3) / math.sqrt(query_BHTK.shape[3])
    is_padding = ~memory.mask_BT[:, None, None, :]
    return score_BHTS.masked_fill(is_padding, -torch.inf).softmax(3).mean(1)
