"""Batched beam search with cached keys and values.

A hypothesis's score is the sum of its log-probabilities, end-of-sentence included, over its length
to the power of the length penalty. What counts as length, and when a sentence is done, is a slot
(``stopping.py``).

Nothing is dropped by experts and padding is never computed on, so that a sentence's translation
does not depend on its batch (up to floating-point rounding).

Beams are never copied: those of a sentence share one cache, to which every step adds one entry per
beam, and a mask tells which entries are a beam's own past. When beams move, only the mask moves.

Legend: B unfinished sentences, J beams, R = B · J rows, C candidates, V vocabulary, S source
length, P entries of the cache (positions · J), T tokens so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.config import DecodingConfig
from pipeline.decoding.stopping import stopping_rule
from pipeline.errors import CheckpointError
from pipeline.model.attention import KeyValues
from pipeline.model.layers import LayerCache
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer

CACHE_STEP = 16
"""The cache grows by this many positions at a time."""


@dataclass(frozen=True)
class Source:
    """One sentence to translate, tags and end-of-sentence included."""

    tokens: Sequence[int]
    prompt: tuple[int, ...]
    """Forced decoder input: it ends with the target tag where the scheme has one."""
    source_language: int
    target_language: int
    """Indices into the tokenizer's languages."""


@dataclass(frozen=True)
class Translation:
    """The best hypothesis: its tokens without prompt and end-of-sentence, and its score."""

    tokens: tuple[int, ...]
    score: float


@dataclass
class _Ended:
    """Ended hypotheses of one sentence: (score, order of arrival, tokens)."""

    hypotheses: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    done: bool = False

    def add(self, score: float, tokens: tuple[int, ...], *, keep: int) -> None:
        self.hypotheses.append((score, tokens))
        self.hypotheses.sort(key=lambda entry: -entry[0])
        del self.hypotheses[keep:]

    @property
    def worst(self) -> float:
        return self.hypotheses[-1][0]


def max_target_length(source_tokens: int, config: DecodingConfig, *, positions: int) -> int:
    """Longest hypothesis, end-of-sentence included, for a source of that many tokens."""
    wanted = int(config.max_length_ratio * source_tokens) + config.max_extra_length
    return max(1, min(wanted, positions))


