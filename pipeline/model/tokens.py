"""What a layer is told about its tokens.

Legend: B sentences, N tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.config.settings import Route
from pipeline.kernels.placement import RouteNumbers
from pipeline.kernels.products import SentenceSlots


@dataclass(frozen=True)
class Tokens:
    """One small record instead of a growing list of tensors; per token on demand.

    Attributes:
        sentence_N: sentence of each token.
        position_N: its position there, from 0.
        source_language_B, target_language_B: indices into the tokenizer's languages.
        language_group_B: group of the target language.
        route: of a model that has two.
        progress: share of the training that was done before this update; of no use without it.
    """

    sentence_N: Tensor
    position_N: Tensor
    source_language_B: Tensor
    target_language_B: Tensor
    language_group_B: Tensor
    route: Route = "specific"
    progress: float = 0.0

    @cached_property
    def source_language_N(self) -> Tensor:
        return self.source_language_B[self.sentence_N]

    @cached_property
    def target_language_N(self) -> Tensor:
        return self.target_language_B[self.sentence_N]

    @cached_property
    def language_group_N(self) -> Tensor:
        return self.language_group_B[self.sentence_N]

    def route_numbers(self, *, num_choices: int, num_experts: int) -> RouteNumbers:
        """What MoE layers of such a shape count with; the same for all of them."""
        shape = num_choices, num_experts
        if shape not in self._route_numbers:
            self._route_numbers[shape] = RouteNumbers(
                len(self.sentence_N), num_choices, num_experts, self.sentence_N.device
            )
        return self._route_numbers[shape]

    def over(self, packing: Packing) -> "Tokens":
        """What there is to know of other tokens of the same sentences: of their sources, say."""
        if id(packing) not in self._over:
            other = replace(self, sentence_N=packing.sentence_N, position_N=packing.position_N)
            self._over[id(packing)] = packing, other
        return self._over[id(packing)][1]

    @cached_property
    def _over(self) -> dict[int, tuple[Packing, "Tokens"]]:
        return {}

    @cached_property
    def kept_slots(self) -> dict[tuple[object, ...], SentenceSlots]:
        """Kind of language module → the slots that serve these sentences, once they are known."""
        return {}

    @cached_property
    def _route_numbers(self) -> dict[tuple[int, int], RouteNumbers]:
        return {}


class TokenLinear(nn.Module):
    """A module in the place of a linear layer whose result depends on the tokens, too.

    It is called with the states, (…, inputs), and the tokens that their rows belong to.
    """

    in_features: int
    out_features: int

    @property
    def kept_values(self) -> int:
        """Values that it keeps per token for gradients, beside those of a linear layer."""
        raise NotImplementedError


def project(layer: nn.Module, x: Tensor, tokens: Tokens) -> Tensor:
    """Apply a linear layer, or what stands in its place."""
    y: Tensor = layer(x, tokens) if isinstance(layer, TokenLinear) else layer(x)
    return y
