"""Batched beam search with cached keys and values.

A hypothesis's score is the sum of its log-probabilities, end-of-sentence included, over its length
to the power of the length penalty. What counts as length, and when a sentence is done, is a slot
(``stopping.py``).

Nothing is dropped by experts and padding is never computed on, so that a sentence's translation
does not depend on its batch (up to floating-point rounding).

Legend: B unfinished sentences, J beams, R = B · J rows, C candidates, V vocabulary, T tokens so
far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import DecodingConfig
from pipeline.decoding.decoder_states import DecoderStates
from pipeline.decoding.hypotheses import Source, Translation, length_limit, not_numbers
from pipeline.decoding.restrictions import Restrictions
from pipeline.decoding.stopping import stopping_rule
from pipeline.model.transformer import Transformer


@dataclass
class _Ended:
    """Ended hypotheses of one sentence, (score, tokens) each, best first."""

    hypotheses: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    done: bool = False

    def add(self, score: float, tokens: tuple[int, ...], *, keep: int) -> None:
        self.hypotheses.append((score, tokens))
        self.hypotheses.sort(key=lambda entry: -entry[0])
        del self.hypotheses[keep:]

    @property
    def worst(self) -> float:
        return self.hypotheses[-1][0]


@torch.inference_mode()
def beam_search(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[Translation]:
    """Translate a batch; the prompts must have one length.

    Returns the best hypothesis of every source, in order.
    """
    return [found[0] for found in beam_search_n_best(model, sources, config, eos_id=eos_id)]


@torch.inference_mode()
def beam_search_n_best(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[list[Translation]]:
    """The best 1 to ``n_best`` hypotheses of every source, best first; as :func:`beam_search`.

    They are fewer where fewer have ended: a short limit may leave room for no more.
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
        self.beams, self.n_best = config.beam_size, config.n_best
        self.device = model.device
        specials = frozenset((model.spec.pad_id, eos_id))
        self.restrictions = Restrictions.of(sources, specials=specials)
        self.states = DecoderStates(model, sources, beams=self.beams, route=config.route)
        self.prompt_length = self.states.prompt_length
        positions = model.spec.model.max_positions - self.prompt_length
        self.limits = [length_limit(source, config, positions=positions) for source in sources]
        self.ended = [_Ended() for _ in sources]
        self.active = list(range(len(sources)))
        beam_grid = (len(sources), self.beams)
        self.tokens_BJT = torch.empty(*beam_grid, 0, dtype=torch.int64, device=self.device)
        self.scores_BJ = torch.full(beam_grid, -torch.inf, device=self.device)
        self.scores_BJ[:, 0] = 0.0

    def run(self) -> list[list[Translation]]:
        x_RD = self.states.begin()
        for length in range(1, max(self.limits) + 1):
            next_R = self.advance(self.model.project(x_RD), length)
            if next_R is None:
                break
            x_RD = self.states.step(next_R, self.prompt_length + length - 1)
        return [self._best(ended) for ended in self.ended]

    def _best(self, ended: _Ended) -> list[Translation]:
        if not ended.hypotheses:
            raise not_numbers()
        return [Translation(tokens, score) for score, tokens in ended.hypotheses[: self.n_best]]

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
        beam_BJ = beam_BC.gather(1, choice_BJ)[keep_B]
        self.states.keep(keep_B, beam_BJ)
        self.active = [self.active[row] for row in keep]
        self.tokens_BJT = self.tokens_BJT[keep_B[:, None], beam_BJ]
        self.tokens_BJT = torch.cat([self.tokens_BJT, token_BJ[:, :, None]], dim=2)
        return token_BJ.flatten()

    def _candidates(self, logits_RV: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, beams and tokens of the 2 · J best extensions of every sentence, best first."""
        log_p_RV = F.log_softmax(logits_RV, dim=1, dtype=torch.float32)
        log_p_RV[:, self.model.spec.pad_id] = -torch.inf
        if self.restrictions is not None:
            self.restrictions.apply(log_p_RV, self.tokens_BJT, active=self.active, length=length)
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