@torch.inference_mode()
def beam_search(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[Translation]:
    """Translate a batch; the prompts must have one length.

    Returns the best hypothesis of every source, in order.
    """
    model.eval()
    return Search(model, sources, config, eos_id=eos_id).run()


class Search:
    """The state of one batch: unfinished sentences in order, their caches, ended hypotheses."""

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
    ) -> None:
        self.model, self.eos_id = model, eos_id
        self.rule = stopping_rule(config)
        self.length_penalty = config.length_penalty
        self.beams = config.beam_size
        self.device = model.device
        prompt_BT = torch.tensor([source.prompt for source in sources], device=self.device)
        self.prompt_RT = prompt_BT.repeat_interleave(self.beams, dim=0)
        self.prompt_length = prompt_BT.shape[1]
        positions = model.spec.model.max_positions - self.prompt_length
        self.limits = [
            max_target_length(len(source.tokens), config, positions=positions) for source in sources
        ]
        self.ended = [_Ended() for _ in sources]
        self.active = list(range(len(sources)))
        pairs = [(source.source_language, source.target_language) for source in sources]
        self.languages_B2 = torch.tensor(pairs, device=self.device)
        self.caches = self._encode(sources)
        beam_grid = (len(sources), self.beams)
        self.own_past_BJP = torch.zeros(*beam_grid, 0, dtype=torch.bool, device=self.device)
        self.tokens_BJT = torch.empty(*beam_grid, 0, dtype=torch.int64, device=self.device)
        self.scores_BJ = torch.full(beam_grid, -torch.inf, device=self.device)
        self.scores_BJ[:, 0] = 0.0

    def _encode(self, sources: Sequence[Source]) -> list[LayerCache]:
        packing = Packing.from_lengths([len(source.tokens) for source in sources]).to(self.device)
        ids = torch.tensor([token for source in sources for token in source.tokens])
        ids_N = ids.to(self.device)
        tokens = self.model.tokens_of(packing, *self.languages_B2.unbind(1))
        memory_ND, _ = self.model.encode(ids_N, self.model.embedding(ids_N), packing, tokens)
        self.memory_mask = None if packing.is_full else packing.mask_BT[:, None, None, :]
        caches = []
        for layer in self.model.decoder_layers():
            memory = layer.cross_attention.keys(memory_ND, packing)
            empty = memory.key_BHSK[:, :, :0]
            contiguous = KeyValues(memory.key_BHSK.contiguous(), memory.value_BHSK.contiguous())
            caches.append(LayerCache(past=KeyValues(empty, empty), memory=contiguous))
        return caches

    def run(self) -> list[Translation]:
        for position in range(self.prompt_length):
            x_RD = self.step(self.prompt_RT[:, position], position)
        for length in range(1, max(self.limits) + 1):
            next_R = self.advance(self.model.project(x_RD), length)
            if next_R is None:
                break
            x_RD = self.step(next_R, self.prompt_length + length - 1)
        return [self._best(index) for index in range(len(self.ended))]

    def _best(self, index: int) -> Translation:
        if not self.ended[index].hypotheses:
            raise CheckpointError(
                "The model's scores are not numbers, so that it cannot translate: its weights are "
                "finite but too large; name another checkpoint."
            )
        score, tokens = max(self.ended[index].hypotheses, key=lambda entry: entry[0])
        return Translation(tokens, score)

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

    def _tokens(self, ids_R: Tensor, position: int) -> Tokens:
        """What layers are told about one token per row."""
        source_language_B, target_language_B = self.languages_B2.unbind(1)
        return Tokens(
            sentence_N=torch.arange(len(ids_R), device=self.device) // self.beams,
            position_N=torch.full_like(ids_R, position),
            source_language_B=source_language_B,
            target_language_B=target_language_B,
            language_group_B=self.model.group_of_language[target_language_B],
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

    def advance(self, logits_RV: Tensor, length: int) -> Tensor | None:
        """Extend every beam by its next token (the ``length``-th); None when all are done."""
        score_BC, beam_BC, token_BC = self._candidates(logits_RV, length)
        self._collect(score_BC, beam_BC, token_BC, length)
        running_BC = score_BC.masked_fill(token_BC == self.eos_id, -torch.inf)
        running_BJ, choice_BJ = running_BC.topk(self.beams, dim=1)
        self._mark_done(running_BJ[:, 0].tolist(), length)
        keep = [row for row, index in enumerate(self.active) if not self.ended[index].done]
        if not keep:
            return None
        keep_B = torch.tensor(keep, device=self.device)
        token_BJ = token_BC.gather(1, choice_BJ)[keep_B]
        self.scores_BJ = running_BJ[keep_B]
        self._move_beams(keep_B, beam_BC.gather(1, choice_BJ)[keep_B])
        self.tokens_BJT = torch.cat([self.tokens_BJT, token_BJ[:, :, None]], dim=2)
        return token_BJ.flatten()

    def _candidates(self, logits_RV: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, beams and tokens of the 2 · J best extensions of every sentence, best first."""
        log_p_RV = F.log_softmax(logits_RV, dim=1, dtype=torch.float32)
        log_p_RV[:, self.model.spec.pad_id] = -torch.inf
        at_limit = [length >= self.limits[index] for index in self.active]
        if any(at_limit) and self.rule.forces_end_at_limit:
            rows = torch.tensor(at_limit, device=self.device).repeat_interleave(self.beams)
            others = torch.ones(log_p_RV.shape[1], dtype=torch.bool, device=self.device)
            others[self.eos_id] = False
            log_p_RV.masked_fill_(rows[:, None] & others, -torch.inf)
        width = min(2 * self.beams, log_p_RV.shape[1])
        best_RC, token_RC = log_p_RV.topk(width, dim=1)
        total_RC = best_RC + self.scores_BJ.view(-1, 1)
        total_BX = total_RC.view(len(self.active), -1)
        score_BC, place_BC = total_BX.topk(min(2 * self.beams, total_BX.shape[1]), dim=1)
        token_BC = token_RC.view(len(self.active), -1).gather(1, place_BC)
        return score_BC, place_BC // width, token_BC

    def _normalized(self, score: float, length: int) -> float:
        counted = self.rule.counted_length(length, prompt_length=self.prompt_length)
        return float(score / counted**self.length_penalty)

    def _collect(self, score_BC: Tensor, beam_BC: Tensor, token_BC: Tensor, length: int) -> None:
        """Record the hypotheses that end here, which are among the J best candidates.

        End-of-sentence ends one; at the limit a rule may take running ones as they are.
        """
        ends_BJ = token_BC[:, : self.beams] == self.eos_id
        if not self.rule.forces_end_at_limit:
            at_limit = [length >= self.limits[index] for index in self.active]
            ends_BJ = ends_BJ | torch.tensor(at_limit, device=self.device)[:, None]
        ends_BJ = ends_BJ & score_BC[:, : self.beams].isfinite()
        for row, column in ends_BJ.nonzero().tolist():
            past = self.tokens_BJT[row, int(beam_BC[row, column])].tolist()
            last = int(token_BC[row, column])
            score = self._normalized(float(score_BC[row, column]), length)
            tokens = (*past,) if last == self.eos_id else (*past, last)
            self.ended[self.active[row]].add(score, tokens, keep=self.beams)

    def _mark_done(self, best_running: Sequence[float], length: int) -> None:
        for row, index in enumerate(self.active):
            ended = self.ended[index]
            ended.done = length >= self.limits[index]
            if len(ended.hypotheses) >= self.beams:
                best = self._normalized(best_running[row], length)
                ended.done |= self.rule.is_done(worst_ended=ended.worst, best_running=best)

    def _move_beams(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        """The surviving beams in their new order; finished sentences leave."""
        rows = keep_B[:, None]
        self.own_past_BJP = self.own_past_BJP[rows, beam_BJ]
        self.tokens_BJT = self.tokens_BJT[rows, beam_BJ]
        if len(keep_B) == len(self.active):
            self._replace_past(lambda x: x)
            return
        self.active = [self.active[row] for row in keep_B.tolist()]
        self.languages_B2 = self.languages_B2[keep_B]
        self._replace_past(lambda x_BHPK: x_BHPK[keep_B])
        for cache in self.caches:
            memory = cache.memory
            cache.memory = KeyValues(memory.key_BHSK[keep_B], memory.value_BHSK[keep_B])
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask[keep_B]
