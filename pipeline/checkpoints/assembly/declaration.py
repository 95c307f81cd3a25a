"""Describe an assembly: the source of each part, and the rules; and plan it.

A file declares it for the command line:

    [sources]
    dense = "runs/dense"                  # of ours or of other software
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

Paths are relative to the current directory, as on a command line. The stage ``upcycle`` of a plan
declares its inputs and the model of its recipe. :func:`plan_assembly` derives the shape of the
result from the sources.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.artifacts.artifact import Artifact, finished_manifest, open_artifact
from pipeline.artifacts.tokenizer import (
    TokenizerFiles,
    read_tokenizer_files,
    tokenizer_folder,
    with_languages,
)
from pipeline.checkpoints.assembly.rules import PARTS, AssemblyPlan, Part
from pipeline.checkpoints.assembly.vocabulary import RowPlan, plan_rows
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.importing import open_model
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.documents import read_toml
from pipeline.config.recipe import describe_change
from pipeline.config.settings import Settings, describe_validation
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import canonical, distinct_codes, find_code
from pipeline.model.moe.language_groups import read_groups
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
    """Settings of ``[model]`` that differ from the sources, for example ``encoder_layers``."""
    experts: MoEConfig | None = None
    """Experts of the result. None: the experts of the sources."""
    upcycling: UpcyclingConfig = UpcyclingConfig()
    groups: str = ""
    """Path of a groups artifact, for a language-group router that no source has."""
    tokenizer: str = ""
    """Path of another vocabulary: a tokenizer artifact, or a checkpoint that contains one."""
    languages: dict[str, str] = Field(default_factory=dict)
    """New language → the language of its row and group, for example ``ru``, or ``fresh``."""
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


def plan_assembly(assembly: Assembly, *, model: ModelConfig | None = None) -> AssemblyPlan:
    """Open everything that a declaration names and plan the assembly; write nothing.

    Without ``model``, the result is the model of the sources, with the settings that the
    declaration changes.

    Raises:
        UserError: Something named cannot be used, or does not fit.
    """
    opened = {name: open_model(Path(path)) for name, path in assembly.sources.items()}
    named = {part: getattr(assembly.parts, part) for part in PARTS}
    present = {part: opened[name] for part, name in named.items() if name != FRESH}
    inputs = {str(part): source.record for part, source in present.items()}
    tokenizer = groups = None
    if assembly.tokenizer:
        vocabulary = _open_vocabulary(Path(assembly.tokenizer))
        inputs["tokenizer"] = vocabulary.as_input
        tokenizer = read_tokenizer_files(tokenizer_folder(vocabulary))
    if assembly.groups:
        artifact = open_artifact(Path(assembly.groups), kind="groups")
        inputs["groups"] = artifact.as_input
        groups = read_groups(artifact)
    embeddings = present.get("embeddings")
    known = embeddings.tokenizer.build().languages if embeddings else ()
    origin = embeddings.origin if embeddings else None
    assembly = _in_codes(assembly, known, tokenizer, origin=origin)
    tokenizer = _with_new_languages(assembly, embeddings, tokenizer)
    named_likes = {code: like for code, like in assembly.languages.items() if like != FRESH}
    resembling = {code: find_code(like, known) or like for code, like in named_likes.items()}
    model = model or _declared_model(assembly, present)
    rows = _planned_rows(embeddings, tokenizer, resembling)
    refuse_misfit(present, model)
    built = tokenizer.build()
    numbers = known_groups(present.get("decoder"), groups, resembling=resembling)
    spec = make_spec(
        model=model,
        vocabulary_size=built.size,
        pad_id=built.pad_id,
        languages=built.languages,
        language_groups=groups_of_languages(model, languages=built.languages, groups=numbers),
        tag_scheme=next(iter(present.values())).spec.tag_scheme,
        **marks_of_vocabulary(model, built),
    )
    return AssemblyPlan(
        spec,
        present,
        assembly.upcycling,
        tokenizer,
        rows=rows,
        precision=assembly.precision,
        inputs=inputs,
    )


def _declared_model(assembly: Assembly, present: Mapping[Part, ModelSource]) -> ModelConfig:
    """Return the model of the sources with the settings that a declaration changes."""
    models = {part: source.spec.model for part, source in present.items()}
    settings = next(iter(models.values())).model_dump()
    if "encoder" in models:
        settings["encoder_layers"] = models["encoder"].encoder_layers
        settings["converter_layers"] = models["encoder"].converter_layers
    if "decoder" in models:
        settings["decoder_layers"] = models["decoder"].decoder_layers
    # The decoder decides the routing; the experts of the encoder must be the same.
    bodies = [models[part] for part in ("decoder", "encoder") if part in models]
    experts = [model.moe for model in bodies if model.moe is not None]
    free = {"decoder_router", "num_groups"}
    # Some settings of language modules change what the same tensors compute.
    modules = [body.language_modules for body in bodies if body.language_modules is not None]
    differ = {
        "experts": assembly.experts is None
        and len({moe.model_dump_json(exclude=free) for moe in experts}) > 1,
        "model.language_modules": "language_modules" not in assembly.model
        and any(one != modules[0] for one in modules),
    }
    for section in filter(differ.get, differ):
        what = section.removeprefix("model.").replace("_", " ")
        raise ConfigError(
            f"{present['encoder'].origin} and {present['decoder'].origin} have different {what}: "
            f"declare the {what} of the model in [{section}]."
        )
    if bodies:
        settings["language_modules"] = modules[0].model_dump() if modules else None
    moe = next((found.model_dump() for found in experts), None)
    if assembly.experts is not None:
        # A decoder without experts does not get the router of the encoder's source.
        routes = "decoder" in models and models["decoder"].moe is not None
        stays = {name: value for name, value in (moe or {}).items() if routes or name not in free}
        moe = {**stays, **assembly.experts.model_dump(exclude_unset=True)}
    try:
        model = ModelConfig.model_validate({**settings, "moe": moe, **assembly.model})
    except ValidationError as error:
        raise ConfigError(
            f"The model that is declared: {describe_validation(error, ModelConfig)}"
        ) from error
    if assembly.experts and (problem := model.untrainable_experts(section="experts")):
        raise ConfigError(f"The model that is declared: {problem}.")
    return model


def refuse_misfit(present: Mapping[Part, ModelSource], model: ModelConfig) -> None:
    """Check that the tensors of all sources compute the same in the model as before.

    Raises:
        ConfigError: A setting differs; names the source and the setting.
    """
    first = next(present[part] for part in PARTS if part in present)
    keeps_rows = "embeddings" in present
    free = FREE if keeps_rows else FREE | FREE_WITH_NEW_ROWS
    for source in present.values():
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
        fingerprints = {one.tokenizer.build().fingerprint for one in (first, source)}
        if keeps_rows and len(fingerprints) > 1:
            raise ConfigError(
                f"The tokenizers of {first.origin} and {source.origin} differ: modules can be "
                "assembled only from models with one vocabulary."
            )


def known_groups(
    decoder: ModelSource | None, given: Mapping[str, int] | None, *, resembling: Mapping[str, str]
) -> dict[str, int] | None:
    """Return language → group: of the decoder, or else of a groups artifact; None without either.

    ``given`` is a groups artifact's language → group; ``resembling`` is new language → the language
    that gives it a group.

    Raises:
        ConfigError: The decoder was trained with other groups than the artifact has.
    """
    trained: dict[str, int] = {}
    if decoder is not None and decoder.spec.language_groups is not None:
        trained = dict(zip(decoder.spec.languages, decoder.spec.language_groups, strict=True))
        for code, group in trained.items():
            if given is not None and given.get(code) != group:
                raise ConfigError(
                    f"The groups given differ from the groups that {decoder.origin} was trained "
                    f"with ({code}): leave the groups out."
                )
    groups = dict(given or trained)
    for code, like in resembling.items():
        if like in groups:
            groups.setdefault(code, groups[like])
    return groups or None


def _in_codes(
    assembly: Assembly, known: Sequence[str], named: TokenizerFiles | None, *, origin: Path | None
) -> Assembly:
    """Return a declaration with new languages by the codes that corpora have, gsw for gsw_Latn.

    Raises:
        ConfigError: It names a new language twice, or one that the model of ``origin`` knows.
    """
    languages: dict[str, str] = {}
    for spelling, like in assembly.languages.items():
        meant = find_code(spelling, known)
        taken = {canonical(spelling)} & {*known, *languages}  # in another script
        code = find_code(spelling, named.description.languages) if named else None
        code = code or distinct_codes([spelling, *taken])[spelling]
        if meant is not None and code in known:
            raise ConfigError(
                f"The model of {origin} already knows the language {spelling!r}, as {meant!r}. "
                "Leave it out of [languages]."
            )
        if code in languages:
            raise ConfigError(f"[languages] names {code!r} twice. Leave out {spelling!r}.")
        languages[code] = like
    return assembly.model_copy(update={"languages": languages})


def _with_new_languages(
    assembly: Assembly, embeddings: ModelSource | None, named: TokenizerFiles | None
) -> TokenizerFiles:
    """Return the named tokenizer, or else the embeddings' tokenizer with the new languages."""
    files = named if named is not None or embeddings is None else embeddings.tokenizer
    if files is None:
        raise ConfigError(
            "The embeddings start fresh, but no vocabulary is named. Name the folder of a "
            "tokenizer as `tokenizer`."
        )
    languages = files.build().languages
    added = [code for code in assembly.languages if code not in languages]
    if added and named is not None:
        raise ConfigError(
            f"The named tokenizer has no language {added[0]!r}. Train it on a corpus with that "
            "language, or leave it out of [languages]."
        )
    return with_languages(files, added) if added else files


def _open_vocabulary(path: Path) -> Artifact:
    """Open an artifact that contains a tokenizer: a tokenizer, a checkpoint or shards."""
    manifest = finished_manifest(path, wanted="tokenizer")
    if manifest.kind not in ("tokenizer", "checkpoint", "shards"):
        raise ArtifactError(
            f"{path} contains no tokenizer. Name a tokenizer artifact, or a checkpoint that has "
            "one."
        )
    return open_artifact(path, kind=manifest.kind)


def _planned_rows(
    embeddings: ModelSource | None, tokenizer: TokenizerFiles, resembling: Mapping[str, str]
) -> RowPlan | None:
    """Return the plan of the embedding rows; None if the vocabulary stays or starts fresh."""
    if embeddings is None:
        return None
    old, new = embeddings.tokenizer.build(), tokenizer.build()
    if old.fingerprint == new.fingerprint:
        return None
    return plan_rows(old, new, resembling=resembling)
