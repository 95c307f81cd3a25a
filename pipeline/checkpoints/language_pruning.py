"""Remove the language modules of some languages from a checkpoint.

The vocabulary and the languages' indices stay, so that translations between kept languages are the
same to the last bit. Weights are read one tensor at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, write_model_files
from pipeline.checkpoints.names import num_parameters, tensor_shapes
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.errors import ConfigError
from pipeline.languages import nearest_codes
from pipeline.model.spec import ModelSpec
from pipeline.terminal import track


@dataclass(frozen=True)
class KeptLanguages:
    """The result of pruning languages."""

    languages: tuple[str, ...]
    """Languages whose modules are kept."""
    before: int
    """Number of parameters before."""
    after: int
    """Number of parameters after."""


def prune_languages(
    directory: Path, *, languages: Sequence[str], out_dir: Path, overwrite: bool = False
) -> KeptLanguages:
    """Write a checkpoint without the modules of other languages.

    Raises:
        ConfigError: The model has no language modules, or none for one of the languages.
        ArtifactError: It is no checkpoint.
    """
    checkpoint = open_checkpoint(directory)
    spec = read_spec(checkpoint)
    target = _with_languages(spec, languages, directory=directory)
    modules = target.model.language_modules
    assert modules is not None
    assert modules.languages is not None
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="prune_languages",
        config={"prune_languages": {"languages": list(modules.languages)}},
        inputs={"checkpoint": checkpoint.as_input},
        overwrite=overwrite,
    ) as writer:
        weights = _kept(TensorFiles(checkpoint, "weights/"), target)
        writer.settled |= write_weights(writer.directory / "weights", weights)
        write_model_files(writer, spec=target, tokenizer_dir=tokenizer_folder(checkpoint))
    return KeptLanguages(modules.languages, num_parameters(spec), num_parameters(target))


def _with_languages(spec: ModelSpec, languages: Sequence[str], *, directory: Path) -> ModelSpec:
    modules = spec.model.language_modules
    if modules is None:
        raise ConfigError(
            f"{directory} has no language modules to prune: name a checkpoint that has "
            "(model.language_modules)."
        )
    had = spec.languages if modules.languages is None else modules.languages
    for code in languages:
        if code not in had:
            candidates = nearest_codes(code, had) or had
            raise ConfigError(
                f"{directory} has no module for the language {code!r}: choose from "
                f"{', '.join(candidates)}."
            )
    kept = tuple(code for code in had if code in set(languages))
    modules = modules.model_copy(update={"languages": kept})
    model = spec.model.model_copy(update={"language_modules": modules})
    return spec.model_copy(update={"model": model})


def _kept(files: TensorFiles, target: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    for name in track(tensor_shapes(target), label="prune"):
        yield name, files.read(name)
