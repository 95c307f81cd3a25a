"""Ada-MSHA: every head of every token mixes the scales that a router chooses (MoCE, §3.2, §3.3).

One pool of experts, the scales δ = 0 … Δ, and one router are shared by queries, keys and values and
by all heads. There is no balance loss.

Legend: N real tokens, P positions with gaps, D model width, H heads, K head width, Q routers (1, or
one each for queries, keys and values), S scales (Δ + 1), C choices per vector (top-k).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.extensions.byte_front_ends.local import LocalConvolution, heads_of, projected_of
from pipeline.extensions.byte_front_ends.settings import AdaMshaConfig
from pipeline.kernels.convolutions import Convolution, mix_scales
from pipeline.model.attention import Attention, Projected
from pipeline.model.front_end import Passage, Source
from pipeline.model.spec import ModelSpec


class ScaleRouter(nn.Module):
    """logits = W [x | lid], without a bias; one matrix for all, or one for each of q, k, v."""

    def __init__(self, *, inputs: int, scales: int, routers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(routers, scales, inputs))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """U(±1/sqrt(inputs)), as PyTorch's linear layers."""
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_N3HK: Tensor, lid_NHK: Tensor | None) -> Tensor:
        """Logits, (N, 3, H, S), in float32; ``lid_NHK`` stands behind every vector of a token."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        x_N3HI = x_N3HK
        if lid_NHK is not None:
            x_N3HI = torch.cat([x_N3HK, lid_NHK[:, None].expand_as(x_N3HK)], dim=-1)
        weight_QSI, x_N3HI = self.weight.to(dtype), x_N3HI.to(dtype)
        if len(weight_QSI) == 1:
            return F.linear(x_N3HI, weight_QSI.squeeze(0))
        return torch.einsum("nqhi,qsi->nqhs", x_N3HI, weight_QSI)


class AdaMsha(nn.Module):
    """Experts are named by their scale, ``experts.1`` to ``experts.Δ``; δ = 0 has no weights."""

    def __init__(self, config: AdaMshaConfig, spec: ModelSpec) -> None:
        super().__init__()
        self.config = config
        self._heads = spec.model.num_heads
        width = spec.model.width // self._heads
        self.experts = nn.ModuleDict(
            {
                str(scale): LocalConvolution(width, kernel=2 * scale - 1)
                for scale in range(1, config.max_scale + 1)
            }
        )
        self.router = ScaleRouter(
            inputs=2 * width if config.language_vector else width,
            scales=config.max_scale + 1,
            routers=3 if config.separate_routers else 1,
        )
        if config.language_vector and spec.language_token_ids is None:
            raise ConfigError(
                "model.front.language_vector wants the ids of the languages' tokens, and the "
                "model's description has none: make it anew from its recipe and tokenizer."
            )
        self._spec_token_ids = spec.language_token_ids or ()
        self.language_token_L: Tensor
        self.register_buffer("language_token_L", torch.empty(0), persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        self.language_token_L = torch.tensor(self._spec_token_ids, device="cpu").to(device)

    @property
    def sees_language(self) -> bool:
        """Whether the router sees a vector of the source language."""
        return self.config.language_vector

    def show_as(self, language: int | None) -> None:
        """From now on the router sees the vector of this language whatever the source's is; None:
        of the source's.
        """
        self.reset_buffers(self.language_token_L.device)
        if language is not None:
            self.language_token_L.fill_(self._spec_token_ids[language])

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        x_ND = passage.through(x_ND, self.config.layer)
        x_ND = passage.through(x_ND, 1, contextualizer=partial(self._contextualize, source))
        return passage.through(x_ND)

    def route(self, source: Source, states_N3HK: Tensor) -> tuple[Tensor, Tensor]:
        """Of the heads of queries, keys and values: their scales and weights."""
        return choose_scales(self.router(states_N3HK, self._lid(source)), self.config)

    def _contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        scales_first = self.config.scaled == "before"
        projected = attention.project(x_ND, source.tokens)
        states_N3HK = heads_of(projected, attention, scales_first=scales_first)
        scale_N3HC, weight_N3HC = self.route(source, states_N3HK)
        mixed_N3HK = mix_scales(
            states_N3HK,
            scale_N3HC,
            weight_N3HC,
            source.gaps(self.config.max_scale - 1),
            self._convolutions(),
        )
        return projected_of(mixed_N3HK, attention, scales_first=scales_first)

    def _convolutions(self) -> list[Convolution]:
        found = []
        for expert in self.experts.values():
            assert isinstance(expert, LocalConvolution)
            found.append(Convolution(expert.weight, expert.bias))
        return found

    def _lid(self, source: Source) -> Tensor | None:
        """The embedding of each token's source language, unscaled, cut into heads."""
        if not self.config.language_vector:
            return None
        tokens = source.tokens
        ids_B = self.language_token_L.index_select(0, tokens.source_language_B)
        lid_ND = source.embedding.rows(ids_B).index_select(0, tokens.sentence_N)
        lid_NHK: Tensor = lid_ND.unflatten(1, (self._heads, -1))
        return lid_NHK


def choose_scales(logits: Tensor, config: AdaMshaConfig) -> tuple[Tensor, Tensor]:
    """The top-k of the last dimension and their weights, which sum to 1."""
    if config.weights == "probabilities":
        logits = F.softmax(logits, dim=-1)
    best, scale = logits.topk(config.top_k, dim=-1)
    if config.top_k > 1:
        return scale, F.softmax(best, dim=-1)
    if config.single_weight == "logit":
        return scale, best
    return scale, 1 + best - best.detach()
