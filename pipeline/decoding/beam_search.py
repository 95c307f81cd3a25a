"""Batched beam search with cached keys and values.

The score of a hypothesis is the sum of its log-probabilities, end-of-sentence included, divided by
its length to the power of the length penalty. A stopping rule (``hypotheses.py``) counts the length
and decides when a sentence is done.

A sentence's translation does not depend on its batch (up to floating-point rounding): experts drop
no token, and nothing is computed on padding.

:class:`BeamStep` extends all beams by a token with tensor operators only, so that a GPU can replay
it (:mod:`~pipeline.decoding.grid_search`). :class:`Search` reads after every step which sentences
are done, and removes them.

Legend: B unfinished sentences, J beams, R = B · J rows, C candidates, V vocabulary, T room
for tokens of a hypothesis.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoding.cached_keys import DecoderStates, capacity
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
    counted_length,
    length_limit,
    not_numbers,
    stopping_rule,
)
from pipeline.decoding.settings import DecodingConfig
from pipeline.distributed import process
from pipeline.errors import ConfigError
from pipeline.kernels.logits import best_tokens, finds_best_at_once, fused_best_tokens
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
    return Search(model.eval(), sources, config, eos_id=eos_id).run()


class Beams(NamedTuple):
    """The beams and ended hypotheses of the sentences of a search.

    Before the first token a sentence has one beam. Ended hypotheses are sorted, best first.

    Attributes:
        next_BJ: last token of every beam.
        score_BJ: sum of its log-probabilities.
        tokens_BJT: its tokens, from the first column on.
        length_B: number of these tokens.
        limit_B: most tokens of a hypothesis.
        done_B: whether the search for the sentence has ended.
        ended_score_BJ: scores of ended hypotheses in float64; -inf where there is none.
        ended_tokens_BJT: their tokens.
        ended_length_BJ: number of their tokens, without end-of-sentence.
    """

    next_BJ: Tensor
    score_BJ: Tensor
    tokens_BJT: Tensor
    length_B: Tensor
    limit_B: Tensor
    done_B: Tensor
    ended_score_BJ: Tensor
    ended_tokens_BJT: Tensor
    ended_length_BJ: Tensor

    @classmethod
    def before_first(cls, limits: Sequence[int], *, beams: int, device: torch.device) -> "Beams":
        """Return the beams of sentences of which nothing is generated yet."""
        limit_B = torch.tensor(limits, device=device)
        none_B1, none_BJ = limit_B.new_zeros(len(limits), 1), limit_B.new_zeros(len(limits), beams)
        return cls(
            next_BJ=none_B1,
            score_BJ=none_B1.float(),
            tokens_BJT=none_B1[:, :, None],
            length_B=torch.zeros_like(limit_B),
            limit_B=limit_B,
            done_B=torch.zeros_like(limit_B, dtype=torch.bool),
            ended_score_BJ=none_BJ.double() - torch.inf,
            ended_tokens_BJT=none_BJ[:, :, None],
            ended_length_BJ=none_BJ,
        )

    def with_room(self, tokens: int) -> "Beams":
        """Return the same beams with room for so many tokens."""
        missing = tokens - self.tokens_BJT.shape[2]
        if missing <= 0:
            return self
        return self._replace(
            tokens_BJT=F.pad(self.tokens_BJT, (0, missing)),
            ended_tokens_BJT=F.pad(self.ended_tokens_BJT, (0, missing)),
        )

    def last_tokens(self, prompt_length: int) -> tuple[Tensor, Tensor]:
        """Return the last token of every beam and its position, (R,) each."""
        position_B1 = (self.length_B + (prompt_length - 1))[:, None]
        return self.next_BJ.flatten(), position_B1.expand_as(self.next_BJ).flatten()

    def select(self, rows: Sequence[int]) -> "Beams":
        """Return the beams of these sentences."""
        index = torch.tensor(rows, device=self.done_B.device)
        return Beams(*(part.index_select(0, index) for part in self))

    def ended(self, rows: Sequence[int], *, n_best: int) -> list[list[Translation]]:
        """Return the best ended hypotheses of these sentences."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.done_B.device)
        parts = self.ended_score_BJ, self.ended_length_BJ, self.ended_tokens_BJT
        on_host = [part.index_select(0, index)[:, :n_best].tolist() for part in parts]
        return [
            [
                Translation(tuple(tokens[:length]), score)
                for score, length, tokens in zip(*of_row, strict=True)
                if score > -torch.inf
            ]
            for of_row in zip(*on_host, strict=True)
        ]


