"""Describe an assembly: the source of each part, and the rules; and plan it.

A file declares it for the command line, and a recipe with inputs for plans:

    [sources]
    dense = "runs/dense"                  # a checkpoint of ours, or one of other software
    moe_lgr = "runs/moe_lgr"

    [parts]                               # the name of a source, or "fresh"
    embeddings = "dense"
    encoder = "dense"
    decoder = "moe_lgr"

    [experts]                             # as [model.moe] of a recipe
    num_experts = 32
    decoder_router = "language_group"

    [upcycling]                           # as [upcycling] of a recipe
    mask_ratio = 0.1

Paths are relative to the current directory, as on a command line. :func:`plan_parts` derives the
shape of the result from the sources; both forms meet there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, ValidationError, model_validator

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.manifest import InputRecord, read_manifest
from pipeline.artifacts.mixture import read_groups
from pipeline.artifacts.tokenizer import (
    TokenizerFiles,
    read_tokenizer_files,
    tokenizer_folder,
    with_languages,
)
from pipeline.checkpoints.assembly.rules import PARTS, Blueprint, Part
from pipeline.checkpoints.assembly.vocabulary import RowPlan, plan_rows
from pipeline.checkpoints.opening import open_model
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.config.documents import read_toml
from pipeline.config.recorded import describe_change
from pipeline.config.settings import Settings, describe_validation
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import find_code
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import groups_of_languages, make_spec, marks_of_vocabulary

FRESH = "fresh"
"""The source of a part that is initialized instead of copied."""
FREE = {
    "moe",
    "encoder_layers",
    "decoder_layers",
    "initialization",
    "language_modules",
    "converter_layers",
}
"""Settings of a model in which parts of one model may differ: settings of modules that an assembly
makes or leaves out, and of ``converter_layers``, which have no weights."""
FREE_WITH_NEW_ROWS = {"embedding", "front"}


Sources: TypeAlias = Mapping[Part, ModelSource | None]
"""The source of each part; None: it starts fresh."""


class PartsDeclaration(Settings):
    """The source of each part of the model, or ``fresh``."""

    embeddings: str
    encoder: str
    decoder: str


class Assembly(Settings):
    """A declared assembly."""

    sources: dict[str, str]
    """Name → path of a checkpoint."""
    parts: PartsDeclaration
    model: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``[model]`` that differ from the sources, as ``encoder_layers`` of a fresh
    one."""
    experts: MoEConfig | None = None
    """Experts of the result. None: the experts of the sources."""
    upcycling: UpcyclingConfig = UpcyclingConfig()
    groups: str = ""
    """Path of a groups artifact, for a language-group router that no source has."""
    tokenizer: str = ""
    """Path of another vocabulary: a tokenizer artifact, or a checkpoint that contains one."""
    languages: dict[str, str] = Field(default_factory=dict)
    """New language → a language that gives it a row and a group, or ``fresh``."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the written tensors."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = set(self.parts.model_dump().values())
        unknown = sorted(named - set(self.sources) - {FRESH})
        if unknown:
            known = ", ".join(sorted(self.sources)) or "none"
            raise ValueError(f"parts name {unknown[0]!r}, but the sources are: {known}")
        unused = sorted(set(self.sources) - named)
        if unused:
            raise ValueError(f"no part comes from the source {unused[0]!r}: leave it out")
        if not named - {FRESH}:
            raise ValueError("all parts start fresh: train such a model from scratch (pretrain)")
        if "moe" in self.model:
            raise ValueError("model.moe belongs to [experts]: move it there")
        return self


def read_assembly(path: str) -> Assembly:
    """Read a declaration.

    Raises:
        ConfigError: It cannot be read, or it is invalid.
    """
    try:
        return Assembly.model_validate(read_toml(Path(path)))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_validation(error, Assembly)}") from error


@dataclass(frozen=True)
class Parts:
    """A planned assembly: the blueprint, its sources, and the tokenizer of the result."""

    blueprint: Blueprint
    sources: Sources
    tokenizer: TokenizerFiles
    inputs: dict[str, InputRecord] = field(default_factory=dict)
    """Records of all inputs of a declaration, for a manifest."""

    @property
    def names(self) -> dict[Part, str]:
        """Return the name of each part's source, to print."""
        return {
            part: source.origin.name if source is not None else "–"
            for part, source in self.sources.items()
        }

    def identity(self) -> dict[str, Any]:
        """Return JSON of everything that the bytes of the result depend on."""
        blueprint = self.blueprint
        return {
            "spec": blueprint.spec.model_dump(mode="json"),
            "config": blueprint.config.model_dump(mode="json"),
            "precision": blueprint.precision,
            "rows": blueprint.rows and blueprint.rows.sources,
            "plan": [[entry.target, entry.source, entry.rule] for entry in blueprint.plan],
            "sources": {
                part: source and source.record.digest for part, source in self.sources.items()
            },
        }


