"""Recipes of small models, passes of which are counted."""

from typing import Any

from pipeline.config.recipe import Recipe


def small_recipe(
    *,
    moe: dict[str, Any] | None = None,
    modules: dict[str, Any] | None = None,
    front: dict[str, Any] | None = None,
    tokens: int = 512,
    layers: tuple[int, int] = (2, 2),
    ranks: int = 1,
    recomputes: bool = False,
    **loss: Any,
) -> Recipe:
    """A recipe with ``layers`` of encoder and decoder, and experts shared by ``ranks``."""
    model = {
        **{"width": 32, "feed_forward_width": 64, "num_heads": 4},
        **{"encoder_layers": layers[0], "decoder_layers": layers[1]},
        **{"moe": moe, "language_modules": modules, "front": front or {"kind": "subwords"}},
    }
    training = {
        **{"dropout": 0.3, "attention_dropout": 0.1},
        **{"expert_parallel_size": ranks, "recompute_layers": recomputes},
    }
    batches = {"tokens": tokens}
    document = {"name": "test", "model": model, "batches": batches, "training": training}
    return Recipe.model_validate({**document, "loss": loss})
