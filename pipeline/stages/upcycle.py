"""Assemble an MoE model from modules of trained models: the stage ``upcycle`` (MMNMT, §4.2).

It reads one checkpoint for the embeddings and, unless they start fresh, one each for encoder and
decoder; it makes a checkpoint and its receipt (``receipt.json``). A recipe and options describe the
assembly, as in plans, or a file declares it (``checkpoints/assembly``).
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import sys

from pipeline.artifacts.places import run_dir
from pipeline.checkpoints.assembly.declaration import Parts, Sources, plan_parts
from pipeline.checkpoints.assembly.making import make_assembly, plan_lines
from pipeline.checkpoints.assembly.rules import PARTS
from pipeline.checkpoints.opening import open_model
from pipeline.stage import StageCall


def run(call: StageCall) -> None:
    """Plan the assembly of a recipe, print the plan, write the checkpoint and its receipt."""
    parts = declared_by(call)
    print("\n".join(plan_lines(parts)))
    with call.new_artifact() as writer:
        writer.summary += make_assembly(
            parts, writer, work_dir=run_dir(call.out_dir), processes=call.processes
        )


def declared_by(call: StageCall) -> Parts:
    """Plan the assembly that a recipe and inputs declare; write nothing.

    Raises:
        UserError: something named cannot be used, or does not fit.
    """
    sources: Sources = {
        part: open_model(call.artifacts[part].directory) if part in call.artifacts else None
        for part in PARTS
    }
    embeddings = sources["embeddings"]
    assert embeddings is not None  # the stage needs it
    return plan_parts(
        sources,
        model=call.recipe.model,
        config=call.recipe.upcycling,
        tokenizer=embeddings.tokenizer,
        groups=call.artifacts.get("groups"),
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("upcycle"))