def plan_declared(assembly: Assembly) -> Parts:
    """Open everything that a declaration names and plan the assembly; write nothing.

    Raises:
        UserError: Something named cannot be used, or does not fit.
    """
    opened = {name: open_model(Path(path)) for name, path in assembly.sources.items()}
    sources: Sources = {part: opened.get(getattr(assembly.parts, part)) for part in PARTS}
    inputs = {str(part): source.record for part, source in sources.items() if source is not None}
    tokenizer = groups = None
    if assembly.tokenizer:
        vocabulary = _vocabulary(Path(assembly.tokenizer))
        inputs["tokenizer"] = vocabulary.as_input
        tokenizer = read_tokenizer_files(tokenizer_folder(vocabulary))
    if assembly.groups:
        groups = open_artifact(Path(assembly.groups), kind="groups")
        inputs["groups"] = groups.as_input
    tokenizer = _with_new_languages(assembly, sources, tokenizer)
    resembling = {code: like for code, like in assembly.languages.items() if like != FRESH}
    return plan_parts(
        sources,
        model=_declared_model(assembly, sources),
        config=assembly.upcycling,
        tokenizer=tokenizer,
        rows=_rows(assembly, sources["embeddings"], tokenizer, resembling),
        groups=groups,
        resembling=resembling,
        precision=assembly.precision,
        inputs=inputs,
    )


def plan_parts(
    sources: Sources,
    *,
    model: ModelConfig,
    config: UpcyclingConfig,
    tokenizer: TokenizerFiles,
    rows: RowPlan | None = None,
    groups: Artifact | None = None,
    resembling: Mapping[str, str] | None = None,
    precision: str = "float32",
    inputs: dict[str, InputRecord] | None = None,
) -> Parts:
    """Plan the whole assembly of opened sources; write nothing.

    Args:
        sources: The source of each part.
        model: The model of the result.
        config: The settings of upcycling.
        tokenizer: The tokenizer of the result.
        rows: The sources of the embedding rows, if the vocabulary changes.
        groups: The language groups, for a language-group router that no source has.
        resembling: New language → the language that gives it a row and a group.
        precision: Type of the written tensors.
        inputs: Records of all inputs.

    Raises:
        UserError: The sources do not fit each other or the model.
    """
    present = {part: source for part, source in sources.items() if source is not None}
    base = next(iter(present.values())).spec
    refuse_misfit(present, model)
    built = tokenizer.build()
    given = None if groups is None else read_groups(groups)
    numbers = known_groups(present.get("decoder"), given, resembling=resembling or {})
    spec = make_spec(
        model=model,
        vocabulary_size=built.size,
        pad_id=built.pad_id,
        languages=built.languages,
        language_groups=groups_of_languages(model, languages=built.languages, groups=numbers),
        tag_scheme=base.tag_scheme,
        **marks_of_vocabulary(model, built),
    )
    blueprint = Blueprint(spec, tensors_of(sources), config, rows=rows, precision=precision)
    return Parts(blueprint, sources, tokenizer, inputs or {})


def tensors_of(sources: Sources) -> dict[Part, Tensors | None]:
    """Return the weights of each part's source."""
    return {part: None if one is None else one.tensors for part, one in sources.items()}


def _declared_model(assembly: Assembly, sources: Sources) -> ModelConfig:
    """Return the model of the sources with the settings that a declaration changes."""
    present = {part: source for part, source in sources.items() if source is not None}
    settings: dict[str, Any] = next(iter(present.values())).spec.model.model_dump()
    for part, name in (("encoder", "encoder_layers"), ("decoder", "decoder_layers")):
        if part in present:
            settings[name] = getattr(present[part].spec.model, name)
    moe = assembly.experts or _experts_of(present)
    try:
        return ModelConfig.model_validate(
            {**settings, "moe": moe and moe.model_dump(), **assembly.model}
        )
    except ValidationError as error:
        raise ConfigError(
            f"The model that is declared: {describe_validation(error, ModelConfig)}"
        ) from error


