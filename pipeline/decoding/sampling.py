"""Hypotheses drawn at random from the model's distribution, position by position.

One uniform number decides each token: where it falls in the cumulated probabilities, in the order
of the vocabulary. The numbers follow from the seed, the sentence and the number of the sample, so
that neither batch nor world matter (up to floating-point rounding).

Scores are those of beam search: the model's own log-probabilities, whatever the temperature.

Legend: B unfinished sentences, J samples of each, R = B · J rows, V vocabulary, T tokens.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoding.cached_keys import DecoderStates
from pipeline.decoding.hypotheses import (
    Restrictions,
    Source,
    Translation,
    length_limit,
    not_numbers,
    stopping_rule,
)
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator


@torch.inference_mode()
def sample(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[list[Translation]]:
    """``n_best`` samples of every source, in the order drawn; the prompts must have one length."""
    model.eval()
    return Sampler(model, sources, config, eos_id=eos_id).run()


class Sampler:
    """The state of one batch: unfinished sentences in order, their samples so far."""

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
    ) -> None:
        self.model, self.config, self.eos_id = model, config, eos_id
        self.rule = stopping_rule(config)
        self.samples = config.n_best
        specials = frozenset((model.spec.pad_id, eos_id))
        self.restrictions = Restrictions.of(sources, specials=specials)
        self.states = DecoderStates(model, sources, route=config.route)
        positions = model.spec.model.max_positions - self.states.prompt_length
        self.limits = [length_limit(source, config, positions=positions) for source in sources]
        self.active = list(range(len(sources)))
        self.found: list[dict[int, Translation]] = [{} for _ in sources]
        """Of each sentence, the samples that have ended, by number."""
        self.uniform_BJT = self._numbers(sources).to(model.device)
        grid = (len(sources), self.samples)
        self.tokens_BJT = torch.empty(*grid, 0, dtype=torch.int64, device=model.device)
        self.total_BJ = torch.zeros(grid, device=model.device)

    def _numbers(self, sources: Sequence[Source]) -> Tensor:
        """A number from 0 to 1 for every token that may come."""
        uniform_BJT = torch.zeros(
            len(sources), self.samples, max(self.limits), dtype=torch.float64, device="cpu"
        )
        for row, (source, limit) in enumerate(zip(sources, self.limits, strict=True)):
            for number in range(self.samples):
                name = map(str, ("sample", self.config.seed, number, *source.prompt))
                generator = named_generator(*name, "", *map(int, source.tokens))
                uniform_BJT[row, number, :limit] = torch.rand(
                    limit, generator=generator, dtype=torch.float64
                )
        return uniform_BJT

    def run(self) -> list[list[Translation]]:
        x_BD = self.states.begin()
        every_B = torch.arange(len(self.active), device=x_BD.device)
        self.states.keep(every_B, torch.zeros_like(every_B)[:, None].expand(-1, self.samples))
        x_RD = x_BD.repeat_interleave(self.samples, dim=0)
        for length in range(1, max(self.limits) + 1):
            next_R = self.advance(self.model.project(x_RD), length)
            if next_R is None:
                break
            x_RD = self.states.step(next_R, self.states.prompt_length + length - 1)
        return [[found[number] for number in range(self.samples)] for found in self.found]

    def advance(self, logits_RV: Tensor, length: int) -> Tensor | None:
        """Draw every sample's next token (the ``length``-th); None when all have ended."""
        log_p_RV = F.log_softmax(logits_RV, dim=1, dtype=torch.float32)
        self._restrict(log_p_RV, length)
        token_R = draw(log_p_RV, self.uniform_BJT[:, :, length - 1].flatten(), self.config)
        log_p_BJ = log_p_RV.gather(1, token_R[:, None]).view(self.total_BJ.shape)
        self.total_BJ = self.total_BJ + log_p_BJ
        token_BJ = token_R.view(self.total_BJ.shape)
        self.tokens_BJT = torch.cat([self.tokens_BJT, token_BJ[:, :, None]], dim=2)
        self._collect(token_BJ, length)
        keep = [
            row for row, index in enumerate(self.active) if len(self.found[index]) < self.samples
        ]
        if not keep:
            return None
        if len(keep) < len(self.active):
            self._keep(keep)
        return self.tokens_BJT[:, :, -1].flatten()

    def _restrict(self, log_p_RV: Tensor, length: int) -> None:
        log_p_RV[:, self.model.spec.pad_id] = -torch.inf
        if self.restrictions is not None:
            self.restrictions.apply(log_p_RV, self.tokens_BJT, active=self.active, length=length)
        at_limit = [length >= self.limits[index] for index in self.active]
        if any(at_limit) and self.rule.forces_end_at_limit:
            rows = torch.tensor(at_limit, device=log_p_RV.device).repeat_interleave(self.samples)
            others = torch.arange(log_p_RV.shape[1], device=log_p_RV.device) != self.eos_id
            log_p_RV.masked_fill_(rows[:, None] & others, -torch.inf)

    def _collect(self, token_BJ: Tensor, length: int) -> None:
        """Record the samples that end here; what their rows draw from now on is not looked at."""
        at_limit = [length >= self.limits[index] for index in self.active]
        ends_BJ = (token_BJ == self.eos_id) | torch.tensor(at_limit, device=token_BJ.device)[
            :, None
        ]
        counted = self.rule.counted_length(length, prompt_length=self.states.prompt_length)
        for row, number in ends_BJ.nonzero().tolist():
            found = self.found[self.active[row]]
            if number in found:
                continue
            total = float(self.total_BJ[row, number])
            if not math.isfinite(total):
                raise not_numbers()
            tokens = tuple(self.tokens_BJT[row, number].tolist())
            ended = tokens[:-1] if tokens[-1] == self.eos_id else tokens
            found[number] = Translation(ended, total / counted**self.config.length_penalty)

    def _keep(self, keep: list[int]) -> None:
        """Sentences whose samples have all ended leave."""
        keep_B = torch.tensor(keep, device=self.total_BJ.device)
        own_row_J = torch.arange(self.samples, device=keep_B.device)  # samples never move
        self.states.keep(keep_B, own_row_J.expand(len(keep), -1))
        self.active = [self.active[row] for row in keep]
        self.uniform_BJT = self.uniform_BJT[keep_B]
        self.tokens_BJT = self.tokens_BJT[keep_B]
        self.total_BJ = self.total_BJ[keep_B]


