"""Language-specific matrix synthesis (LMS): W + V_a F_b of rank d (Xu et al. 2023, eq. 1).

In pair-wise synthesis, a is the source and b the target language; in language-wise synthesis, both
are the same language. V starts as N(0, 0.01²) and F as zeros: the layer starts as the plain
one. The product is computed as V (F x): V F is never formed. Batches may mix languages.

The shared slot serves fuse distillation; a layer that has one has two routes.

Legend: N rows, S slots, R rank, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.extensions.language_modules.stack import LanguageStack, SentenceSide
from pipeline.kernels.products import linear
from pipeline.kernels.slot_products import add_low_rank
from pipeline.model.tokens import TokenLinear, Tokens

VERTICAL_STD = 0.01
"""Standard deviation of the initial V."""
Synthesis = Literal["pair_wise", "source", "target"]
"""Languages of V and F: source and target, the source for both, or the target for both."""


@dataclass(frozen=True)
class LowRankShape:
    """Properties of the low-rank modules of a linear layer.

    Attributes:
        languages: codes, in the order of the language indices of batches.
        rank: the rank d.
        synthesis: languages that select V and F.
        has_shared: whether there is a slot for all languages.
        kept: languages that have a module; None: all.
    """

    languages: tuple[str, ...]
    rank: int
    synthesis: Synthesis
    has_shared: bool = False
    kept: tuple[str, ...] | None = None


class LowRankStack(LanguageStack):
    """Matrices of every language: V (S, O, R) and F (S, R, I)."""

    def __init__(self, shape: LowRankShape, *, in_features: int, out_features: int) -> None:
        super().__init__(shape.languages, kept=shape.kept, has_shared=shape.has_shared)
        slots = len(self.slots)
        self.vertical = nn.Parameter(torch.empty(slots, out_features, shape.rank))
        self.flat = nn.Parameter(torch.empty(slots, shape.rank, in_features))

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return N(0, 0.01²) for V, zeros for F; ``shape`` may be one slot's or the stack's."""
        if name == "flat":
            return torch.zeros(shape)
        return torch.empty(shape).normal_(0, VERTICAL_STD, generator=generator)


class LowRankLinear(TokenLinear):
    """A linear layer with a low-rank module per language; weight and bias keep their names.

    It takes over the parameters of the plain layer. The modules have no values yet.
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
        """Return (…, O) for states (…, I), with the rows of ``tokens`` in order."""
        y = linear(x, self.weight, self.bias)
        own = self.synthesis
        pair: tuple[SentenceSide, SentenceSide] = (
            ("source", "target") if own == "pair_wise" else (own, own)
        )
        y_NO = add_low_rank(
            y.flatten(0, -2),
            x.flatten(0, -2),
            self.low_rank.vertical,
            self.low_rank.flat,
            self.low_rank.sentence_slots("low_rank", pair, tokens),
        )
        return y_NO.view_as(y)

    @property
    def kept_values(self) -> int:
        """Return the rank: autograd keeps F x."""
        return self.low_rank.flat.shape[1]


def wrap_linear_layers(module: nn.Module, names: Sequence[str], shape: LowRankShape) -> None:
    """Replace the named linear layers of a module by :class:`LowRankLinear`."""
    for name in names:
        parent, _, own = name.rpartition(".")
        owner = module.get_submodule(parent)
        plain = getattr(owner, own)
        assert isinstance(plain, nn.Linear)
        setattr(owner, own, LowRankLinear(plain, shape))