def refuse_misfit(present: Mapping[Part, ModelSource], model: ModelConfig) -> None:
    """Check that the tensors of all sources compute the same in the model as before.

    Raises:
        ConfigError: A setting differs; names the source and the setting.
    """
    first = next(present[part] for part in PARTS if part in present)
    for source in present.values():
        free = FREE if "embeddings" in present else FREE | FREE_WITH_NEW_ROWS
        change = describe_change(
            source.spec.model.model_dump(exclude=free), model.model_dump(exclude=free)
        )
        if change is not None:
            raise ConfigError(
                f"{source.origin} does not fit the model that is declared (model.{change}): "
                "modules keep their sizes and conventions."
            )
        if source.spec.tag_scheme != first.spec.tag_scheme:
            raise ConfigError(
                f"{source.origin} was trained with other tags than {first.origin} (tag_scheme: "
                f"{source.spec.tag_scheme} → {first.spec.tag_scheme}): name sources of one scheme."
            )
        if (
            "embeddings" in present
            and source.tokenizer.build().fingerprint != first.tokenizer.build().fingerprint
        ):
            raise ConfigError(
                f"The tokenizers of {first.origin} and {source.origin} differ: modules can be "
                "assembled only from models with one vocabulary."
            )


def _experts_of(present: Mapping[Part, ModelSource]) -> MoEConfig | None:
    """Return the experts of the sources, which must agree; the decoder decides the routing."""
    found = {
        part: moe
        for part in ("encoder", "decoder")
        if part in present and (moe := present[part].spec.model.moe) is not None
    }
    of_decoder = {"decoder_router", "num_groups"}
    if len({moe.model_dump_json(exclude=of_decoder) for moe in found.values()}) > 1:
        raise ConfigError(
            f"{present['encoder'].origin} and {present['decoder'].origin} have different experts: "
            "say in [experts] what the model is to have."
        )
    return found.get("decoder", found.get("encoder"))


def known_groups(
    decoder: ModelSource | None, given: Mapping[str, int] | None, *, resembling: Mapping[str, str]
) -> dict[str, int] | None:
    """Return language → group: the decoder's, or else those given; None without either.

    Args:
        decoder: The source of the decoder.
        given: Language → group, from a groups artifact.
        resembling: New language → the language that gives it a group.

    Raises:
        ConfigError: The decoder was trained with other groups than those given.
    """
    trained: dict[str, int] = {}
    if decoder is not None and decoder.spec.language_groups is not None:
        trained = dict(zip(decoder.spec.languages, decoder.spec.language_groups, strict=True))
    for code, group in trained.items():
        if given is not None and given.get(code) != group:
            raise ConfigError(
                f"The groups given differ from those {decoder and decoder.origin} was trained with "
                f"({code}): leave the groups out."
            )
    found = dict(given or trained)
    for code, like in resembling.items():
        if like in found:
            found.setdefault(code, found[like])
    return found or None


def _with_new_languages(
    assembly: Assembly, sources: Sources, named: TokenizerFiles | None
) -> TokenizerFiles:
    """Return the named tokenizer, or else the embeddings' tokenizer with the new languages."""
    embeddings = sources["embeddings"]
    files = named if embeddings is None or named is not None else embeddings.tokenizer
    if files is None:
        raise ConfigError(
            "The embeddings start fresh, but no vocabulary is named. Name the folder of a "
            "tokenizer as `tokenizer`."
        )
    languages = files.build().languages
    added = [code for code in assembly.languages if code not in languages]
    if added and assembly.tokenizer:
        raise ConfigError(
            f"The named tokenizer has no language {added[0]!r}. Train it on a corpus with that "
            "language, or leave it out of [languages]."
        )
    return with_languages(files, added) if added else files


def _vocabulary(path: Path) -> Artifact:
    """Open an artifact that contains a tokenizer: a tokenizer, a checkpoint or shards."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind not in ("tokenizer", "checkpoint", "shards"):
        raise ArtifactError(
            f"{path} contains no tokenizer. Name a tokenizer artifact, or a checkpoint that has "
            "one."
        )
    return open_artifact(path, kind=manifest.kind)


def _rows(
    assembly: Assembly,
    embeddings: ModelSource | None,
    tokenizer: TokenizerFiles,
    resembling: Mapping[str, str],
) -> RowPlan | None:
    """Return the plan of the embedding rows; None if the vocabulary stays or starts fresh."""
    if embeddings is None:
        return None
    old, new = embeddings.tokenizer.build(), tokenizer.build()
    for code in assembly.languages:
        known = find_code(code, old.languages)
        if known is not None:
            raise ConfigError(
                f"The model of {embeddings.origin} already knows the language {code!r}, as "
                f"{known!r}. Leave it out of [languages]."
            )
    if old.fingerprint == new.fingerprint:
        return None
    return plan_rows(old, new, resembling=resembling)
