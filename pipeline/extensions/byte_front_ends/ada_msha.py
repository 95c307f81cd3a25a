"""Ada-MSHA: a router chooses the scales that each head of each token mixes (MoCE, §3.2, §3.3).

Queries, keys and values of all heads share one pool of experts, the scales δ = 0 … Δ, and one
router. There is no balance loss.

Legend: N real tokens, P positions with gaps, D model width, H heads, K head width, S scales
(Δ + 1), C choices per vector (top-k).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.extensions.byte_front_ends import AdaMshaConfig
from pipeline.extensions.byte_front_ends.contextualization import (
    Contextualization,
    LocalConvolution,
    heads_of,
    projected_of,
)
from pipeline.kernels.convolutions import Convolution, mix_scales
from pipeline.model.attention import Attention, Projected
from pipeline.model.front_end import Source
from pipeline.model.spec import ModelSpec


class ScaleRouter(nn.Module):
    """Router without bias: logits = W [x | lid], with one W for queries, keys and values."""

    def __init__(self, *, inputs: int, scales: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, scales, inputs))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return U(±1/sqrt(inputs)), as PyTorch's linear layers start."""
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x_N3HK: Tensor, lid_NHK: Tensor | None) -> Tensor:
        """Return logits (N, 3, H, S) in float32; ``lid_NHK`` is appended to a token's vectors."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        x_N3HI = x_N3HK
        if lid_NHK is not None:
            x_N3HI = torch.cat([x_N3HK, lid_NHK[:, None].expand_as(x_N3HK)], dim=-1)
        return F.linear(x_N3HI.to(dtype), self.weight.to(dtype).squeeze(0))


class AdaMsha(Contextualization):
    """The Ada-MSHA front end.

    Experts are named by their scale, ``experts.1`` to ``experts.Δ``. Scale 0 is the vector itself
    and has no weights.
    """

    def __init__(self, config: AdaMshaConfig, spec: ModelSpec) -> None:
        super().__init__(config.layer)
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
        )
        if config.language_vector and spec.language_token_ids is None:
            raise ConfigError(
                "model.front.language_vector is true, but the model's spec has no ids of language "
                "tokens. Initialize the model again from its recipe and tokenizer."
            )
        self._spec_token_ids = spec.language_token_ids or ()
        self.language_token_L: Tensor
        self.register_buffer("language_token_L", torch.empty(0), persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the ids of language tokens on a device."""
        self.language_token_L = torch.tensor(self._spec_token_ids, device="cpu").to(device)

    @property
    def sees_language(self) -> bool:
        """Return whether the router sees a vector of the source language."""
        return self.config.language_vector

    def show_as(self, language: int | None) -> None:
        """Make the router see the vector of this language; None restores the source's."""
        self.reset_buffers(self.language_token_L.device)
        if language is not None:
            self.language_token_L.fill_(self._spec_token_ids[language])

    def route(self, source: Source, states_N3HK: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and weights of the heads of queries, keys and values, (N, 3, H, C)."""
        return choose_scales(self.router(states_N3HK, self._lid(source)), self.config)

    def contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        """Return queries, keys and values with the scales that the router chooses."""
        scales_first = self.config.reading == "code"
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
        """Return the unscaled embedding of each token's source language, split into heads."""
        if not self.config.language_vector:
            return None
        ids_N = self.language_token_L.index_select(0, source.tokens.source_language_N)
        lid_ND = source.embedding.rows(ids_N)  # its gradient has a fixed order, on GPUs, too
        lid_NHK: Tensor = lid_ND.unflatten(1, (self._heads, -1))
        return lid_NHK


def choose_scales(logits: Tensor, config: AdaMshaConfig) -> tuple[Tensor, Tensor]:
    """Return the top-k scales of the last dimension, and their weights.

    Several weights sum to 1. The weight of a single scale is 1 with a gradient to its logit
    (straight-through), or the logit itself, as in MoCE's code.
    """
    if config.reading == "equations":
        logits = F.softmax(logits, dim=-1)
    best, scale = logits.topk(config.top_k, dim=-1)
    if config.top_k > 1:
        return scale, F.softmax(best, dim=-1)
    if config.reading == "code":
        return scale, best
    return scale, 1 + best - best.detach()
