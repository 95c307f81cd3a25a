"""What expert parallelism sends in a training micro-batch, by its shapes.

Rows of tokens go to the ranks of their experts and back, and so do their gradients: four exchanges
per MoE layer (:mod:`pipeline.model.moe.expert_parallel`), and per layer of languages' experts, to
which a row goes once. Not counted: the numbers of rows, of which there are as many as experts.
"""

from dataclasses import dataclass

from pipeline.config.recipe import Recipe
from pipeline.estimates.operators import micro_batch
from pipeline.model.feed_forward import has_experts, has_language_experts
from pipeline.model.settings import ModelConfig

ROW_EXCHANGES = 4
"""There and back, forward and backward."""
BYTES_PER_VALUE = 2
"""Of bfloat16."""


@dataclass(frozen=True)
class Exchanges:
    """Of one rank and micro-batch.

    Attributes:
        size: ranks that share the experts.
        layers: MoE layers and those of languages' experts.
        bytes: of the rows it exchanges if no route is dropped, those for itself included: with
            even routing one in ``size`` stays.
        host_copies: how often the host waits for numbers of rows.
    """

    size: int
    layers: int
    bytes: int
    host_copies: int

    @property
    def sent_bytes(self) -> int:
        """To other ranks, with even routing."""
        return self.bytes * (self.size - 1) // self.size


def expert_exchanges(recipe: Recipe) -> Exchanges:
    """Of a recipe with its own expert-parallel size; nothing where that is 1."""
    model, size = recipe.model, recipe.training.expert_parallel_size
    batch = micro_batch(recipe.batches.tokens)
    tokens = {"encoder": len(batch.source_N), "decoder": len(batch.target_N)}
    depth = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
    routes = {
        side: [found for layer in range(count) if (found := _routes_per_token(model, layer))]
        for side, count in depth.items()
    }
    layers = sum(map(len, routes.values()))
    if not layers or size == 1:
        return Exchanges(size=1, layers=0, bytes=0, host_copies=0)
    rows = sum(sum(routes[side]) * tokens[side] for side in depth)
    return Exchanges(
        size=size,
        layers=layers,
        bytes=ROW_EXCHANGES * rows * model.width * BYTES_PER_VALUE,
        host_copies=layers,
    )


def _routes_per_token(model: ModelConfig, layer: int) -> int:
    """Ranks' experts that a token is sent to in a layer; 0 where it stays."""
    if model.moe is not None and has_experts(model, layer):
        return model.moe.top_k
    return int(has_language_experts(model, layer))
