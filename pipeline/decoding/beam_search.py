"""Batched beam search with cached keys and values.

The score of a hypothesis is the sum of its log-probabilities, end-of-sentence included, divided by
its length to the power of the length penalty. A stopping rule (``hypotheses.py``) counts the length
and decides when a sentence is done.

A sentence's translation does not depend on its batch (up to floating-point rounding): experts drop
no token, and nothing is computed on padding.

Legend: B unfinished sentences, J beams, R = B · J rows, C candidates, V vocabulary, T tokens so
far.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoding.cached_keys import DecoderStates, of_last_columns
from pipeline.decoding.constraints import (
    Candidates,
    Constraints,
    Restrictions,
    force_end,
    no_room_for_phrases,
)
from pipeline.decoding.hypotheses import (
    Source,
    Translation,
    length_limit,
    not_numbers,
    stopping_rule,
)
from pipeline.decoding.settings import DecodingConfig
from pipeline.distributed import progress
from pipeline.kernels.logits import best_tokens, log_normalizer
from pipeline.model.transformer import Transformer


def beam_search(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[Translation]:
    """Return the best hypothesis of every source; the prompts must have one length."""
    return [found[0] for found in beam_search_n_best(model, sources, config, eos_id=eos_id)]


@torch.inference_mode()
def beam_search_n_best(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[list[Translation]]:
    """Return the best 1 to ``n_best`` hypotheses of every source, best first.

    A source has fewer than ``n_best`` if fewer ended: a short length limit may not allow more. The
    prompts must have one length.
    """
    model.eval()
    return Search(model, sources, config, eos_id=eos_id).run()


@dataclass
class _Sentence:
    """A sentence that is searched for, and its ended hypotheses."""

    index: int
    """Its place among all sentences of the search."""
    limit: int
    """Most tokens of a hypothesis."""
    length: int = 0
    """Number of tokens of its beams."""
    hypotheses: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """Score and tokens of the ended hypotheses, best first."""
    done: bool = False

    def add(self, score: float, tokens: tuple[int, ...], *, keep: int) -> None:
        self.hypotheses.append((score, tokens))
        self.hypotheses.sort(key=lambda entry: -entry[0])
        del self.hypotheses[keep:]

    @property
    def worst(self) -> float:
        return self.hypotheses[-1][0]


class Search:
    """Beam search: unfinished sentences in order, their caches, ended hypotheses.

    :meth:`run` searches for the given sources alone. Between two steps, others :meth:`join`, and
    :meth:`drop` removes some. The tokens of every sentence end in the last column, behind columns
    that it does not use.
    """

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
        self.constraints = Constraints.of(sources, specials=specials, eos_id=eos_id)
        self.states = DecoderStates(model, sources, route=config.route)
        self.prompt_length = self.states.prompt_length
        positions = model.spec.model.max_positions - self.prompt_length
        self.active = [
            _Sentence(index, length_limit(source, config, positions=positions))
            for index, source in enumerate(sources)
        ]
        self.sentences = len(sources)
        """Number of sentences, with those that are done."""
        self.next_R: Tensor | None = None
        """Last token of every beam; None before the first step."""
        grid = (len(sources), 1)  # all beams begin alike
        self.tokens_BJT = torch.empty(*grid, 0, dtype=torch.int64, device=self.device)
        self.scores_BJ = torch.zeros(grid, device=self.device)

    def run(self) -> list[list[Translation]]:
        """Search until all sentences are done; return the best hypotheses of each."""
        found: dict[int, list[Translation]] = {}
        while self.active:
            found |= self.step()
        return [found[index] for index in range(self.sentences)]

    def step(self) -> dict[int, list[Translation]]:
        """Extend the beams by a token; return the hypotheses of each sentence that is done now."""
        progress.advance()
        searched = self.active
        x_RD = self.states.begin() if self.next_R is None else self._feed(self.next_R)
        self.next_R = self.advance(self.model.project(x_RD))
        return {one.index: self._best(one) for one in searched if one.done}

    def _feed(self, next_R: Tensor) -> Tensor:
        """Feed the last token of every beam; return the decoder's states for the next one."""
        lengths = [sentence.length for sentence in self.active]
        position_B = torch.tensor(lengths, device=self.device) + (self.prompt_length - 1)
        return self.states.step(next_R, position_B.repeat_interleave(self.beams))

    @property
    def can_be_joined(self) -> bool:
        """Whether sentences can join: constraints know those of their own batch alone."""
        is_free = self.restrictions is None and self.constraints is None
        return is_free and self.states.can_join

    def join(self, other: "Search") -> int:
        """Take over the sentences of another search with the same model and settings.

        Both must have made a step and have unfinished sentences.

        Returns:
            Number to be added to the indices of the other's sentences.
        """
        assert self.next_R is not None
        assert other.next_R is not None
        shift = self.sentences
        for sentence in other.active:
            sentence.index += shift
        self.active = [*self.active, *other.active]
        self.sentences += other.sentences
        longest = max(sentence.length for sentence in self.active)
        tokens = (of_last_columns(one.tokens_BJT, longest) for one in (self, other))
        self.tokens_BJT = torch.cat(list(tokens))
        self.scores_BJ = torch.cat([self.scores_BJ, other.scores_BJ])
        self.next_R = torch.cat([self.next_R, other.next_R])
        self.states.join(other.states)
        return shift

    def drop(self, indices: Container[int]) -> None:
        """End the search for these sentences without a result; the search must have made a step."""
        keep = [row for row, sentence in enumerate(self.active) if sentence.index not in indices]
        if not keep:
            self.active, self.next_R = [], None
        elif len(keep) < len(self.active):
            assert self.next_R is not None
            next_BJ = self.next_R.view(-1, self.beams)
            same_BJ = torch.arange(self.beams, device=self.device).expand_as(next_BJ)
            self.next_R = self._keep(keep, same_BJ, next_BJ).flatten()

    def _best(self, sentence: _Sentence) -> list[Translation]:
        if not sentence.hypotheses:
            raise not_numbers() if self.constraints is None else no_room_for_phrases()
        return [Translation(tokens, score) for score, tokens in sentence.hypotheses[: self.n_best]]

    def advance(self, logits_RV: Tensor) -> Tensor | None:
        """Extend every beam by a token; return these, or None when all sentences are done."""
        for sentence in self.active:
            sentence.length += 1
        score_BC, beam_BC, token_BC = self._candidates(logits_RV)
        self._collect(score_BC, beam_BC, token_BC)
        running_BC = score_BC.masked_fill(token_BC == self.eos_id, -torch.inf)
        running_BJ, choice_BJ = self._running(running_BC)
        self._mark_done(running_BJ.amax(1).tolist())
        keep = [row for row, sentence in enumerate(self.active) if not sentence.done]
        if not keep:
            self.active = []
            return None
        self.scores_BJ = running_BJ
        token_BJ = self._keep(keep, beam_BC.gather(1, choice_BJ), token_BC.gather(1, choice_BJ))
        self.tokens_BJT = torch.cat([self.tokens_BJT, token_BJ[:, :, None]], dim=2)
        return token_BJ.flatten()

    def _keep(self, keep: list[int], beam_BJ: Tensor, next_BJ: Tensor) -> Tensor:
        """Keep only some sentences with the beams ``beam_BJ``; return their next tokens."""
        keep_B = torch.tensor(keep, device=self.device)
        beam_BJ = beam_BJ[keep_B]
        self.states.keep(keep_B, beam_BJ)
        self.active = [self.active[row] for row in keep]
        self.scores_BJ = self.scores_BJ[keep_B]
        self.tokens_BJT = self.tokens_BJT[keep_B[:, None], beam_BJ]
        return next_BJ[keep_B]

    def _running(self, running_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the J candidates that go on: the best, or with phrases the first by turn."""
        if self.constraints is None:
            running_BJ, choice_BJ = running_BC.topk(self.beams, dim=1)
            return running_BJ, choice_BJ
        place_BC = (running_BC == -torch.inf).long().argsort(dim=1, stable=True)
        choice_BJ = place_BC[:, : self.beams]
        return running_BC.gather(1, choice_BJ), choice_BJ

    def _candidates(self, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, beams and tokens of each sentence's 2 · J best extensions, best first.

        With required phrases there are more, ordered by their turn to get a place.
        """
        logits_RV = logits_RV.float()
        normalizer_R = log_normalizer(logits_RV)
        logits_RV[:, self.model.spec.pad_id] = -torch.inf
        active = [sentence.index for sentence in self.active]
        if self.restrictions is not None:
            length = self.active[0].length  # of all: nothing has joined
            self.restrictions.apply(logits_RV, self.tokens_BJT, active=active, length=length)
        at_limit = self._at_limit()
        if self.rule.forces_end_at_limit:
            force_end(logits_RV, at_limit, eos_id=self.eos_id)
        if self.constraints is not None:
            self.constraints.bar_ends(logits_RV, self.tokens_BJT, active=active)
        width = min(2 * self.beams, logits_RV.shape[1])
        best_RC, token_RC = best_tokens(logits_RV, width)
        total_RC = best_RC + (self.scores_BJ.view(-1) - normalizer_R)[:, None]
        total_BX = total_RC.view(len(self.active), -1)
        # At the first token a small vocabulary has fewer candidates than there are beams.
        missing = max(self.beams - total_BX.shape[1], 0)
        total_BX = F.pad(total_BX, (0, missing), value=-torch.inf)
        score_BC, place_BC = total_BX.topk(min(2 * self.beams, total_BX.shape[1]), dim=1)
        token_BX = F.pad(token_RC.view(len(self.active), -1), (0, missing))
        beam_BC = (place_BC // width).clamp_max_(self.scores_BJ.shape[1] - 1)
        token_BC = token_BX.gather(1, place_BC)
        if self.constraints is None:
            return score_BC, beam_BC, token_BC
        before_R = self.scores_BJ.view(-1) - normalizer_R
        dealt = self.constraints.allocate(
            Candidates(score_BC, beam_BC, token_BC),
            logits_RV + before_R[:, None],
            self.tokens_BJT,
            active=active,
            is_last=[here and not self.rule.forces_end_at_limit for here in at_limit],
        )
        return self._at_least_beams(dealt)

    def _at_least_beams(self, found: Candidates) -> tuple[Tensor, Tensor, Tensor]:
        """Fill up to J candidates with impossible ones."""
        missing = (0, max(self.beams - found.score_BC.shape[1], 0))
        score_BC = F.pad(found.score_BC, missing, value=-torch.inf)
        return score_BC, F.pad(found.beam_BC, missing), F.pad(found.token_BC, missing)

    def _at_limit(self) -> list[bool]:
        return [sentence.length >= sentence.limit for sentence in self.active]

    def _normalized(self, score: float, length: int) -> float:
        counted = self.rule.counted_length(length, prompt_length=self.prompt_length)
        return float(score / counted**self.length_penalty)

    def _collect(self, score_BC: Tensor, beam_BC: Tensor, token_BC: Tensor) -> None:
        """Record the hypotheses that end here, out of the J best candidates.

        End-of-sentence ends a hypothesis, and so does the length limit if the rule forces no end.
        """
        ends_BJ = token_BC[:, : self.beams] == self.eos_id
        if not self.rule.forces_end_at_limit:
            at_limit_B = torch.tensor(self._at_limit(), device=self.device)
            ends_BJ = ends_BJ | at_limit_B[:, None]
        ends_BJ = ends_BJ & score_BC[:, : self.beams].isfinite()
        row_X, column_X = ends_BJ.nonzero().unbind(1)
        if not len(row_X):
            return
        past_XT = self.tokens_BJT[row_X, beam_BC[row_X, column_X]].tolist()
        ends = zip(
            row_X.tolist(),
            past_XT,
            token_BC[row_X, column_X].tolist(),
            score_BC[row_X, column_X].tolist(),
            strict=True,
        )
        for row, past, last, total in ends:
            sentence = self.active[row]
            own = past[len(past) - (sentence.length - 1) :]
            tokens = (*own,) if last == self.eos_id else (*own, last)
            score = self._normalized(total, sentence.length)
            sentence.add(score, tokens, keep=self.beams)

    def _mark_done(self, best_running: Sequence[float]) -> None:
        for row, sentence in enumerate(self.active):
            sentence.done = sentence.length >= sentence.limit
            if len(sentence.hypotheses) >= self.beams:
                best = self._normalized(best_running[row], sentence.length)
                sentence.done |= self.rule.is_done(worst_ended=sentence.worst, best_running=best)
