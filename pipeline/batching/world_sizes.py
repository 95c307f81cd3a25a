"""Decide which numbers of ranks serve a recipe, and how many passes each of them makes.

An update is M micro-batches (``batches.micro_batches``), which W ≤ M ranks take in turns
(:meth:`~pipeline.batching.global_step.GlobalStep.turns`). A rank may have one more than others.
"""

import math

from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.terminal import counted


def check_ranks(recipe: Recipe, *, ranks: int) -> None:
    """Check that so many ranks can train by the recipe.

    Raises:
        ConfigError: an update has fewer micro-batches, or the experts cannot be spread over the
            expert-parallel ranks.
    """
    micro_batches = recipe.batches.micro_batches
    if ranks > micro_batches:
        raise ConfigError(
            f"{ranks} ranks are more than the "
            f"{counted(micro_batches, 'micro-batch', 'micro-batches')} of an update "
            f"(batches.micro_batches). Use at most {counted(micro_batches, 'rank')}."
        )
    moe, size = recipe.model.moe, expert_parallel_size(recipe, ranks=ranks)
    if moe is not None and moe.num_experts % size:
        sizes = ", ".join(map(str, expert_parallel_sizes(recipe, ranks=ranks)))
        raise ConfigError(
            f"{moe.num_experts} experts cannot be spread over {size} ranks. Choose a "
            f"training.expert_parallel_size that divides model.moe.num_experts: {ranks} ranks can "
            f"use {sizes}."
        )


def passes_per_update(recipe: Recipe, *, ranks: int, per_pass: int = 1) -> int:
    """Return the forward and backward passes of every rank per update, ⌈⌈M / W⌉ / k⌉.

    M is ``batches.micro_batches``, W the number of ranks, and k the micro-batches of a pass.

    Raises:
        ConfigError: there are more ranks than micro-batches.
    """
    check_ranks(recipe, ranks=ranks)
    turns = math.ceil(recipe.batches.micro_batches / ranks)
    return math.ceil(turns / per_pass)


def even_per_pass(turns: int, *, most: int) -> int:
    """Return the micro-batches of a pass that divide an update evenly into the fewest passes.

    ``turns`` is a rank's micro-batches per update, ``most`` the largest number in a pass.
    """
    return math.ceil(turns / math.ceil(turns / most))


def expert_parallel_size(recipe: Recipe, *, ranks: int) -> int:
    """Return the ranks that share one copy of the experts.

    It is ``training.expert_parallel_size`` or, if that does not divide the number of ranks, their
    greatest common divisor.
    """
    return math.gcd(recipe.training.expert_parallel_size, ranks)


def expert_parallel_sizes(recipe: Recipe, *, ranks: int) -> list[int]:
    """Return the sizes that so many ranks can have: divisors of both ranks and experts."""
    moe = recipe.model.moe
    experts = ranks if moe is None else moe.num_experts
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and experts % size == 0]
