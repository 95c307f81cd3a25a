"""Conditional language-specific routing (CLSR; Zhang et al., 2021).

CLSR replaces the result y of a sublayer by g · y W_lang + (1 - g) · y W_shared. As in the authors'
code (``models/transformer_multilingual_clsr.py``), W_lang belongs to the target language and all
sublayers of a side share one table, while each sublayer has its own W_shared, which replaces the
output projection in attention. Without W_shared, the second term is (1 - g) · y.

A small network computes the gate g of every token from the input x of the sublayer. In training, g
is sigmoid(logit + α n) with n ~ N(0, 1), where α grows from 0; otherwise g is 1 if the logit is at
least 0, else 0. A loss keeps the mean of the gates close to a budget.

Legend: N tokens, D model width, G gate width, S slots.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.kernels.noise import normal
from pipeline.kernels.products import Linear
from pipeline.kernels.slot_products import row_products
from pipeline.model.tokens import Tokens

NOISE = 5.0
"""Standard deviation of the noise on gate logits at the end of training. It grows from 0."""

FLOAT32 = 4
"""Bytes of a gate, which is computed in float32."""


class Projections(LanguageStack):
    """Projections W_lang of all languages, (S, D, D), with outputs in rows."""

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

        The authors' table is one (languages × D²) matrix. Its Xavier bound is
        sqrt(6 / (languages + D²)), about sqrt(D / 2) times smaller than for a D × D matrix.
        """
        del name
        if self.starts_as_identity:
            return torch.eye(shape[-1]).expand(shape)
        bound = math.sqrt(6.0 / (len(self.slots) + shape[-1] * shape[-2]))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, y_ND: Tensor, tokens: Tokens) -> Tensor:
        """Return y W_lang, with the matrix of each row's target language."""
        slots = self.sentence_slots("clsr", ("target", "target"), tokens)
        return row_products(y_ND, self.weight, slots)


class XavierLinear(Linear):
    """Linear layer with Xavier-uniform initial weights, as in the authors' code."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return U(±sqrt(6 / (inputs + outputs))) for weights, 0 for biases."""
        if name == "bias":
            return torch.zeros(shape)
        bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class Gate(nn.Module):
    """Gate network: Linear(D → G), ReLU, Linear(G → 1), with noise in training."""

    def __init__(self, *, width: int, gate_width: int) -> None:
        super().__init__()
        self.site = 0
        self.up = XavierLinear(width, gate_width)
        self.down = XavierLinear(gate_width, 1)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor:
        """Return the gates (N,): between 0 and 1 in training, else 0 or 1."""
        logit_N: Tensor = self.down(F.relu(self.up(x_ND)))[:, 0].float()
        if not self.training:
            return (logit_N >= 0).float()
        strength = NOISE * tokens.progress
        if strength:
            assert tokens.noise is not None, "training with noise needs keys of random numbers"
            logit_N = logit_N + strength * normal(tokens.noise, self.site, columns=1)[:, 0]
        return torch.sigmoid(logit_N)


class ConditionalRouting(nn.Module):
    """Gate and projections after one sublayer.

    Args:
        gate: network that computes the gates.
        projections: W_lang of this sublayer, or the table that all sublayers of a side share.
        owns_projections: whether ``projections`` belongs to this sublayer; else the side owns it.
        shared: W_shared; None: the result of the sublayer is unchanged where the gate is 0.
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
        self._projections = (projections,)  # a tuple hides the table from nn.Module: one owner
        self.shared = shared

    def forward(self, x_ND: Tensor, y_ND: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the routed result and the gates (N,).

        Args:
            x_ND: the input of the sublayer.
            y_ND: its result so far.
            tokens: metadata of the rows.
        """
        gate_N = self.gate(x_ND, tokens)
        specific_ND = self._projections[0](y_ND, tokens)
        shared_ND = y_ND if self.shared is None else self.shared(y_ND)
        return torch.lerp(shared_ND, specific_ND, gate_N[:, None].to(y_ND.dtype)), gate_N

    def kept_bytes(self, *, tokens: int, width: int, value: int) -> int:
        """Return (3 e D + e G + 5 · 4) N, where e is ``value``, the bytes of a number.

        The terms are the sublayer's result and both projections, the hidden layer of the gate, and
        float32 values of the gate. Without W_shared, the first is 2 e D: the result is one of the
        two terms.
        """
        kept = 2 if self.shared is None else 3
        return tokens * (value * (kept * width + self.gate.up.out_features) + 5 * FLOAT32)
