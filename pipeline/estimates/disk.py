"""Estimate the disk space that a plan's models and training states take, without running it.

Weights and states are in float32 (``training/engine.py``): a state holds a parameter and its two
moments. The size of corpora and shards depends on the raw text and is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.recipe import Recipe
from pipeline.jobs.plan import ResolvedPlan
from pipeline.model.parameters import count_parameters

WEIGHT_BYTES, STATE_BYTES = 4, 3 * 4
STAGES = ("pretrain", "upcycle", "finetune")
"""Stages that write a model of ``[model]``."""


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of one stage: the most while it runs, and those that stay."""

    peak: int
    kept: int


def disk_space(recipe: Recipe, *, parameters: int, trains: bool) -> DiskSpace:
    """Return the space of a stage that makes a model."""
    # A new state is complete before the oldest is removed, and so are new weights.
    weights, state = WEIGHT_BYTES * parameters, STATE_BYTES * parameters
    if not trains:
        return DiskSpace(weights, weights)
    training = recipe.training
    states = max(training.keep_last, training.average_last)
    mean = weights if training.average_last else 0
    left = {"none": 0, "last": 1, "all": states}[recipe.saving.keep_states]
    return DiskSpace(peak=(states + 1) * state + 2 * weights + mean, kept=weights + left * state)


def plan_space(resolved: ResolvedPlan, recipes: Mapping[str, Recipe]) -> tuple[int, int]:
    """Return the most bytes that stages take one after another, and the bytes that stay.

    Args:
        resolved: the plan; finished stages are left out.
        recipes: stage of the plan → its recipe.
    """
    peak = kept = 0
    for task in resolved.tasks:
        if task.stage.name in STAGES and not task.is_made:
            recipe = recipes[task.name]
            count = count_parameters(
                recipe.model, output_size=recipe.tokenizer.output_ids, **sizes(recipe)
            )
            space = disk_space(recipe, parameters=count["total"], trains=task.stage.trains)
            peak = max(peak, space.peak - space.kept)
            kept += space.kept
    return kept + peak, kept


def sizes(recipe: Recipe) -> dict[str, int]:
    """Return sizes that the data decides, as far as the recipe tells, else their least."""
    moe, modules = recipe.model.moe, recipe.model.language_modules
    groups = 0
    if moe is not None and moe.needs_groups:
        groups = moe.num_groups or 2
    languages = 1 if modules is None or modules.languages is None else len(modules.languages)
    return {
        "vocabulary_size": recipe.tokenizer.ids,
        "num_groups": groups,
        "num_languages": languages,
    }
