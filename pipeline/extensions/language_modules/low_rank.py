"""Language-specific matrix synthesis (LMS): W + V_a F_b, of rank d, per language (paper, eq. 1).

Pair-wise, a is the source language and b the target language; language-wise both are one language.
V starts as N(0, 0.01²) and F as zeros, so that the layer starts as the plain one. The low rank
comes first, V (F x): no matrix is ever formed. Batches may mix languages.

The shared slot is that of fuse distillation; a layer with one has two routes.

Legend: N rows, S slots, R rank, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.kernels.products import SentenceSlots, add_low_rank, linear
from pipeline.model.tokens import TokenLinear, Tokens

VERTICAL_STD = 0.01
Synthesis = Literal["pair_wise", "source", "target"]
"""The languages of V and F: source and target, twice the source, twice the target."""


@dataclass(frozen=True)
class LowRankShape:
    """What the low-rank modules of a linear layer are.

    Attributes:
        languages: codes, by the language indices of batches.
        kept: those that have a module; None: all.
    """

    languages: tuple[str, ...]
    rank: int
    synthesis: Synthesis
    has_shared: bool = False
    kept: tuple[str, ...] | None = None


class LowRankStack(LanguageStack):
    """V and F of every language: (S, O, R) and (S, R, I)."""

    def __init__(self, shape: LowRankShape, *, in_features: int, out_features: int) -> None:
        super().__init__(shape.languages, kept=shape.kept, has_shared=shape.has_shared)
        slots = len(self.slots)
        self.vertical = nn.Parameter(torch.empty(slots, out_features, shape.rank))
        self.flat = nn.Parameter(torch.empty(slots, shape.rank, in_features))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Of one language's tensor, or of the stacked one."""
        if name == "flat":
            return torch.zeros(shape)
        return torch.empty(shape).normal_(0, VERTICAL_STD, generator=generator)

    def reset_parameters(self, *, generator: torch.Generator | None = None) -> None:
        """Initial values, where nothing else gives them."""
        nn.init.normal_(self.vertical, 0, VERTICAL_STD, generator=generator)
        nn.init.zeros_(self.flat)


class LowRankLinear(TokenLinear):
    """A linear layer, whose weight and bias keep their names, beside modules of languages.

    It takes the parameters of the layer that it is made of; the modules' values are not yet set
    (``low_rank.reset_parameters``, or loaded).
    """

    def __init__(self, plain: nn.Linear, shape: LowRankShape) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.synthesis: Synthesis = shape.synthesis
        self.weight, self.bias = plain.weight, plain.bias
        self.low_rank = LowRankStack(
            shape, in_features=plain.in_features, out_features=plain.out_features
        )

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """(…, I) → (…, O); the rows are those of ``tokens``, in order."""
        y = linear(x, self.weight, self.bias)
        y_NO = add_low_rank(
            y.flatten(0, -2),
            x.flatten(0, -2),
            self.low_rank.vertical,
            self.low_rank.flat,
            self._slots(tokens),
        )
        return y_NO.view_as(y)

    @property
    def kept_values(self) -> int:
        """The rank: F x is kept."""
        return self.low_rank.flat.shape[1]

    def _slots(self, tokens: Tokens) -> SentenceSlots:
        """The same for all layers of this kind that see these tokens."""
        stack = self.low_rank
        key = ("low_rank", self.synthesis, stack.slots)
        found = tokens.kept_slots.get(key)
        if found is None:
            languages = tokens.source_language_B, tokens.target_language_B
            match self.synthesis:
                case "pair_wise":
                    pair = languages
                case "source":
                    pair = languages[0], languages[0]
                case "target":
                    pair = languages[1], languages[1]
            found = tokens.kept_slots[key] = stack.sentence_slots(*pair, tokens)
        return found

    @torch.no_grad()
    def folded_weight(self) -> Tensor:
        """W + V F of the shared slot: what the plain layer of that route has."""
        assert self.low_rank.has_shared
        return self.weight + self.low_rank.vertical[-1] @ self.low_rank.flat[-1]


def wrap_linear_layers(module: nn.Module, names: Sequence[str], shape: LowRankShape) -> None:
    """Give linear layers of a module, by their names in it, modules of languages."""
    for name in names:
        parent, _, own = name.rpartition(".")
        owner = module.get_submodule(parent)
        plain = getattr(owner, own)
        assert isinstance(plain, nn.Linear)
        setattr(owner, own, LowRankLinear(plain, shape))
