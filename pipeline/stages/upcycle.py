"""Assemble an MoE model from modules of trained models: the stage ``upcycle`` (MMNMT, §4.2).

It reads one checkpoint for the embeddings and, unless they start fresh, one each for encoder and
decoder; it makes a checkpoint and its receipt (``receipt.json``). A recipe and options describe the
assembly, as in plans, or a file declares it (``checkpoints/assembly``).
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import sys

from pipeline.artifacts.mixture import read_groups
from pipeline.artifacts.places import run_dir
from pipeline.checkpoints.assembly.making import Parts, Sources, make_assembly, tensors_of
from pipeline.checkpoints.assembly.receipt import receipt_lines
from pipeline.checkpoints.assembly.rules import PARTS, Blueprint
from pipeline.checkpoints.assembly.target import known_groups, refuse_misfit
from pipeline.checkpoints.opening import open_model
from pipeline.model.spec import ModelSpec, groups_of_languages, make_spec, marks_of_vocabulary
from pipeline.stages.stage import StageCall


def run(call: StageCall) -> None:
    """Plan the assembly of a recipe, print and save its receipt, write the checkpoint."""
    parts = plan_recipe(call)
    print("\n".join(receipt_lines(parts.blueprint.plan, parts.names)))
    with call.new_artifact() as writer:
        writer.summary += make_assembly(
            parts, writer, work_dir=run_dir(call.out_dir), processes=call.processes
        )


def plan_recipe(call: StageCall) -> Parts:
    """Open the named sources and plan the whole assembly; write nothing.

    Raises:
        UserError: something named cannot be used, or does not fit.
    """
    sources: Sources = {
        part: open_model(call.artifacts[part].directory) if part in call.artifacts else None
        for part in PARTS
    }
    embeddings = sources["embeddings"]
    assert embeddings is not None  # the stage needs it
    blueprint = Blueprint(
        spec=_recipe_spec(call, sources),
        sources=tensors_of(sources),
        config=call.recipe.upcycling,
    )
    return Parts(blueprint, sources, embeddings.tokenizer)


def _recipe_spec(call: StageCall, sources: Sources) -> ModelSpec:
    """Return the shape of the result: the recipe's model over the sources' vocabulary and groups.

    Raises:
        ConfigError: the sources do not fit each other or the recipe.
    """
    model = call.recipe.model
    present = {part: source for part, source in sources.items() if source is not None}
    refuse_misfit(present, model)
    groups = call.artifacts.get("groups")
    given = read_groups(groups) if groups is not None else None
    base = present["embeddings"].spec
    language_groups = groups_of_languages(
        model,
        languages=base.languages,
        groups=known_groups(present.get("decoder"), given, resembling={}),
    )
    marks = marks_of_vocabulary(model, present["embeddings"].tokenizer.build())
    return make_spec(**{**dict(base), "model": model, "language_groups": language_groups, **marks})


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("upcycle"))
