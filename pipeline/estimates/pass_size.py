"""Choose how many micro-batches share a forward and backward pass on a GPU."""

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.batching.world_sizes import even_per_pass, passes_per_update
from pipeline.config.ds_config import MAX_PER_PASS, PER_PASS, asks_for_largest_passes
from pipeline.config.recipe import Recipe
from pipeline.distributed.collectives import gather_objects, world_size
from pipeline.estimates.memory import estimate
from pipeline.model.spec import ModelSpec
from pipeline.stage import StageCall

SHARE_OF_MEMORY = 0.85
"""Share of a GPU's memory that a pass may need by the estimate, which leaves fragments out."""

ENOUGH_TOKENS, OF_WIDTH = 32_768, 1024
"""Tokens of a side with which a model of this width fills a GPU. Others need as many products of
(tokens × width) with (width × width) in proportion to the square of their width."""


def micro_batches_that_fit(call: StageCall, spec: ModelSpec) -> int | None:
    """Return the micro-batches of a pass on this machine's GPUs; all ranks call this.

    None if the ds_config names a number, and on CPU.
    """
    if not (torch.cuda.is_available() and asks_for_largest_passes(call.ds_config)):
        return None
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return most_per_pass(
        spec,
        call.recipe,
        call.ds_config,
        ranks=world_size(),
        memory=min(gather_objects(memory)),
    )


def most_per_pass(
    spec: ModelSpec, recipe: Recipe, ds_config: Mapping[str, Any], *, ranks: int, memory: int
) -> int:
    """Return the most micro-batches of a pass that fit and that fill a GPU; at least 1.

    Passes of an update are of the same size, up to one micro-batch.

    Args:
        spec: the model.
        recipe: settings of its training.
        ds_config: DeepSpeed's configuration.
        ranks: number of ranks.
        memory: bytes of the GPU with the least memory.
    """
    turns = passes_per_update(recipe, ranks=ranks)
    enough = ENOUGH_TOKENS * OF_WIDTH**2 // spec.model.width**2
    number = min(max(enough // recipe.batches.tokens, 1), turns, MAX_PER_PASS)
    while (number := even_per_pass(turns, most=number)) > 1:
        needed = estimate(
            recipe,
            processes=ranks,
            ds_config={**ds_config, PER_PASS: number},
            vocabulary_size=spec.vocabulary_size,
            num_groups=spec.num_groups,
            num_languages=len(spec.languages),
        )
        if needed.device_bytes <= SHARE_OF_MEMORY * memory:
            break
        number -= 1
    return number
