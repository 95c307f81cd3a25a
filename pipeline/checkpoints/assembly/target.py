"""Derive the shape of an assembled model from its sources and the declaration.

A recipe can stand for a source: its model has a shape and no values, so that an assembly can be
planned before anything is trained.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from pipeline.artifacts.manifest import InputRecord, json_digest
from pipeline.artifacts.tokenizer import (
    SPECIALS,
    ByteVocabulary,
    Numbering,
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
)
from pipeline.checkpoints.assembly.declaration import FRESH, Assembly, SourceDeclaration
from pipeline.checkpoints.assembly.rules import PARTS, Part
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.config.recipe import load_recipe
from pipeline.config.recorded import describe_change
from pipeline.config.settings import describe_validation
from pipeline.errors import ConfigError
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec, groups_of_languages, make_spec, marks_of_vocabulary

FREE = {
    "moe",
    "encoder_layers",
    "decoder_layers",
    "initialization",
    "language_modules",
    "converter_layers",
}
"""Settings of a model in which parts of one model may differ: those of modules that an assembly
makes or leaves out, and of ``converter_layers``, which have no weights."""
FREE_WITH_NEW_ROWS = {"embedding", "front"}


def target_spec(
    sources: Mapping[Part, ModelSource | None],
    assembly: Assembly,
    *,
    tokenizer: Tokenizer,
    groups: Mapping[str, int] | None,
) -> ModelSpec:
    """Return the declared model.

    Args:
        sources: The source of each part; None: it starts fresh.
        assembly: The declaration.
        tokenizer: The tokenizer of the result.
        groups: Language → group, from the groups artifact if one is named.

    Raises:
        ConfigError: The sources do not fit each other or the declaration.
    """
    present = {part: source for part, source in sources.items() if source is not None}
    base = next(present[part] for part in PARTS if part in present)
    settings: dict[str, Any] = base.spec.model.model_dump()
    for part, name in (("encoder", "encoder_layers"), ("decoder", "decoder_layers")):
        if part in present:
            settings[name] = getattr(present[part].spec.model, name)
    moe = assembly.experts or _experts_of(present)
    settings |= {"moe": moe and moe.model_dump(), **assembly.model}
    try:
        model = ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(
            f"The model that is declared: {describe_validation(error, ModelConfig)}"
        ) from error
    refuse_misfit(present, model)
    resembling = {code: like for code, like in assembly.languages.items() if like != FRESH}
    found = known_groups(present.get("decoder"), groups, resembling=resembling)
    if found is None and model.moe is not None and model.moe.decoder_router == "language_group":
        raise ConfigError(
            "The decoder is to route by language group, and no source knows the groups: name a "
            "groups artifact as `groups`."
        )
    return make_spec(
        model=model,
        vocabulary_size=tokenizer.size,
        pad_id=tokenizer.pad_id,
        languages=tokenizer.languages,
        language_groups=groups_of_languages(model, languages=tokenizer.languages, groups=found),
        tag_scheme=base.spec.tag_scheme,
        **marks_of_vocabulary(model, tokenizer),
    )


def refuse_misfit(present: Mapping[Part, ModelSource], model: ModelConfig) -> None:
    """Check that the tensors of all sources compute in the model what they computed before.

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
    decoder: ModelSource | None,
    given: Mapping[str, int] | None,
    *,
    resembling: Mapping[str, str],
) -> dict[str, int] | None:
    """Return language → group: the decoder's, or else those given; None without either.

    Args:
        decoder: The source of the decoder.
        given: Language → group, from a groups artifact.
        resembling: New language → the language whose group it joins.

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


_LANGUAGES = tuple(f"l{index:02d}" for index in range(32))
"""Placeholder languages; every group has at least one of them."""


class ShapesAlone:
    """The names and shapes of a model that has no values."""

    def __init__(self, spec: ModelSpec, *, recipe: str) -> None:
        self.origin = Path(recipe)
        self._shapes = {name: tuple(shape) for name, shape in tensor_shapes(spec).items()}

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> NoReturn:
        """Raise ConfigError, because there are no values."""
        raise ConfigError(
            f"{self.origin} is the shape of a recipe's model and has no {name}: name a checkpoint."
        )


def recipe_source(source: SourceDeclaration) -> ModelSource:
    """Return the model of a recipe as a source without values.

    Raises:
        ConfigError: There is no such recipe, or its number of language groups is not known.
    """
    recipe = load_recipe(source.recipe)
    moe = recipe.model.moe
    num_groups = 0
    if moe is not None and moe.decoder_router == "language_group":
        num_groups = source.groups or moe.num_groups or 0
        if not 0 < num_groups <= len(_LANGUAGES):
            raise ConfigError(
                f"Recipe {recipe.name!r} does not say how many language groups it has: say "
                f"`groups`, from 2 to {len(_LANGUAGES)}, of the source that names it."
            )
    spec = make_spec(
        model=recipe.model,
        vocabulary_size=source.vocabulary_size or recipe.tokenizer.ids,
        output_size=recipe.tokenizer.output_ids,
        pad_id=SPECIALS["pad"],
        languages=_LANGUAGES,
        language_token_ids=(0,) * len(_LANGUAGES) if recipe.model.converter_layers else None,
        language_groups=tuple(index % num_groups for index in range(len(_LANGUAGES)))
        if num_groups
        else None,
    )
    return ModelSource(
        spec=spec,
        tokenizer=_placeholder_tokenizer(spec),
        tensors=ShapesAlone(spec, recipe=recipe.name),
        record=InputRecord(
            kind="recipe", path=recipe.name, digest=json_digest(spec.model_dump(mode="json"))
        ),
    )


def _placeholder_tokenizer(spec: ModelSpec) -> TokenizerFiles:
    """Return a vocabulary without pieces; two of the same size are equal."""
    pieces = (*SPECIALS.values(), *[None] * (ByteVocabulary.size - len(SPECIALS)))
    numbering = Numbering(
        size=spec.vocabulary_size,
        **SPECIALS,
        pieces=pieces,
        language_tokens={
            code: spec.vocabulary_size - 1 - index for index, code in enumerate(spec.languages)
        },
    )
    description = TokenizerDescription(
        kind="bytes",
        languages=spec.languages,
        language_token_scheme="underscores",
        numbering=numbering,
    )
    return TokenizerFiles(description, None)
