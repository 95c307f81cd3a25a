"""Assemble an MoE model from modules of trained models: the stage ``upcycle`` (MMNMT, §4.2).

It reads one checkpoint for the embeddings and, unless they start fresh, one each for encoder and
decoder; it makes a checkpoint and its receipt (``receipt.json``). The inputs and the recipe become
the declaration that a file has on the command line (``checkpoints/assembly``).
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import sys

from pipeline.checkpoints.assembly.declaration import (
    FRESH,
    Assembly,
    PartsDeclaration,
    plan_assembly,
)
from pipeline.checkpoints.assembly.rules import PARTS
from pipeline.checkpoints.assembly.writing import make_assembly, plan_lines
from pipeline.stage import StageCall


def run(call: StageCall) -> None:
    """Plan the assembly of a recipe, print the plan, write the checkpoint and its receipt."""
    plan = plan_assembly(declared_by(call), model=call.recipe.model)
    print("\n".join(plan_lines(plan)))
    with call.new_artifact() as writer:
        writer.summary += make_assembly(plan, writer, processes=call.processes)


def declared_by(call: StageCall) -> Assembly:
    """Return the assembly that a recipe and the inputs of the stage declare."""
    paths = {name: str(artifact.directory) for name, artifact in call.artifacts.items()}
    names = {path: part for part, path in paths.items() if part in PARTS}  # one per model
    return Assembly(
        sources={name: path for path, name in names.items()},
        parts=PartsDeclaration(
            **{part: names[paths[part]] if part in paths else FRESH for part in PARTS}
        ),
        upcycling=call.recipe.upcycling,
        groups=paths.get("groups", ""),
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("upcycle"))
