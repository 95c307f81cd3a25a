"""Checkpoints: a model's shape (``model.json``), its tokenizer (``tokenizer/``) and its weights.

Weights are float32, in tensors named per global expert (``names``), whoever wrote them.

What a checkpoint carries beside its weights, for the stages that train it on.

A model that was imported or assembled has a vocabulary and a shape of its own: shards are made with
the one, and the recipe that trains it must describe the other.
"""

import math
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, new_artifact, open_artifact
from pipeline.artifacts.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.checkpoints.names import named_slices, num_parameters
from pipeline.checkpoints.weights import TensorFiles, tensor_headers
from pipeline.config.documents import toml_lines
from pipeline.config.settings import describe_validation, shown
from pipeline.errors import CheckpointError
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer

MODEL_FILE = "model.json"
MAX_LACKING = 2
"""A model of more than this many times the values that its files hold is not theirs."""


def open_checkpoint(directory: Path) -> Artifact:
    """Open a checkpoint whose small files are intact; weights are checked when they are opened.

    Raises:
        ArtifactError: not a finished checkpoint, or damaged.
    """
    checkpoint = open_artifact(directory, kind="checkpoint")
    checkpoint.check(name for name in checkpoint.names() if not name.startswith("weights/"))
    return checkpoint


def stated_spec(checkpoint: Artifact) -> ModelSpec:
    """The model's shape as stated when it was first made, whatever the files of weights hold.

    Raises:
        CheckpointError: model.json holds something else.
    """
    path = checkpoint.file(MODEL_FILE)
    try:
        return ModelSpec.model_validate(checkpoint.read_json(MODEL_FILE))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} does not describe a model: {describe_validation(error, ModelSpec)}"
        ) from error


def read_spec(checkpoint: Artifact) -> ModelSpec:
    """The shape of a model that is about to be built.

    Nothing of that size is allocated before the files are known to be of about that size; which
    tensor is missing of one that lacks a few is said when it is read.

    Raises:
        CheckpointError: model.json holds something else, or asks for far more than the files hold.
    """
    spec = stated_spec(checkpoint)
    wanted = num_parameters(spec)
    held = sum(math.prod(header.shape) for header in tensor_headers(checkpoint, "weights/"))
    if wanted > MAX_LACKING * held:
        raise CheckpointError(
            f"{checkpoint.directory / MODEL_FILE} asks for {wanted:,} parameters, and the files "
            f"under weights hold {held:,} values: name a checkpoint whose files belong together."
        )
    return spec


def refuse_other_tokenizer(checkpoint: Artifact, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where a checkpoint's model was not made for a tokenizer."""
    spec = read_spec(checkpoint)
    for what, of_model, of_tokenizer in (
        ("ids", spec.vocabulary_size, tokenizer.size),
        ("padding", spec.pad_id, tokenizer.pad_id),
        ("languages", spec.languages, tokenizer.languages),
        ("ids of the target", spec.output_size or spec.vocabulary_size, _outputs(tokenizer)),
    ):
        if of_model != of_tokenizer:
            raise CheckpointError(
                f"The model and the tokenizer of {checkpoint.directory} do not belong together "
                f"({what}: {shown(of_model)} and {shown(of_tokenizer)}): run its stage again."
            )


def _outputs(tokenizer: Tokenizer) -> int:
    return tokenizer.output_size or tokenizer.size


def read_tokenizer(checkpoint: Artifact) -> Tokenizer:
    """The tokenizer a checkpoint carries."""
    return load_tokenizer(tokenizer_folder(checkpoint))


def load_model(
    checkpoint: Artifact,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Build the model of a checkpoint and fill it; every rank reads only what it holds.

    Weights are read one tensor at a time from mapped files, which the ranks of a machine share, and
    rounded to ``dtype`` on their way: no rank ever holds more than its part of the model, and the
    tensor at hand.
    """
    model = build_model(
        read_spec(checkpoint),
        regularization=regularization,
        expert_parallel=expert_parallel,
        device=device,
        dtype=dtype,
    )
    load_weights(model, checkpoint)
    return model


def load_weights(model: nn.Module, checkpoint: Artifact) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    files = TensorFiles(checkpoint, "weights/")
    for entry in named_slices(model):
        value = files.read(entry.name)
        if value.shape != entry.value.shape:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {entry.name} has shape {tuple(value.shape)}, the "
                f"model wants {tuple(entry.value.shape)}: name a checkpoint of this model."
            )
        entry.value.copy_(value)


def write_model_files(writer: ArtifactWriter, *, spec: ModelSpec, tokenizer_dir: Path) -> None:
    """Shape and tokenizer of a checkpoint."""
    write_spec(writer, spec)
    copy_tokenizer(tokenizer_dir, tokenizer_directory(writer))


def write_spec(writer: ArtifactWriter, spec: ModelSpec) -> None:
    """The shape of a checkpoint's model."""
    writer.write_json(MODEL_FILE, spec.model_dump(mode="json"))


def tokenizer_directory(writer: ArtifactWriter) -> Path:
    """Where the tokenizer of a checkpoint that is being made belongs."""
    return writer.path(f"tokenizer/{MODEL_FILE}").parent


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
