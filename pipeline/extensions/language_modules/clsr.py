"""Conditional language-specific routing (CLSR; Zhang et al., 2021).

Replace the result y of a sublayer by g · y W_lang + (1 - g) · y W_shared. As in the authors' code
(``models/transformer_multilingual_clsr.py``), W_lang is of the target language and one table
serves all sublayers of a side, while W_shared is a linear layer of each sublayer and, in attention,
takes the place of the output projection. Without W_shared the second term is (1 - g) · y.

A small network decides the gate g of every token by the input x of the sublayer: in training
sigmoid(logit + α n), n ~ N(0, 1), where α grows from 0; otherwise 1 where the logit is at least 0,
else 0. The loss holds the mean of the gates to a budget.

Legend: N tokens, D model width, G gate width, S slots.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.kernels.products import Linear, SentenceSlots, row_products
from pipeline.model.tokens import Tokens

FLOAT32 = 4
"""Bytes of a gate."""


class Projections(LanguageStack):
    """W_lang of every language, (S, D, D): rows are outputs."""

    def __init__(
        self,
        languages: tuple[str, ...],
        *,
        width: int,
        kept: tuple[str, ...] | None,
        starts_as_identity: bool,
    ) -> None:
        super().__init__(languages, kept=kept)
        self.starts_as_identity = starts_as_identity
        self.weight = nn.Parameter(torch.empty(len(self.slots), width, width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return the initial W_lang: the identity, or the uniform values of the authors' code.

        Their table is one (languages × D²) matrix, whose Xavier bound is sqrt(6 / (languages + D²))
        and so about sqrt(D / 2) times smaller than that of a D × D matrix.
        """
        del name
        if self.starts_as_identity:
            return torch.eye(shape[-1]).expand(shape)
        bound = math.sqrt(6.0 / (len(self.slots) + shape[-1] * shape[-2]))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, y_ND: Tensor, tokens: Tokens) -> Tensor:
        """Return y W_lang."""
        return row_products(y_ND, self.weight, self._slots(tokens))

    def _slots(self, tokens: Tokens) -> SentenceSlots:
        key = ("clsr", self.slots)
        found = tokens.kept_slots.get(key)
        if found is None:
            language_B = tokens.target_language_B
            found = tokens.kept_slots[key] = self.sentence_slots(language_B, language_B, tokens)
        return found


class XavierLinear(Linear):
    """A linear layer that starts Xavier-uniform, as all of the authors' do."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return U(±sqrt(6 / (inputs + outputs))) for weights, 0 for biases."""
        if name == "bias":
            return torch.zeros(shape)
        bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class Gate(nn.Module):
    """Two layers, Linear(D → G), ReLU, Linear(G → 1), and noise."""

    def __init__(self, *, width: int, gate_width: int, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.up = XavierLinear(width, gate_width)
        self.down = XavierLinear(gate_width, 1)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor:
        """(N,), between 0 and 1 in training, 0 or 1 without."""
        logit_N: Tensor = self.down(F.relu(self.up(x_ND)))[:, 0].float()
        if not self.training:
            return (logit_N >= 0).float()
        noise_N = torch.randn_like(logit_N)
        return torch.sigmoid(logit_N + self.noise * tokens.progress * noise_N)


class ConditionalRouting(nn.Module):
    """The gate and the projections that follow one sublayer.

    Args:
        gate: decides between them.
        projections: W_lang; may be the table of all sublayers of a side, which the side then owns.
        owns_projections: whether they are of this sublayer alone.
        shared: W_shared; None: the result of the sublayer passes unchanged where the gate is 0.
    """

    def __init__(
        self,
        gate: Gate,
        projections: Projections,
        *,
        owns_projections: bool,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.gate = gate
        if owns_projections:
            self.projections = projections
        self._projections = (projections,)  # a tuple, so that a table has one owner
        self.shared = shared

    def forward(self, x_ND: Tensor, y_ND: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the routed result and the gates (N,).

        Args:
            x_ND: the input of the sublayer.
            y_ND: its result so far.
            tokens: whose rows these are.
        """
        gate_N = self.gate(x_ND, tokens)
        specific_ND = self._projections[0](y_ND, tokens)
        shared_ND = y_ND if self.shared is None else self.shared(y_ND)
        return torch.lerp(shared_ND, specific_ND, gate_N[:, None].to(y_ND.dtype)), gate_N

    def kept_bytes(self, *, tokens: int, width: int, value: int) -> int:
        """Return (3 e D + e G + 5 · 4) N: the sublayer's result, both projections, and the gate.

        It is 2 e D without W_shared, where the result itself is one of the two.
        """
        kept = 2 if self.shared is None else 3
        return tokens * (value * (kept * width + self.gate.up.out_features) + 5 * FLOAT32)
