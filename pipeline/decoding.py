"""Batched beam search with cached keys and values.

Scores are fairseq's: the sum of log-probabilities, end-of-sentence included, divided by the number
of generated tokens (end-of-sentence included, the forced prompt not) to the power of the length
penalty; a sentence is done when ``beam_size`` hypotheses have ended. The ``huggingface`` rule
counts the forced tag as generated, keeps the best ``beam_size`` ended hypotheses, and stops when
no running one can still overtake the worst of them.

Nothing is dropped by experts and padding is never computed on, so that a sentence's translation
does not depend on its batch (up to floating-point rounding).

Legend: B unfinished sentences, J beams, R = B · J rows, V vocabulary, S source length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batches import Packing
from pipeline.config import DecodingConfig
from pipeline.model.attention import KeyValues
from pipeline.model.transformer import LayerCache, Transformer

CACHE_STEP = 16
"""The cache grows by this many positions at a time."""


@dataclass(frozen=True)
class Source:
    """One sentence to translate, tags and end-of-sentence included."""

    tokens: Sequence[int]
    prompt: tuple[int, ...]
    """Forced decoder input: it ends with the target tag where the scheme has one."""
    target_language: int


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
    return _Search(model, sources, config, eos_id=eos_id).run()


class _Search:
    """The state of one batch: rows in beam order, caches, ended hypotheses."""

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
    ) -> None:
        self.model, self.config, self.eos_id = model, config, eos_id
        self.pad_id = model.spec.pad_id
        self.beams = config.beam_size
        self.device = model.embedding.weight.device
        self.prompt = torch.tensor([source.prompt for source in sources], device=self.device)
        self.prompt_length = self.prompt.shape[1]
        positions = model.spec.model.max_positions - self.prompt_length
        self.limits = [
            max_target_length(len(source.tokens), config, positions=positions) for source in sources
        ]
        self.ended = [_Ended() for _ in sources]
        self.active = list(range(len(sources)))
        groups = model.group_of_language[
            torch.tensor([source.target_language for source in sources], device=self.device)
        ]
        self.group_R = groups.repeat_interleave(self.beams)
        self._encode(sources, groups)
        self.tokens_RT = torch.empty(len(self.group_R), 0, dtype=torch.int64, device=self.device)
        self.scores_BJ = torch.full((len(sources), self.beams), -torch.inf, device=self.device)
        self.scores_BJ[:, 0] = 0.0

    def _encode(self, sources: Sequence[Source], groups_B: Tensor) -> None:
        packing = Packing.from_lengths([len(source.tokens) for source in sources]).to(self.device)
        ids = torch.tensor([token for source in sources for token in source.tokens])
        embedded = self.model.embed_tokens(ids.to(self.device))
        memory_ND, _ = self.model.encode(embedded, packing, groups_B)
        self.memory_mask = None if packing.is_full else packing.mask_BT[:, None, None, :]
        self.caches = []
        for layer in self.model.decoder_layers():
            memory = layer.cross_attention.keys(memory_ND, packing)
            heads, width = memory.key_BHSK.shape[1], memory.key_BHSK.shape[3]
            empty = memory_ND.new_empty(len(self.group_R), heads, CACHE_STEP, width)
            self.caches.append(
                LayerCache(
                    past=KeyValues(empty, torch.empty_like(empty)),
                    memory=KeyValues(memory.key_BHSK.contiguous(), memory.value_BHSK.contiguous()),
                )
            )

    def run(self) -> list[Translation]:
        prompt_RT = self.prompt.repeat_interleave(self.beams, dim=0)
        for position in range(self.prompt_length):
            logits_RV = self._step(prompt_RT[:, position], position)
        for length in range(1, max(self.limits) + 1):
            next_R = self._advance(logits_RV, length)
            if next_R is None:
                break
            logits_RV = self._step(next_R, self.prompt_length + length - 1)
        return [self._best(index) for index in range(len(self.ended))]

    def _best(self, index: int) -> Translation:
        score, tokens = max(self.ended[index].hypotheses, key=lambda entry: entry[0])
        return Translation(tokens, score)

    def _step(self, ids_R: Tensor, position: int) -> Tensor:
        """Feed one token per row; logits for the next one, (R, V), in float32."""
        if position >= self.caches[0].past.key_BHSK.shape[2]:
            for cache in self.caches:
                grow = (0, 0, 0, CACHE_STEP)
                past = cache.past
                cache.past = KeyValues(F.pad(past.key_BHSK, grow), F.pad(past.value_BHSK, grow))
        position_R = torch.full_like(ids_R, position)
        model = self.model
        x_RD = model.add_positions(model.decoder, model.embed_tokens(ids_R), position_R)
        for layer, cache in zip(model.decoder_layers(), self.caches, strict=True):
            x_RD = layer.step(
                x_RD,
                cache,
                length=position,
                group_R=self.group_R,
                memory_mask=self.memory_mask,
            )
        return model.project(x_RD).float()

    def _advance(self, logits_RV: Tensor, length: int) -> Tensor | None:
        """Extend every beam by its next token (the ``length``-th); None when all are done."""
        score_BC, beam_BC, token_BC = self._candidates(logits_RV, length)
        is_eos_BC = token_BC == self.eos_id
        self._collect(score_BC, beam_BC, is_eos_BC, length)
        running_BC = score_BC.masked_fill(is_eos_BC, -torch.inf)
        running_BJ, choice_BJ = running_BC.topk(self.beams, dim=1)
        self._mark_done(running_BJ, length)
        self._end_unfinished(running_BJ, beam_BC, token_BC, choice_BJ, length)

        keep = [row for row, index in enumerate(self.active) if not self.ended[index].done]
        if not keep:
            return None
        keep_B = torch.tensor(keep, device=self.device)
        beam_BJ = beam_BC.gather(1, choice_BJ)[keep_B]
        token_BJ = token_BC.gather(1, choice_BJ)[keep_B]
        self._reorder((keep_B[:, None] * self.beams + beam_BJ).flatten(), keep, keep_B)
        self.scores_BJ = running_BJ[keep_B]
        self.tokens_RT = torch.cat([self.tokens_RT, token_BJ.view(-1, 1)], dim=1)
        return token_BJ.flatten()

    def _candidates(self, logits_RV: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, beams and tokens of the 2 · J best extensions of every sentence, best first."""
        logits_RV[:, self.pad_id] = -torch.inf
        normalizer_R1 = logits_RV.logsumexp(dim=1, keepdim=True)
        at_limit = [length >= self.limits[index] for index in self.active]
        if any(at_limit) and self.config.stopping == "fairseq":
            rows = torch.tensor(at_limit, device=self.device).repeat_interleave(self.beams)
            others = torch.ones(logits_RV.shape[1], dtype=torch.bool, device=self.device)
            others[self.eos_id] = False
            logits_RV.masked_fill_(rows[:, None] & others, -torch.inf)
        width = min(2 * self.beams, logits_RV.shape[1])
        best_RC, token_RC = logits_RV.topk(width, dim=1)
        total_RC = best_RC - normalizer_R1 + self.scores_BJ.view(-1, 1)
        total_BX = total_RC.view(len(self.active), -1)
        score_BC, place_BC = total_BX.topk(min(2 * self.beams, total_BX.shape[1]), dim=1)
        token_BC = token_RC.view(len(self.active), -1).gather(1, place_BC)
        return score_BC, place_BC // width, token_BC

    def _normalized(self, score: float, length: int) -> float:
        counted = length
        if self.config.stopping == "huggingface":
            counted += self.prompt_length - 1
        return float(score / counted**self.config.length_penalty)

    def _collect(self, score_BC: Tensor, beam_BC: Tensor, is_eos_BC: Tensor, length: int) -> None:
        """Record the hypotheses that end here: end-of-sentence among the J best candidates."""
        ends = is_eos_BC[:, : self.beams] & score_BC[:, : self.beams].isfinite()
        for row, column in ends.nonzero().tolist():
            ended = self.ended[self.active[row]]
            if self.config.stopping == "fairseq" and len(ended.hypotheses) >= self.beams:
                continue
            tokens = self.tokens_RT[row * self.beams + int(beam_BC[row, column])]
            score = self._normalized(float(score_BC[row, column]), length)
            ended.add(score, tuple(tokens.tolist()), keep=self.beams)

    def _mark_done(self, running_BJ: Tensor, length: int) -> None:
        for row, index in enumerate(self.active):
            ended = self.ended[index]
            if self.config.stopping == "fairseq":
                full = len(ended.hypotheses) >= self.beams
                ended.done = full or length >= self.limits[index]
            elif len(ended.hypotheses) >= self.beams:
                best_running = self._normalized(float(running_BJ[row, 0]), length)
                ended.done = ended.worst >= best_running

    def _end_unfinished(
        self, running_BJ: Tensor, beam_BC: Tensor, token_BC: Tensor, choice_BJ: Tensor, length: int
    ) -> None:
        """The huggingface rule at the limit: running hypotheses count as they are."""
        for row, index in enumerate(self.active):
            ended = self.ended[index]
            if ended.done or length < self.limits[index]:
                continue
            for column in range(self.beams):
                choice = int(choice_BJ[row, column])
                past = self.tokens_RT[row * self.beams + int(beam_BC[row, choice])].tolist()
                score = self._normalized(float(running_BJ[row, column]), length)
                tokens = (*past, int(token_BC[row, choice]))
                ended.add(score, tokens, keep=self.beams)
            ended.done = True

    def _reorder(self, order_R: Tensor, keep: list[int], keep_B: Tensor) -> None:
        """Rows of the surviving beams, in their new order; finished sentences leave."""
        some_left = len(keep) < len(self.active)
        for cache in self.caches:
            cache.past = KeyValues(
                cache.past.key_BHSK.index_select(0, order_R),
                cache.past.value_BHSK.index_select(0, order_R),
            )
            if some_left:
                cache.memory = KeyValues(
                    cache.memory.key_BHSK[keep_B], cache.memory.value_BHSK[keep_B]
                )
        self.tokens_RT = self.tokens_RT.index_select(0, order_R)
        if some_left:
            self.active = [self.active[row] for row in keep]
            self.group_R = self.group_R.view(-1, self.beams)[keep_B].flatten()
            if self.memory_mask is not None:
                self.memory_mask = self.memory_mask[keep_B]
