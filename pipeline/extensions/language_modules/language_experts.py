"""Language experts: one feed-forward per language, without a router.

The feed-forward of a sentence's language processes it or, on the shared route, the feed-forward of
all languages, with tensors named as in a plain model (fuse distillation; Xu et al. 2023,
§3.1).

With expert parallelism, the language experts are spread over ranks as well: rows go to the rank of
their language and back, like tokens of routed experts.

Legend: N tokens, R rows sorted by slot, S slots, D model width, F hidden width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from pipeline.extensions.language_modules import LanguageExpertsConfig
from pipeline.extensions.language_modules.stack import LanguageStack, SentenceSide
from pipeline.kernels.expert_products import ExpertWeights, serve_rows
from pipeline.kernels.products import Activation, Linear, activate
from pipeline.kernels.slot_products import (
    SentenceSlots,
    row_feed_forward,
    sort_rows,
    unsort_rows,
)
from pipeline.model.moe.expert_parallel import ExpertParallel, RowCounts
from pipeline.model.moe.experts import StackedLinear
from pipeline.model.moe.routing import RoutingRecord
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.tokens import Tokens


class FeedForwardStack(LanguageStack):
    """Feed-forwards of this rank's S languages: weights (S, F, D) and (S, D, F), and biases."""

    can_spread = True

    def __init__(
        self,
        languages: tuple[str, ...],
        *,
        kept: tuple[str, ...] | None,
        width: int,
        hidden_width: int,
        activation: Activation,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(languages, kept=kept, ranks=ranks, rank=rank)
        self.activation: Activation = activation
        share = self.share
        self.up = StackedLinear(num_experts=share, in_features=width, out_features=hidden_width)
        self.down = StackedLinear(num_experts=share, in_features=hidden_width, out_features=width)

    def forward(self, x_RD: Tensor, rows_S: Sequence[int], count_S: Tensor | None = None) -> Tensor:
        """Apply each feed-forward of this rank to its slice of rows, (R, D)."""
        return serve_rows(x_RD, rows_S, self.weights(), activation=self.activation, count_E=count_S)

    def weights(self) -> ExpertWeights:
        """Return the parameters as the kernels take them."""
        return ExpertWeights(self.up.weight, self.up.bias, self.down.weight, self.down.bias)


class LanguageExperts(nn.Module):
    """A feed-forward per language and, if configured, one for all languages."""

    def __init__(
        self,
        experts: FeedForwardStack,
        *,
        width: int,
        hidden_width: int,
        by_source: bool,
        has_shared: bool,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.activation: Activation = experts.activation
        self.expert_parallel = expert_parallel
        self.by_source = by_source
        self.has_shared = has_shared
        if has_shared:
            self.up = Linear(width, hidden_width)
            self.down = Linear(hidden_width, width)
        self.of_language = experts

    def forward(self, x_ND: Tensor, tokens: Tokens) -> tuple[Tensor, RoutingRecord | None]:
        """Apply the feed-forwards of the route; there is no routing record."""
        if tokens.route == "shared" and self.has_shared:
            y_ND = self.down(activate(self.up(x_ND), self.activation))
        else:
            side: SentenceSide = "source" if self.by_source else "target"
            slots = self.of_language.sentence_slots("language_experts", (side, side), tokens)
            y_ND = self._by_language(x_ND, slots)
        return y_ND, None

    def _by_language(self, x_ND: Tensor, slots: SentenceSlots) -> Tensor:
        if self.expert_parallel is not None:
            return self._by_rank(x_ND, slots, self.expert_parallel)
        weights = self.of_language.weights()
        return row_feed_forward(x_ND, weights, slots, activation=self.activation)

    def _by_rank(
        self, x_ND: Tensor, slots: SentenceSlots, expert_parallel: ExpertParallel
    ) -> Tensor:
        """Apply the feed-forwards of all ranks to rows sorted by slot, and restore the order.

        All such layers of a side send the same rows: only the first exchanges the counts.
        """
        stack = self.of_language
        rows = slots.sorted_rows("first", num_slots=stack.share * stack.ranks)
        counts: RowCounts = slots.once(
            "counts", lambda: expert_parallel.exchange_counts(rows.slices.rows_E)
        )
        y_RD = expert_parallel.run(stack, sort_rows(x_ND, rows), counts)
        return unsort_rows(y_RD, rows)


def build_language_experts(
    spec: ModelSpec,
    config: LanguageExpertsConfig,
    *,
    side: Side,
    expert_parallel: ExpertParallel | None,
) -> LanguageExperts:
    """Return this rank's share of the language experts of one layer."""
    model = spec.model
    widths = {"width": model.width, "hidden_width": model.feed_forward_width}
    size, rank = (1, 0) if expert_parallel is None else (expert_parallel.size, expert_parallel.rank)
    return LanguageExperts(
        FeedForwardStack(
            spec.languages,
            kept=config.languages,
            activation=model.activation,
            ranks=size,
            rank=rank,
            **widths,
        ),
        expert_parallel=expert_parallel,
        by_source=side == "encoder" or config.decoder_language == "source",
        has_shared=config.shared,
        **widths,
    )
