"""Export a checkpoint of ours to other software, with its tokenizer and a model card.

The folder has a manifest like every output of ours: it appears when it is complete, and
``--overwrite`` recognizes it. Other software ignores the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    InputRecord,
    new_artifact,
    open_artifact,
)
from pipeline.checkpoints.checkpoint import ModelSource, open_checkpoint, own_source
from pipeline.checkpoints.foreign import ctranslate2_model
from pipeline.checkpoints.foreign.families import M2M100_TABLE, NLLB_MOE_TABLE
from pipeline.checkpoints.foreign.layouts import Layout, chosen_layout, entries_of
from pipeline.checkpoints.foreign.model_card import Card
from pipeline.checkpoints.foreign.one_group import (
    chosen_group,
    described_groups,
    languages_of_group,
    of_one_group,
)
from pipeline.checkpoints.foreign.written_folder import (
    Format,
    foreign_tensors,
    model_config,
    refuse_unknown_pieces,
    refuse_unwritable,
    write_configs,
    write_tensors,
    write_vocabulary,
)
from pipeline.errors import CheckpointError, ConfigError

FORMATS: tuple[Format, ...] = get_args(Format)
CARD_FILE = "README.md"


@dataclass(frozen=True)
class Export:
    """The options of an export."""

    to: Format
    target_group: str | None = None
    """Number or language of the group whose router a language-group router is reduced to."""
    license: str = "unknown"
    scores_dir: Path | None = None
    """An evaluation to quote in the model card."""


def export_checkpoint(
    directory: Path, *, out_dir: Path, export: Export, overwrite: bool = False
) -> ModelSource:
    """Write a folder that other software loads; return the exported model.

    Raises:
        CheckpointError: The format cannot express the model; names the setting.
        ConfigError: An option does not fit the model, or a package is missing.
    """
    checkpoint = open_checkpoint(directory)
    scores = None
    if export.scores_dir is not None:
        scores = open_artifact(export.scores_dir, kind="evaluation")
    whole = own_source(checkpoint)
    _refuse_variants(whole, directory)
    source, targets = _fitted(whole, export)
    if export.to == "ctranslate2":
        ctranslate2_model.installed_package()
    refuse_unwritable(source.origin, source.spec, to=export.to)
    card = Card(
        checkpoint=checkpoint,
        spec=source.spec,
        tokenizer=source.tokenizer,
        to=export.to,
        license=export.license,
        targets=targets,
        scores=scores,
    )
    inputs = {"checkpoint": checkpoint.as_input} | _as_input(scores)
    with new_artifact(
        out_dir,
        kind="export",
        stage="export",
        config=_settings(export),
        inputs=inputs,
        overwrite=overwrite,
    ) as writer:
        _write(writer, source, card, to=export.to)
    return source


def _refuse_variants(source: ModelSource, directory: Path) -> None:
    """Raise CheckpointError for a model with a variant that no format has."""
    for variant in source.spec.model.variants:
        if problem := variant.export_problem(directory):
            raise CheckpointError(problem)


def _settings(export: Export) -> Mapping[str, object]:
    return {"to": export.to, "target_group": export.target_group, "license": export.license}


def _as_input(scores: Artifact | None) -> dict[str, InputRecord]:
    return {} if scores is None else {"scores": scores.as_input}


def _fitted(source: ModelSource, export: Export) -> tuple[ModelSource, tuple[str, ...]]:
    """Return the model to export, and its target languages."""
    spec = source.spec
    if export.target_group is not None:
        group = chosen_group(source.origin, spec, export.target_group)
        return of_one_group(source, group), tuple(languages_of_group(spec, group))
    if spec.language_groups is not None:
        raise ConfigError(
            f"{source.origin} routes by language group (model.moe.decoder_router), which "
            f"{export.to} cannot; for the languages of one group it is an ordinary router: pass "
            f"--target-group, one of {described_groups(spec)}."
        )
    return source, spec.languages


def _write(writer: ArtifactWriter, source: ModelSource, card: Card, *, to: Format) -> None:
    entries = entries_of(source.tokenizer, source.origin)
    if to == "ctranslate2":
        ctranslate2_model.write_model(writer.directory, source, entries)
        text = card.text(loading=card.ctranslate2_loading(), tokens=entries.tokens)
    else:
        layout = chosen_layout(entries)
        refuse_unknown_pieces(source.origin, entries, layout)
        _write_folder(writer, source, layout)
        text = card.text(loading=card.transformers_loading(layout), tokens=layout.token_of)
    (writer.directory / CARD_FILE).write_text(text, encoding="utf-8")
    writer.statistics["languages"] = len(source.spec.languages)


def _write_folder(writer: ArtifactWriter, source: ModelSource, layout: Layout) -> None:
    spec, directory = source.spec, writer.directory
    config = model_config(spec, vocabulary_size=len(layout.rows))
    config["torch_dtype"] = str(source.tensors.read("embedding.weight").dtype).removeprefix(
        "torch."
    )
    write_configs(directory, config, layout)
    table = NLLB_MOE_TABLE if spec.model.moe else M2M100_TABLE
    writer.settled |= write_tensors(directory, foreign_tensors(source, table, layout))
    assert source.tokenizer.model is not None
    write_vocabulary(directory, source.tokenizer.model, layout, max_length=spec.model.max_positions)
