"""Sampling: draw hypotheses token by token from the model's distribution.

One uniform number chooses each token by its place in the cumulated probabilities, in the order of
the vocabulary. The seed, the sentence and the number of the sample determine these numbers, so that
neither the batch nor the number of ranks changes a sample (up to floating-point rounding).

As in beam search, scores are the model's own log-probabilities; the temperature does not change
them.

Legend: B unfinished sentences, J samples of each, R = B · J rows, V vocabulary, T tokens.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoding.cached_keys import DecoderStates
from pipeline.decoding.constraints import Restrictions, force_end
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
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator


@torch.inference_mode()
def sample(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[list[Translation]]:
    """Draw ``n_best`` samples of every source; the prompts must have one length.

    Returns:
        The samples of each source, in the order drawn.
    """
    model.eval()
    return Sampler(model, sources, config, eos_id=eos_id).run()


class Sampler:
    """Sampling of one batch: unfinished sentences in order and their samples so far."""

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
        self.restrictions = Restrictions.of(
            (source.prefix for source in sources), (source.banned for source in sources)
        )
        self.states = DecoderStates(model, sources, route=config.route)
        positions = model.spec.model.max_positions - self.states.prompt_length
        self.limits = [length_limit(source, config, positions=positions) for source in sources]
        self.active = list(range(len(sources)))
        self.found: list[dict[int, Translation]] = [{} for _ in sources]
        """Ended samples of each sentence, by number."""
        self.uniform_BJT = self._numbers(sources).to(model.device)
        grid = (len(sources), self.samples)
        self.tokens_BJT = torch.empty(*grid, 0, dtype=torch.int64, device=model.device)
        self.total_BJ = torch.zeros(grid, device=model.device)

    def _numbers(self, sources: Sequence[Source]) -> Tensor:
        """Draw a number from 0 to 1 for every possible token, (B, J, most tokens)."""
        # Drawn on the CPU: generators of other devices have other numbers.
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
        """Draw until all samples have ended; return the samples of each sentence."""
        x_BD = self.states.begin()
        every_B = torch.arange(len(self.active), device=x_BD.device)
        self.states.keep(every_B, torch.zeros_like(every_B)[:, None].expand(-1, self.samples))
        x_RD = x_BD.repeat_interleave(self.samples, dim=0)
        for length in range(1, max(self.limits) + 1):
            process.advance()
            next_R = self.advance(self.model.project(x_RD), length)
            if next_R is None:
                break
            x_RD = self.states.step(next_R, self.states.prompt_length + length - 1)
        return [[found[number] for number in range(self.samples)] for found in self.found]

    def advance(self, logits_RV: Tensor, length: int) -> Tensor | None:
        """Draw every sample's ``length``-th token; return these, or None when all have ended."""
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
        if self.rule.forces_end_at_limit:
            force_end(log_p_RV, self._at_limit(length), eos_id=self.eos_id)

    def _at_limit(self, length: int) -> list[bool]:
        return [length >= self.limits[index] for index in self.active]

    def _collect(self, token_BJ: Tensor, length: int) -> None:
        """Record the samples that end here; tokens that their rows draw later are ignored."""
        at_limit_B = torch.tensor(self._at_limit(length), device=token_BJ.device)
        ends_BJ = (token_BJ == self.eos_id) | at_limit_B[:, None]
        counted = counted_length(self.rule, length, prompt_length=self.states.prompt_length)
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
        """Keep only these rows of sentences: all samples of the others have ended."""
        keep_B = torch.tensor(keep, device=self.total_BJ.device)
        own_row_J = torch.arange(self.samples, device=keep_B.device)  # samples never move
        self.states.keep(keep_B, own_row_J.expand(len(keep), -1))
        self.active = [self.active[row] for row in keep]
        self.uniform_BJT = self.uniform_BJT[keep_B]
        self.tokens_BJT = self.tokens_BJT[keep_B]
        self.total_BJ = self.total_BJ[keep_B]


def draw(log_p_RV: Tensor, uniform_R: Tensor, config: DecodingConfig) -> Tensor:
    """Return one token per row: the first whose cumulated probability exceeds the row's number."""
    cumulated_RV = probabilities(log_p_RV, config).cumsum(1)
    # A share of the sum that came out, which is not 1 after top k, top p and rounding.
    place_R1 = uniform_R[:, None] * cumulated_RV[:, -1:]
    token_R1 = torch.searchsorted(cumulated_RV, place_R1, right=True)
    return token_R1[:, 0].clamp(max=log_p_RV.shape[1] - 1)


def probabilities(log_p_RV: Tensor, config: DecodingConfig) -> Tensor:
    """Apply temperature, then top k, then top p to log-probabilities.

    Returns:
        float64 weights to draw from; each row is a distribution up to a factor.
    """
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