def draw(log_p_RV: Tensor, uniform_R: Tensor, config: DecodingConfig) -> Tensor:
    """One token per row: the first at which the cumulated probability exceeds the row's number."""
    cumulated_RV = probabilities(log_p_RV, config).cumsum(1)
    place_R1 = uniform_R[:, None] * cumulated_RV[:, -1:]
    token_R1 = torch.searchsorted(cumulated_RV, place_R1, right=True)
    return token_R1[:, 0].clamp(max=log_p_RV.shape[1] - 1)


def probabilities(log_p_RV: Tensor, config: DecodingConfig) -> Tensor:
    """What is drawn from, up to a factor per row, in float64: p^(1/T), then top k, then top p."""
    is_out_RV = log_p_RV == -torch.inf
    below_best_RV = log_p_RV.double() - log_p_RV.double().amax(1, keepdim=True)
    tempered_RV = (below_best_RV / config.sampling_temperature).masked_fill(is_out_RV, -torch.inf)
    p_RV = tempered_RV.softmax(1)
    if 0 < config.top_k < p_RV.shape[1]:
        best_RC, token_RC = p_RV.topk(config.top_k, dim=1)
        p_RV = torch.zeros_like(p_RV).scatter(1, token_RC, best_RC)
    if config.top_p < 1:
        sorted_RV, token_RV = p_RV.sort(dim=1, descending=True, stable=True)
        before_RV = sorted_RV.cumsum(1) - sorted_RV
        is_out_RV = before_RV >= config.top_p * sorted_RV.sum(1, keepdim=True)
        p_RV = p_RV.scatter(1, token_RV, sorted_RV.masked_fill(is_out_RV, 0.0))
    return p_RV
