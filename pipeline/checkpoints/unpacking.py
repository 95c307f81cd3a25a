"""What a checkpoint carries beside its weights, for the stages that train it on.

A model that was imported or assembled has a vocabulary and a shape of its own: shards are made with
the one, and the recipe that trains it must describe the other.
"""

from pathlib import Path

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.tokenizer import copy_tokenizer, tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, read_tokenizer
from pipeline.documents import toml_lines


def unpack_tokenizer(directory: Path, *, out_dir: Path, overwrite: bool = False) -> int:
    """Write the tokenizer of a checkpoint as an artifact; returns its number of ids.

    Raises:
        ArtifactError: not a checkpoint, or a damaged one.
    """
    checkpoint = open_checkpoint(directory)
    size = read_tokenizer(checkpoint).size
    with new_artifact(
        out_dir,
        kind="tokenizer",
        stage="unpack_tokenizer",
        config={},
        inputs={"checkpoint": checkpoint.as_input},
        overwrite=overwrite,
    ) as writer:
        copy_tokenizer(tokenizer_folder(checkpoint), writer.directory)
        writer.summary.append(f"{size:,} ids, as the checkpoint has them")
    return size


def recipe_text(directory: Path) -> str:
    """The part of a recipe that a checkpoint decides, as TOML: its model, and its tags.

    Raises:
        ArtifactError: not a checkpoint, or a damaged one.
    """
    spec = read_spec(open_checkpoint(directory))
    document = {
        "model": spec.model.model_dump(mode="json", exclude_none=True),
        "batches": {"tag_scheme": spec.tag_scheme},
    }
    lines = [f"# What the checkpoint {directory} decides: lay it over a recipe, RECIPE+THIS.toml"]
    return "\n".join([*lines, *toml_lines(document)]) + "\n"
