"""Read and write checkpoints: shape (``model.json``), tokenizer (``tokenizer/``) and weights.

Weights are float32, in tensors named per global expert. :class:`ModelSource` is a model
of any origin, ours or of other software: its tensors have our names, their names and shapes are
known without reading values, and values are read one tensor at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, new_artifact, open_artifact
from pipeline.artifacts.manifest import InputRecord
from pipeline.artifacts.tokenizer import (
    Tokenizer,
    TokenizerFiles,
    copy_tokenizer,
    load_tokenizer,
    read_tokenizer_files,
    tokenizer_folder,
)
from pipeline.checkpoints.weights import TensorFiles, Tensors, tensor_headers, write_weights
from pipeline.config.documents import toml_lines
from pipeline.config.settings import describe_validation, shown
from pipeline.errors import CheckpointError
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.parameters import named_slices, tensor_shapes
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer

MODEL_FILE = "model.json"
MAX_LACKING = 2
"""Largest ratio of a model's parameters to the values in its files."""
_LISTED = 8
"""Upper bound of the names that an error lists per problem."""


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


def read_spec(checkpoint: Artifact, *, may_hold_more: bool = False) -> ModelSpec:
    """Return the shape of a model that is about to be built.

    The number of parameters is compared with the weights before anything of that size is allocated.
    A single missing tensor is reported when it is read; tensors beyond the model are refused here,
    unless the weights ``may_hold_more``.

    Raises:
        CheckpointError: ``model.json`` describes no model, one without some of the tensors, or a
            far larger one than the weights.
    """
    spec = stated_spec(checkpoint)
    shapes = tensor_shapes(spec)
    wanted = sum(shape.numel() for shape in shapes.values())
    headers = [*tensor_headers(checkpoint, "weights/")]
    held = sum(math.prod(header.shape) for header in headers)
    if wanted > MAX_LACKING * held:
        checkpoint.check()
        raise CheckpointError(
            f"{checkpoint.directory / MODEL_FILE} asks for {wanted:,} parameters, but the files "
            f"under weights hold {held:,} values. Restore it, or run its stage again."
        )
    if not may_hold_more:
        refuse_beyond(checkpoint, (header.name for header in headers), shapes)
    return spec


def refuse_beyond(checkpoint: Artifact, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise CheckpointError if a checkpoint has tensors that its model does not want."""
    if beyond := sorted(set(found).difference(wanted)):
        checkpoint.check()  # a damaged header has other names
        raise CheckpointError(
            f"{checkpoint.directory} holds tensors {_listing('beyond the model', beyond)}. Name a "
            "checkpoint of this model, or change back its code."
        )


def refuse_other_tokenizer(checkpoint: Artifact, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if a checkpoint's model was not made for a tokenizer."""
    spec = read_spec(checkpoint)
    outputs = spec.output_size or spec.vocabulary_size, tokenizer.output_size or tokenizer.size
    for what, expected, found in (
        ("ids", spec.vocabulary_size, tokenizer.size),
        ("padding", spec.pad_id, tokenizer.pad_id),
        ("languages", spec.languages, tokenizer.languages),
        ("ids of the target", *outputs),
    ):
        if expected != found:
            raise CheckpointError(
                f"The model and the tokenizer of {checkpoint.directory} do not belong together "
                f"({what}: {shown(expected)} and {shown(found)}). Run its stage again."
            )


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


def write_derived(
    model_of: Artifact,
    weights: Iterable[tuple[str, Tensor]],
    *,
    spec: ModelSpec,
    out_dir: Path,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Artifact] | None = None,
    statistics: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint that was made from others without training.

    The tokenizer is the tokenizer of ``model_of``, which is also the only input unless ``inputs``
    says otherwise. The weights are requested one tensor at a time.
    """
    inputs = inputs or {"checkpoint": model_of}
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage=stage,
        config=config,
        inputs={name: artifact.as_input for name, artifact in inputs.items()},
        overwrite=overwrite,
    ) as writer:
        writer.settled |= write_weights(writer.directory / "weights", weights)
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_folder(model_of))
        writer.statistics |= statistics or {}


def write_spec(writer: ArtifactWriter, spec: ModelSpec) -> None:
    """Write the shape of a checkpoint's model."""
    writer.write_json(MODEL_FILE, spec.model_dump(mode="json"))


def tokenizer_directory(writer: ArtifactWriter) -> Path:
    """Return the folder for the tokenizer of a checkpoint that is being written."""
    return writer.path(f"tokenizer/{MODEL_FILE}").parent


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


# ---------------------------------------------------------------- a model as a source


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: shape, tokenizer, weights, and its record for a manifest."""

    spec: ModelSpec
    tokenizer: TokenizerFiles
    tensors: Tensors
    record: InputRecord

    @property
    def origin(self) -> Path:
        """Return the folder or file that holds the weights."""
        return self.tensors.origin


def refuse_misfit(
    tensors: Tensors,
    spec: ModelSpec,
    *,
    unknown: Sequence[str] = (),
    called: Callable[[str], str] = str,
) -> None:
    """Check that a model has exactly these tensors.

    ``unknown`` are names in the files that have no name of ours; ``called`` turns our name into the
    name in the files.

    Raises:
        CheckpointError: Some are unknown, missing, superfluous or of another shape; lists them.
    """
    wanted = tensor_shapes(spec)
    found = set(tensors.names())
    shapes = {name: tensors.shape(name) for name in sorted(found & set(wanted))}
    problems: dict[str, Sequence[str]] = {
        "unknown": unknown,
        "missing": sorted(set(wanted) - found),
        "beyond the model": sorted(found - set(wanted)),
        "of another shape": [
            f"{called(name)} {list(shape)} instead of {list(wanted[name])}"
            for name, shape in shapes.items()
            if shape != tuple(wanted[name])
        ],
    }
    if any(problems.values()):
        listed = "; ".join(_listing(what, names) for what, names in problems.items() if names)
        saved = sum(torch.Size(tensors.shape(name)).numel() for name in found)
        expected = sum(shape.numel() for shape in wanted.values())
        others = "other tensors" if saved == expected else f"{expected:,}"
        raise CheckpointError(
            f"{tensors.origin} holds {saved:,} parameters, but the model described there has "
            f"{others}; tensors {listed}. Name a checkpoint with files that belong together."
        )


def own_source(checkpoint: Artifact) -> ModelSource:
    """Return the model of a checkpoint of ours, and check the digests of its weights.

    Raises:
        CheckpointError: Its files do not belong together.
    """
    spec = stated_spec(checkpoint)
    files = read_tokenizer_files(tokenizer_folder(checkpoint))
    refuse_other_tokenizer(checkpoint, files.build())
    tensors = TensorFiles(checkpoint, "weights/")
    refuse_misfit(tensors, spec)
    return ModelSource(spec=spec, tokenizer=files, tensors=tensors, record=checkpoint.as_input)


def _listing(what: str, names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{what} ({len(names):,}): {', '.join(names[:_LISTED])}{more}"
