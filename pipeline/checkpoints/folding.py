"""Fold the shared route of a checkpoint with language modules into a plain model.

With low-rank modules, W + V F of the shared module replaces W; with language experts, the shared
feed-forward already has the names of a plain one. The modules of single languages are left out.
Weights are read one tensor at a time, so that a model need not fit in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, write_model_files
from pipeline.checkpoints.names import num_parameters, tensor_shapes
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.config.variants import SHARED
from pipeline.errors import ConfigError
from pipeline.model.extension import extensions
from pipeline.model.spec import ModelSpec
from pipeline.terminal import track


@dataclass(frozen=True)
class Folded:
    """The result of folding."""

    before: int
    """Number of parameters before."""
    after: int
    """Number of parameters after."""
    matrices: int
    """Number of matrices that were folded."""


def fold_checkpoint(directory: Path, *, out_dir: Path, overwrite: bool = False) -> Folded:
    """Write the shared route of a checkpoint as a model without language modules.

    Raises:
        ConfigError: It has no shared route.
        ArtifactError: It is no checkpoint.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    if not spec.model.has_shared_route:
        raise ConfigError(
            f"{directory} has no route that all languages share (model.language_modules.shared): "
            "name a checkpoint of fuse distillation."
        )
    target = without_language_modules(spec)
    files = TensorFiles(checkpoint, "weights/")
    folded: list[str] = []
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="fold",
        config={"fold": {"route": SHARED}},
        inputs={"checkpoint": checkpoint.as_input},
        overwrite=overwrite,
    ) as writer:
        weights = folded_tensors(files, target, folded=folded)
        writer.settled |= write_weights(writer.directory / "weights", weights)
        write_model_files(writer, spec=target, tokenizer_dir=tokenizer_folder(checkpoint))
    return Folded(
        before=num_parameters(spec),
        after=num_parameters(target),
        matrices=len(folded),
    )


def without_language_modules(spec: ModelSpec) -> ModelSpec:
    """Return the shape of a model without language modules."""
    model = spec.model.model_copy(update={"language_modules": None})
    return spec.model_copy(update={"model": model})


def folded_tensors(
    files: TensorFiles, target: ModelSpec, *, folded: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folded model, in its order; add the names of sums to ``folded``."""
    names = set(files.names())
    for name in track(tensor_shapes(target), label="fold"):
        found = (extension.folded(name, names, files.read) for extension in extensions())
        weight = next((tensor for tensor in found if tensor is not None), None)
        if weight is not None:
            folded.append(name)
        yield name, files.read(name) if weight is None else weight
