"""Conditional language-specific routing (CLSR; Zhang et al., 2021).

What follows a sublayer is g · y W_lang + (1 - g) · y W_shared.

y is what a sublayer makes of x, the language is the target's, and the gate g is decided for every
token by x: sigmoid(logit + α n), n ~ N(0, 1), in training, where α grows from 0; without it, 1
where the logit is positive, else 0. The loss holds the mean of the gates to a budget.

Legend: N tokens, D model width, G gate width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.low_rank_products import SentenceSlots
from pipeline.kernels.products import Linear
from pipeline.kernels.row_products import row_products
from pipeline.model.language_modules.stack import LanguageStack
from pipeline.model.tokens import Tokens


class Projections(LanguageStack):
    """W of every language and, behind them, of all, (S, D, D): rows are outputs."""

    def __init__(
        self,
        languages: tuple[str, ...],
        *,
        width: int,
        kept: tuple[str, ...] | None,
        starts_as_identity: bool,
    ) -> None:
        super().__init__(languages, kept=kept, has_shared=True)
        self.starts_as_identity = starts_as_identity
        self.weight = nn.Parameter(torch.empty(len(self.slots), width, width))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Of one language: the identity, or Xavier-uniform."""
        del name
        if self.starts_as_identity:
            return torch.eye(shape[-1]).expand(shape)
        bound = (3.0 / shape[-1]) ** 0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(self, y_ND: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """y W_lang and y W_shared."""
        specific_ND = row_products(y_ND, self.weight, self._slots(tokens))
        return specific_ND, F.linear(y_ND, self.weight[-1])

    def _slots(self, tokens: Tokens) -> SentenceSlots:
        key = ("clsr", self.slots)
        found = tokens.kept_slots.get(key)
        if found is None:
            language_B = tokens.target_language_B
            found = tokens.kept_slots[key] = self.sentence_slots(language_B, language_B, tokens)
        return found


class Gate(nn.Module):
    """Two layers, Linear(D → G), ReLU, Linear(G → 1), and noise."""

    def __init__(self, *, width: int, gate_width: int, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.up = Linear(width, gate_width)
        self.down = Linear(gate_width, 1)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor:
        """(N,), between 0 and 1 in training, 0 or 1 without."""
        logit_N: Tensor = self.down(F.relu(self.up(x_ND)))[:, 0].float()
        if not self.training:
            return (logit_N > 0).float()
        noise_N = torch.randn_like(logit_N)
        return torch.sigmoid(logit_N + self.noise * tokens.progress * noise_N)


class ConditionalRouting(nn.Module):
    """What follows one sublayer.

    ``projections`` may be the table of all sublayers of a side, which then belongs to the side.
    """

    def __init__(self, gate: Gate, projections: Projections, *, owns_projections: bool) -> None:
        super().__init__()
        self.gate = gate
        if owns_projections:
            self.projections = projections
        self._projections = (projections,)  # a tuple, so that a table has one owner

    def forward(self, x_ND: Tensor, y_ND: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The sublayer's result, from its input x and its result so far, and the gates (N,)."""
        gate_N = self.gate(x_ND, tokens)
        specific_ND, shared_ND = self._projections[0](y_ND, tokens)
        return torch.lerp(shared_ND, specific_ND, gate_N[:, None].to(y_ND.dtype)), gate_N