class BeamStep:
    """Extend every beam by a token; without constraints, no step waits for a value of a tensor.

    Attributes:
        reads: whether values may be read where that saves operators, as on CPU.
        restrictions, constraints: of the sentences, which ``active`` numbers in every step.
    """

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
        prompt_length: int,
    ) -> None:
        self.pad_id, self.eos_id = model.spec.pad_id, eos_id
        self.rule, self.penalty = stopping_rule(config), config.length_penalty
        self.beams, self.n_best, self.prompt_length = config.beam_size, config.n_best, prompt_length
        lengths = torch.arange(1, model.spec.model.max_positions - prompt_length + 1)
        counted_length(self.rule, lengths, prompt_length=prompt_length, reads=True)
        self.reads = model.device.type == "cpu"
        self.restrictions = Restrictions.of(
            (source.prefix for source in sources), (source.banned for source in sources)
        )
        self.constraints = Constraints.of((source.required for source in sources), eos_id=eos_id)

    @property
    def is_free(self) -> bool:
        """Whether nothing is forced, banned or required."""
        return self.restrictions is None and self.constraints is None

    def __call__(
        self, beams: Beams, logits_RV: Tensor, active: Sequence[int] = ()
    ) -> tuple[Beams, Tensor]:
        """Return the extended beams, and the beam (B, J) that each of them extends."""
        length_B = beams.length_B + 1
        limited_B = self._if_any(length_B >= beams.limit_B)
        score_BC, beam_BC, token_BC = self._candidates(beams, logits_RV, limited_B, active)
        counted_B = counted_length(self.rule, length_B, prompt_length=self.prompt_length)
        divisor_B1 = counted_B.double().pow(self.penalty)[:, None]
        beams = self._collect(beams, score_BC, beam_BC, token_BC, limited_B, divisor_B1)
        running_BJ, choice_BJ = self._running(
            score_BC.masked_fill(token_BC == self.eos_id, -torch.inf)
        )
        beam_BJ, next_BJ = beam_BC.gather(1, choice_BJ), token_BC.gather(1, choice_BJ)
        extended = beams._replace(
            next_BJ=next_BJ,
            score_BJ=running_BJ,
            tokens_BJT=_appended(beams, beam_BJ, next_BJ),
            length_B=length_B,
            done_B=self._done(beams, running_BJ, limited_B, divisor_B1),
        )
        return extended, beam_BJ

    def _if_any(self, is_so: Tensor) -> Tensor | None:
        """Return the conditions, or None if it can be read that none is true."""
        return None if self.reads and not is_so.any() else is_so

    def _running(self, running_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the J candidates that go on: the best, or with phrases the first by turn."""
        if self.constraints is None:
            running_BJ, choice_BJ = running_BC.topk(self.beams, dim=1)
            return running_BJ, choice_BJ
        place_BC = (running_BC == -torch.inf).long().argsort(dim=1, stable=True)
        choice_BJ = place_BC[:, : self.beams]
        return running_BC.gather(1, choice_BJ), choice_BJ

    def _candidates(
        self, beams: Beams, logits_RV: Tensor, limited_B: Tensor | None, active: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, beams and tokens of each sentence's 2 · J best extensions, best first.

        With required phrases there are more, ordered by their turn to get a place.
        """
        batch, rows = beams.score_BJ.shape
        at_limit = [False] * batch if self.is_free or limited_B is None else limited_B.tolist()
        width, before_R = min(2 * self.beams, logits_RV.shape[1]), beams.score_BJ.view(-1)
        if self.is_free and finds_best_at_once(logits_RV, width):
            best_RC, token_RC, normalizer_R = fused_best_tokens(
                logits_RV, width, excluded=self.pad_id
            )
            before_R = before_R - normalizer_R
        else:
            # Normalized before anything is forbidden: no constraint changes a score.
            logits_RV = logits_RV.log_softmax(1, dtype=torch.float32)
            logits_RV[:, self.pad_id] = -torch.inf
            if not self.is_free:
                self._constrain(beams, logits_RV, at_limit, active)
            best_RC, token_RC = best_tokens(logits_RV, width)
        if self.rule.forces_end_at_limit and limited_B is not None:
            best_RC, token_RC = self._only_ends(best_RC, token_RC, logits_RV, limited_B)
        total_BX = (best_RC + before_R[:, None]).view(batch, -1)
        token_BX = token_RC.view(batch, -1)
        if (missing := self.beams - total_BX.shape[1]) > 0:
            # At the first token a small vocabulary has fewer candidates than there are beams.
            total_BX = F.pad(total_BX, (0, missing), value=-torch.inf)
            token_BX = F.pad(token_BX, (0, missing))
        # Twice the beams: even if J of them end, J are left to go on.
        score_BC, place_BC = total_BX.topk(min(2 * self.beams, total_BX.shape[1]), dim=1)
        beam_BC = place_BC // width
        if missing > 0:
            beam_BC.clamp_max_(rows - 1)
        token_BC = token_BX.gather(1, place_BC)
        if self.constraints is None:
            return score_BC, beam_BC, token_BC
        dealt = self.constraints.allocate(
            Candidates(score_BC, beam_BC, token_BC),
            logits_RV + before_R[:, None],
            _so_far(beams),
            active=active,
            is_last=[here and not self.rule.forces_end_at_limit for here in at_limit],
        )
        return self._at_least_beams(dealt)

    def _constrain(
        self, beams: Beams, logits_RV: Tensor, at_limit: Sequence[bool], active: Sequence[int]
    ) -> None:
        """Set the logits of tokens that the constraints forbid to -inf, in place."""
        so_far_BJT = _so_far(beams)
        if self.restrictions is not None:
            length = so_far_BJT.shape[2] + 1
            self.restrictions.apply(logits_RV, so_far_BJT, active=active, length=length)
        if self.constraints is not None:
            if self.rule.forces_end_at_limit:
                force_end(logits_RV, at_limit, eos_id=self.eos_id)
            self.constraints.bar_ends(logits_RV, so_far_BJT, active=active)

    def _only_ends(
        self, best_RC: Tensor, token_RC: Tensor, logits_RV: Tensor, limited_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Leave end-of-sentence as the only candidate where the length limit is reached."""
        rows, width = best_RC.shape
        is_forced_B11 = limited_B[:, None, None]
        end_RC = F.pad(logits_RV[:, self.eos_id, None], (0, width - 1), value=-torch.inf)
        best_BJC, end_BJC, token_BJC = (
            x_RC.view(len(limited_B), -1, width) for x_RC in (best_RC, end_RC, token_RC)
        )
        return (
            torch.where(is_forced_B11, end_BJC, best_BJC).view(rows, width),
            token_BJC.masked_fill(is_forced_B11, self.eos_id).view(rows, width),
        )

    def _at_least_beams(self, found: Candidates) -> tuple[Tensor, Tensor, Tensor]:
        """Fill up to J candidates with impossible ones."""
        missing = (0, max(self.beams - found.score_BC.shape[1], 0))
        score_BC = F.pad(found.score_BC, missing, value=-torch.inf)
        return score_BC, F.pad(found.beam_BC, missing), F.pad(found.token_BC, missing)

    def _collect(
        self,
        beams: Beams,
        score_BC: Tensor,
        beam_BC: Tensor,
        token_BC: Tensor,
        limited_B: Tensor | None,
        divisor_B1: Tensor,
    ) -> Beams:
        """Record the hypotheses that end here, out of the J best candidates.

        End-of-sentence ends a hypothesis, and so does the length limit if the rule forces no end.
        """
        # As in fairseq and transformers: an end below the J best would not have had a place.
        score_BJ, beam_BJ, token_BJ = (x[:, : self.beams] for x in (score_BC, beam_BC, token_BC))
        ends_BJ = token_BJ == self.eos_id
        if limited_B is not None and not self.rule.forces_end_at_limit:
            ends_BJ = ends_BJ | limited_B[:, None]
        if self._if_any(ends_BJ) is None:
            return beams
        ends_BJ = ends_BJ & (score_BJ > -torch.inf) & ~beams.done_B[:, None]
        new_BJ = torch.where(ends_BJ, score_BJ / divisor_B1, -torch.inf)
        score_BX = torch.cat([beams.ended_score_BJ, new_BJ], dim=1)
        length_BJ = beams.length_B[:, None] + (token_BJ != self.eos_id)
        length_BX = torch.cat([beams.ended_length_BJ, length_BJ], dim=1)
        tokens_BXT = torch.cat([beams.ended_tokens_BJT, _appended(beams, beam_BJ, token_BJ)], dim=1)
        # Stable: of equal scores, the hypothesis that ended first stays in front.
        sorted_BX, order_BX = score_BX.sort(dim=1, descending=True, stable=True)
        best_BJ = order_BX[:, : self.beams]
        return beams._replace(
            ended_score_BJ=sorted_BX[:, : self.beams],
            ended_length_BJ=length_BX.gather(1, best_BJ),
            ended_tokens_BJT=_of_rows(tokens_BXT, best_BJ),
        )

    def _done(
        self, beams: Beams, running_BJ: Tensor, limited_B: Tensor | None, divisor_B1: Tensor
    ) -> Tensor:
        done_B = beams.done_B if limited_B is None else beams.done_B | limited_B
        worst_B = beams.ended_score_BJ[:, -1]
        full_B = self._if_any(worst_B > -torch.inf)
        if full_B is None:
            return done_B
        running_B = (running_BJ.amax(1, keepdim=True) / divisor_B1)[:, 0]
        ends_B = self.rule.is_done(worst_ended=worst_B, best_running=running_B)
        if not isinstance(ends_B, bool) and (
            getattr(ends_B, "dtype", None) != torch.bool or ends_B.shape != worst_B.shape
        ):
            raise ConfigError(
                f"is_done of {type(self.rule).__name__} returned a {type(ends_B).__name__} that is "
                "neither True nor False nor a tensor of them, one per sentence. Correct it."
            )
        return done_B | (full_B & ends_B)

    def best(self, beams: Beams, rows: Sequence[int]) -> list[list[Translation]]:
        """Return the best hypotheses of sentences that are done.

        Raises:
            CheckpointError: no score is a number.
            ConfigError: no hypothesis has the required phrases.
        """
        found = beams.ended(rows, n_best=self.n_best) if rows else []
        if not all(found):
            raise not_numbers() if self.constraints is None else no_room_for_phrases()
        return found


def _so_far(beams: Beams) -> Tensor:
    """Return the tokens before the tokens of this step, of sentences that began together."""
    return beams.tokens_BJT[:, :, : int(beams.length_B[0])]


def _of_rows(x_BJT: Tensor, row_BX: Tensor) -> Tensor:
    """Return the given rows of every sentence, (B, X, T)."""
    return x_BJT.gather(1, row_BX[:, :, None].expand(-1, -1, x_BJT.shape[2]))


def _appended(beams: Beams, beam_BX: Tensor, token_BX: Tensor) -> Tensor:
    """Return the tokens of the given beams with one more each, (B, X, T)."""
    tokens_BXT = _of_rows(beams.tokens_BJT, beam_BX)
    place_BX1 = beams.length_B[:, None, None].expand(*token_BX.shape, 1)
    return tokens_BXT.scatter_(2, place_BX1, token_BX[:, :, None])


class Search:
    """Beam search: unfinished sentences in order, their caches and beams.

    :meth:`run` searches for the given sources only. Between two steps, others :meth:`join`, and
    :meth:`drop` removes some.

    Attributes:
        active: number of each unfinished sentence among all sentences of the search.
        longest: most tokens of a beam.
    """

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
    ) -> None:
        self.model = model
        self.states = DecoderStates(model, sources, route=config.route)
        self.prompt_length = self.states.prompt_length
        self.extend = BeamStep(
            model, sources, config, eos_id=eos_id, prompt_length=self.prompt_length
        )
        positions = model.spec.model.max_positions - self.prompt_length
        limits = [length_limit(source, config, positions=positions) for source in sources]
        self.beams = Beams.before_first(limits, beams=config.beam_size, device=model.device)
        self.active = [*range(len(sources))]
        self.sentences = len(sources)
        """Number of sentences, with those that are done."""
        self.longest = 0

    def run(self) -> list[list[Translation]]:
        """Search until all sentences are done; return the best hypotheses of each."""
        found: dict[int, list[Translation]] = {}
        while self.active:
            found |= self.step()
        return [found[index] for index in range(self.sentences)]

    def step(self) -> dict[int, list[Translation]]:
        """Extend the beams by a token; return the hypotheses of each sentence that is done now."""
        process.advance()
        beam_BJ = self.advance(self.model.project(self.feed()))
        # The host waits for the device here, at every step; GridSearch does at every eighth.
        is_done = self.beams.done_B.tolist()
        done = [row for row, ends in enumerate(is_done) if ends]
        best = self.extend.best(self.beams, done)
        found = {self.active[row]: of_row for row, of_row in zip(done, best, strict=True)}
        self._keep([row for row, ends in enumerate(is_done) if not ends], beam_BJ)
        return found

    def feed(self) -> Tensor:
        """Feed the prompt or the last token of every beam; return the decoder's states, (R, D)."""
        if not self.longest:
            return self.states.begin()
        return self.states.step(*self.beams.last_tokens(self.prompt_length))

    def advance(self, logits_RV: Tensor) -> Tensor:
        """Extend every beam by a token; return the beam (B, J) that each of them extends."""
        self.longest += 1
        self.beams, beam_BJ = self.extend(
            self.beams.with_room(capacity(self.longest)), logits_RV, self.active
        )
        return beam_BJ

    @property
    def can_be_joined(self) -> bool:
        """Whether sentences can join: constraints know only the sentences of their own batch."""
        return self.extend.is_free and self.states.can_join

    def join(self, other: "Search") -> int:
        """Take over the sentences of another search with the same model and settings.

        Both must have made a step and have unfinished sentences.

        Returns:
            Number to be added to the indices of the other's sentences.
        """
        shift = self.sentences
        self.active += [shift + index for index in other.active]
        self.sentences += other.sentences
        self.longest = max(self.longest, other.longest)
        room = capacity(self.longest)
        pairs = zip(self.beams.with_room(room), other.beams.with_room(room), strict=True)
        self.beams = Beams(*map(torch.cat, pairs))
        self.states.join(other.states)
        return shift

    def drop(self, indices: Container[int]) -> None:
        """End the search for these sentences without a result; the search must have made a step."""
        keep = [row for row, index in enumerate(self.active) if index not in indices]
        own_J = torch.arange(self.beams.next_BJ.shape[1], device=self.model.device)
        self._keep(keep, own_J.expand_as(self.beams.next_BJ))

    def _keep(self, rows: Sequence[int], beam_BJ: Tensor) -> None:
        """Keep only these sentences, of which every row continues the past of ``beam_BJ``."""
        is_shorter = len(rows) < len(self.active)
        self.active = [self.active[row] for row in rows]
        if not rows:
            return
        keep_B = torch.tensor(rows, device=beam_BJ.device)
        # The caches follow the beams even if no sentence leaves.
        self.states.keep(keep_B, beam_BJ[keep_B] if is_shorter else beam_BJ)
        if is_shorter:
            self.beams = self.beams.select(rows)
