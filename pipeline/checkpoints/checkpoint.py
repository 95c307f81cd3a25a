"""Read and write checkpoints: shape (``model.json``), tokenizer (``tokenizer/``) and weights.

Weights are float32, in tensors named per global expert (``names``). :func:`unpack_tokenizer` and
:func:`recipe_text` write out the tokenizer and the shape of a model that was imported or assembled:
shards are made with the one, and the recipe that trains the model must have the other.
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
"""Largest ratio of a model's parameters to the values in its files."""


def open_checkpoint(directory: Path) -> Artifact:
    """Open a checkpoint and check its small files; weights are checked when they are opened.

    Raises:
        ArtifactError: It is no finished checkpoint, or is damaged.
    """
    checkpoint = open_artifact(directory, kind="checkpoint")
    checkpoint.check(name for name in checkpoint.names() if not name.startswith("weights/"))
    return checkpoint


def stated_spec(checkpoint: Artifact) -> ModelSpec:
    """Return the model's shape in ``model.json`` without comparing it with the weights.

    Raises:
        CheckpointError: The file describes no model.
    """
    path = checkpoint.file(MODEL_FILE)
    try:
        return ModelSpec.model_validate(checkpoint.read_json(MODEL_FILE))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} describes no valid model: {describe_validation(error, ModelSpec)}"
        ) from error


def read_spec(checkpoint: Artifact) -> ModelSpec:
    """Return the shape of a model that is about to be built.

    The number of parameters is compared with the weights before anything of that size is allocated.
    A single missing tensor is reported when it is read.

    Raises:
        CheckpointError: ``model.json`` describes no model, or a far larger one than the weights.
    """
    spec = stated_spec(checkpoint)
    wanted = num_parameters(spec)
    held = sum(math.prod(header.shape) for header in tensor_headers(checkpoint, "weights/"))
    if wanted > MAX_LACKING * held:
        raise CheckpointError(
            f"{checkpoint.directory / MODEL_FILE} asks for {wanted:,} parameters, but the files "
            f"under weights hold {held:,} values. Name a checkpoint whose files belong together."
        )
    return spec


def refuse_other_tokenizer(checkpoint: Artifact, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if a checkpoint's model was not made for a tokenizer."""
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
                f"({what}: {shown(of_model)} and {shown(of_tokenizer)}). Run its stage again."
            )


def _outputs(tokenizer: Tokenizer) -> int:
    return tokenizer.output_size or tokenizer.size


def read_tokenizer(checkpoint: Artifact) -> Tokenizer:
    """Return the tokenizer of a checkpoint."""
    return load_tokenizer(tokenizer_folder(checkpoint))


def load_model(
    checkpoint: Artifact,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Build the model of a checkpoint and load this rank's weights.

    Weights are read one tensor at a time from mapped files, which the ranks of a machine share, and
    rounded to ``dtype``. A rank never holds more than its part of the model and one tensor.
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
        CheckpointError: A tensor is missing or has another shape.
    """
    files = TensorFiles(checkpoint, "weights/")
    for entry in named_slices(model):
        value = files.read(entry.name)
        if value.shape != entry.value.shape:
            raise CheckpointError(
                f"{checkpoint.directory}: Tensor {entry.name} has shape {tuple(value.shape)}, but "
                f"the model needs {tuple(entry.value.shape)}. Name a checkpoint of this model."
            )
        entry.value.copy_(value)


def write_model_files(writer: ArtifactWriter, *, spec: ModelSpec, tokenizer_dir: Path) -> None:
    """Write shape and tokenizer of a checkpoint."""
    write_spec(writer, spec)
    copy_tokenizer(tokenizer_dir, tokenizer_directory(writer))


def write_spec(writer: ArtifactWriter, spec: ModelSpec) -> None:
    """Write the shape of a checkpoint's model."""
    writer.write_json(MODEL_FILE, spec.model_dump(mode="json"))


def tokenizer_directory(writer: ArtifactWriter) -> Path:
    """Return the folder for the tokenizer of a checkpoint that is being written."""
    return writer.path(f"tokenizer/{MODEL_FILE}").parent


def unpack_tokenizer(directory: Path, *, out_dir: Path, overwrite: bool = False) -> int:
    """Write the tokenizer of a checkpoint as an artifact; return its number of ids.

    Raises:
        ArtifactError: It is no checkpoint, or is damaged.
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
    """Return the settings of a recipe that a checkpoint determines, as TOML: model and tags.

    Raises:
        ArtifactError: It is no checkpoint, or is damaged.
    """
    spec = read_spec(open_checkpoint(directory))
    document = {
        "model": spec.model.model_dump(mode="json", exclude_none=True),
        "batches": {"tag_scheme": spec.tag_scheme},
    }
    lines = [f"# Settings of the checkpoint {directory}, an overlay: RECIPE+THIS.toml"]
    return "\n".join([*lines, *toml_lines(document)]) + "\n"
