"""Export a checkpoint of ours to other software, with its tokenizer and a model card.

The folder has a manifest like every output of ours: it appears when it is complete, and
``--overwrite`` recognizes it. Other software ignores the manifest.

No format has language groups. A language-group router averages W x and W_g x (MMNMT, eq. 1): for
one group g that is an ordinary router with W' = (W + W_g) / 2.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from pipeline.artifacts.artifact import (
    Artifact,
    new_artifact,
    open_artifact,
)
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.checkpoint import ModelSource, open_checkpoint, own_source
from pipeline.checkpoints.foreign import export_to_ctranslate2, export_to_hugging_face
from pipeline.checkpoints.foreign.export_to_hugging_face import Card
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    Entries,
    Layout,
    chosen_layout,
    entries_of,
)
from pipeline.checkpoints.weights import Tensors
from pipeline.errors import CheckpointError, ConfigError
from pipeline.languages import find_code
from pipeline.model.parameters import tensor_shapes
from pipeline.model.settings import DenseConfig
from pipeline.model.spec import ModelSpec
from pipeline.terminal import counted

Format = Literal["hf-m2m100", "hf-nllb-moe", "ctranslate2"]
FORMATS: tuple[Format, ...] = get_args(Format)
CARD_FILE = "README.md"
_TAG_SCHEMES = {
    "hf-m2m100": ("src-tgt",),
    "hf-nllb-moe": ("src-tgt",),
    "ctranslate2": ("src-tgt", "tgt"),
}


@dataclass(frozen=True)
class Export:
    """The options of an export."""

    to: Format
    target_group: str | None = None
    """Number or language of the group that a language-group router is reduced to."""
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
    inputs: dict[str, Artifact] = {"checkpoint": checkpoint}
    if export.scores_dir is not None:
        inputs["scores"] = open_artifact(export.scores_dir, kind="evaluation")
    source = own_source(checkpoint)
    for variant in source.spec.model.variants:
        if problem := variant.export_problem(directory):
            raise CheckpointError(problem)
    reduced = _spec_of_one_group(source.spec)
    refuse_unwritable(source.origin, reduced, to=export.to, tokenizer=source.tokenizer)
    source, targets = _without_groups(source, export)
    if export.to == "ctranslate2":
        export_to_ctranslate2.installed_package()
    card = Card(
        checkpoint=checkpoint,
        spec=source.spec,
        to=export.to,
        license=export.license,
        targets=targets,
        scores=inputs.get("scores"),
    )
    options = asdict(export)
    del options["scores_dir"]  # an input
    with new_artifact(
        out_dir,
        kind="export",
        stage="export",
        config=options,
        inputs={name: artifact.as_input for name, artifact in inputs.items()},
        overwrite=overwrite,
    ) as writer:
        entries = entries_of(source.tokenizer, source.origin)
        if export.to == "ctranslate2":
            export_to_ctranslate2.write_model(writer.directory, source, entries)
            text = card.text(entries.tokens)
        else:
            layout = chosen_layout(entries)
            refuse_unknown_pieces(source.origin, entries, layout, to=export.to)
            tokenizer_class = export_to_hugging_face.write_model(writer, source, layout)
            text = card.text(layout.token_of, tokenizer_class=tokenizer_class)
        (writer.directory / CARD_FILE).write_text(text, encoding="utf-8")
        writer.statistics["languages"] = len(source.spec.languages)
    return source


def refuse_unwritable(
    origin: Path, spec: ModelSpec, *, to: Format, tokenizer: TokenizerFiles | None = None
) -> None:
    """Raise CheckpointError if a format does not support a setting of a model."""
    for setting, found, possible in _unsupported(spec, to):
        others = [other for other in FORMATS if not _unsupported(spec, other)]
        if others and tokenizer is not None:
            entries_of(tokenizer, origin)  # no format may have its vocabulary
        fix = f"Export it --to {others[0]}." if others else "No format supports this model."
        values = " or ".join(map(repr, possible))
        raise CheckpointError(
            f"{origin} has {setting} = {found!r}; {to} supports only {values}. {fix}"
        )


def _unsupported(spec: ModelSpec, to: Format) -> list[tuple[str, object, tuple[object, ...]]]:
    """Return the settings that a format lacks: name, value, and the values that it supports."""
    model, moe = spec.model, spec.model.moe
    limits: list[tuple[str, object, tuple[object, ...]]] = [
        (
            "model.moe",
            "experts" if moe else "none",
            ("experts" if to == "hf-nllb-moe" else "none",),
        ),
        ("model.converter_layers", model.converter_layers, (0,)),
        ("model.embedding.input", model.embedding.input, ("learned", "frozen")),
        ("model.front", model.front.kind, ("subwords",)),
        ("model.feed_forward", model.feed_forward.kind, (DenseConfig().kind,)),
        ("batches.tag_scheme", spec.tag_scheme, _TAG_SCHEMES[to]),
    ]
    if to != "ctranslate2":
        limits += [
            ("model.norm", model.norm, ("pre",)),
            ("model.positions", model.positions, ("sinusoidal",)),
            ("model.embedding_norm", model.embedding_norm, (False,)),
            ("model.embedding.output", model.embedding.output, ("tied",)),
        ]
    if to == "hf-nllb-moe" and moe is not None:
        limits += [
            ("model.moe.top_k", moe.top_k, (2,)),
            ("model.moe.combine_weights", moe.combine_weights, ("renormalized",)),
            ("model.moe.decoder_router", moe.decoder_router, ("token",)),
            ("model.moe.evaluation_capacity_factor", moe.evaluation_capacity_factor, (None,)),
        ]
    return [limit for limit in limits if limit[1] not in limit[2]]


def refuse_unknown_pieces(origin: Path, entries: Entries, layout: Layout, *, to: Format) -> None:
    """Raise CheckpointError if NllbTokenizer would assign ids to pieces that have none."""
    if entries.unknown_pieces and not layout.of_hundred:
        fix = (
            "Export it --to ctranslate2." if to == "hf-m2m100" else "No format supports this model."
        )
        raise CheckpointError(
            f"The vocabulary of {origin} has {counted(entries.unknown_pieces, 'piece')} without "
            "an id, but NllbTokenizer, which languages and tokens other than M2M-100's need, "
            f"assigns ids to all pieces. {fix}"
        )


# ---------------------------------------------------------------- language groups


def _spec_of_one_group(spec: ModelSpec) -> ModelSpec:
    """Return a spec with an ordinary router for one that routes by language group."""
    moe = spec.model.moe
    if moe is None or moe.decoder_router != "language_group":
        return spec
    moe = moe.model_copy(update={"decoder_router": "token", "num_groups": None})
    model = spec.model.model_copy(update={"moe": moe})
    return spec.model_copy(update={"model": model, "language_groups": None})


def _without_groups(source: ModelSource, export: Export) -> tuple[ModelSource, tuple[str, ...]]:
    """Return the model to export, for the languages of one group only, and its target languages.

    Raises:
        ConfigError: The model has groups and none is chosen, or it has no such group.
    """
    spec, choice = source.spec, export.target_group
    if choice is None:
        if spec.language_groups is not None:
            # No group helps a model with a vocabulary that the format cannot express.
            entries = entries_of(source.tokenizer, source.origin)
            refuse_unknown_pieces(source.origin, entries, chosen_layout(entries), to=export.to)
            raise ConfigError(
                f"{source.origin} routes by language group (model.moe.decoder_router), which "
                f"{export.to} cannot; for the languages of one group it is an ordinary router: "
                f"pass --target-group from {described_groups(spec)}."
            )
        return source, spec.languages
    group = chosen_group(source.origin, spec, choice)
    reduced = _spec_of_one_group(spec)
    group_weights = tensor_shapes(spec).keys() - tensor_shapes(reduced).keys()
    weights = {name.removesuffix("group_weight") + "weight": name for name in group_weights}
    tensors = OneGroupTensors(source.tensors, group, weights)
    exported = ModelSource(reduced, source.tokenizer, tensors, source.record)
    return exported, tuple(languages_of_group(spec, group))


@dataclass(frozen=True)
class OneGroupTensors:
    """The tensors of a model with language-group routers, reduced to one group."""

    tensors: Tensors
    group: int
    group_weights: Mapping[str, str]
    """Name of a router's weight → name of the stacked weights of its groups."""

    @property
    def origin(self) -> Path:
        """Return the checkpoint that holds the tensors."""
        return self.tensors.origin

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(set(self.tensors.names()) - set(self.group_weights.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.tensors.shape(name)

    def read(self, name: str) -> Tensor:
        """Return one tensor; a router has the weight of the group."""
        value = self.tensors.read(name)
        if name not in self.group_weights:
            return value
        return (value + self.tensors.read(self.group_weights[name])[self.group]) / 2


def chosen_group(origin: Path, spec: ModelSpec, choice: str) -> int:
    """Return the group that ``--target-group`` names by its number or by a language.

    Raises:
        ConfigError: The model has no groups, or no such group or language.
    """
    if spec.language_groups is None:
        raise ConfigError(f"{origin} has no language groups. Leave out --target-group.")
    if choice in map(str, range(spec.num_groups)):
        return int(choice)
    code = None if choice.isdecimal() else find_code(choice, spec.languages)
    if code is None:
        raise ConfigError(
            f"--target-group {choice}: {origin} has the groups {described_groups(spec)}. Choose "
            "one by its number or a language."
        )
    return spec.language_groups[spec.languages.index(code)]


def languages_of_group(spec: ModelSpec, group: int) -> list[str]:
    """Return the codes of the languages of a group."""
    groups = spec.language_groups or ()
    return [code for code, own in zip(spec.languages, groups, strict=True) if own == group]


def described_groups(spec: ModelSpec) -> str:
    """Return the groups with their languages, for example ``0 (de, en), 1 (ru)``."""
    return ", ".join(
        f"{group} ({', '.join(languages_of_group(spec, group))})"
        for group in range(spec.num_groups)
    )
