"""Specification of a model: the recipe's settings and what tokenizer and groups determine.

The spec is fixed when a model is initialized, and its checkpoints store it.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ValidationError, model_validator

from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.batching.settings import TagScheme
from pipeline.config.settings import Route, Settings, describe_validation, whole
from pipeline.errors import ConfigError
from pipeline.languages import meant_code
from pipeline.model.settings import ModelConfig

Id = Annotated[int, whole(0, 2**31 - 1)]
Side = Literal["encoder", "decoder"]


class ModelSpec(Settings):
    """Complete specification of a model: building one needs no other file."""

    model: ModelConfig
    vocabulary_size: Annotated[int, whole(1, 2**31 - 1)]
    pad_id: Id
    languages: tuple[str, ...]
    """Language codes, in the order of the language indices of batches."""
    language_groups: tuple[int, ...] | None = None
    """Group of each language. None without a language-group router."""
    tag_scheme: TagScheme = "src-tgt"
    language_token_ids: tuple[Id, ...] | None = None
    """Id of each language's token, for ``model.converter_layers`` and for front ends that use it
    (Ada-MSHA's language vector)."""
    output_size: Annotated[int, whole(1, 2**31 - 1)] | None = None
    """Number of ids, from 0 on, that translations use. None: all ids of the vocabulary."""
    lone_ids: tuple[Id, ...] | None = None
    """Ids that are a word each (white space, specials, language tokens), for front ends that use
    them (WSF)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pad_id >= self.vocabulary_size:
            raise ValueError(
                f"pad_id {self.pad_id} lies beyond vocabulary_size {self.vocabulary_size}"
            )
        if self.output_size is not None and not (
            self.pad_id < self.output_size <= self.vocabulary_size
        ):
            raise ValueError(
                f"output_size {self.output_size} does not lie above pad_id {self.pad_id} and "
                f"within vocabulary_size {self.vocabulary_size}"
            )
        is_one_hot = self.model.embedding.input.startswith("one_hot")
        if is_one_hot and self.vocabulary_size > self.model.width:
            raise ValueError(
                f"embedding.input is one_hot, and the vocabulary of {self.vocabulary_size:,} does "
                f"not fit a width of {self.model.width:,}: make model.width larger, or the "
                "vocabulary smaller"
            )
        if not self.languages or len(set(self.languages)) < len(self.languages):
            raise ValueError("languages must be one or more, each named once")
        marks = (*(self.language_token_ids or ()), *(self.lone_ids or ()))
        if not all(0 <= index < self.vocabulary_size for index in marks):
            raise ValueError(f"an id lies beyond vocabulary_size {self.vocabulary_size}")
        if self.language_token_ids is not None and len(self.language_token_ids) != len(
            self.languages
        ):
            raise ValueError("language_token_ids must give every language an id")
        if self.model.converter_layers and self.language_token_ids is None:
            raise ValueError("model.converter_layers needs language_token_ids")
        for variant in self.model.variants:
            variant.check_languages(self.languages)
        groups, moe = self.language_groups, self.model.moe
        if groups is None and moe is not None and moe.needs_groups:
            raise ValueError(
                f"decoder_router is {moe.decoder_router}, but there are no language_groups"
            )
        if groups is not None and (
            len(groups) != len(self.languages) or set(groups) != set(range(len(set(groups))))
        ):
            raise ValueError(
                "language_groups must give every language a group, numbered from 0 without gaps"
            )
        return self

    @property
    def languages_with_modules(self) -> tuple[str, ...]:
        """Return the languages that the language-specific route serves; all without modules."""
        modules = self.model.language_modules
        return self.languages if modules is None else modules.languages_among(self.languages)

    def languages_of(self, route: Route) -> tuple[str, ...]:
        """Return the languages that a route serves."""
        return self.languages_with_modules if route == "specific" else self.languages

    @property
    def num_groups(self) -> int:
        """Return the number of language groups; 0 without a language-group router."""
        return 0 if self.language_groups is None else max(self.language_groups) + 1


def make_spec(**values: Any) -> ModelSpec:
    """Return a validated spec of the given fields, language modules in codes of the languages.

    Raises:
        ConfigError: the settings of recipe, tokenizer and groups contradict each other.
    """
    values["model"] = in_codes(values["model"], values["languages"])
    try:
        return ModelSpec(**values)
    except ValidationError as error:
        raise ConfigError(f"The recipe's model: {describe_validation(error, ModelSpec)}") from error


def in_codes(model: ModelConfig, languages: Sequence[str]) -> ModelConfig:
    """Return a model with language modules in codes of these languages, sorted."""
    modules = model.language_modules
    if modules is None or not modules.languages:
        return model
    meant = {meant_code(code, languages) for code in modules.languages}
    modules = modules.model_copy(update={"languages": tuple(sorted(meant))})
    return model.model_copy(update={"language_modules": modules})


def marks_of_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of a spec that depend on the vocabulary's content, not only on its size.

    Raises:
        ConfigError: a piece mixes white space and text, and the front end needs word boundaries.
    """
    marks: dict[str, Any] = {}
    if tokenizer.output_size is not None:
        marks["output_size"] = tokenizer.output_size
    if model.converter_layers:
        marks["language_token_ids"] = tuple(map(tokenizer.language_token_id, tokenizer.languages))
    for variant in model.variants:
        marks |= variant.marks(tokenizer)
    return marks


def placeholder_spec(
    model: ModelConfig,
    *,
    vocabulary_size: int,
    num_groups: int,
    num_languages: int = 1,
    output_size: int | None = None,
) -> ModelSpec:
    """Return a spec with placeholder languages, at least one per group, to count parameters."""
    named = () if model.language_modules is None else model.language_modules.languages or ()
    unnamed = max(num_groups, num_languages, 1) - len(named)
    languages = (*named, *(f"l{index}" for index in range(unnamed)))
    return make_spec(
        model=model,
        vocabulary_size=vocabulary_size,
        output_size=output_size,
        pad_id=0,
        languages=languages,
        language_groups=tuple(i % num_groups for i in range(len(languages)))
        if num_groups
        else None,
        language_token_ids=(0,) * len(languages),
        lone_ids=(0,),
    )


def groups_of_languages(
    model: ModelConfig, *, languages: tuple[str, ...], groups: dict[str, int] | None
) -> tuple[int, ...] | None:
    """Return the group of each language, in order; None if the model does not route by group.

    Raises:
        ConfigError: groups are needed but missing, fewer than two, or without one of the languages.
    """
    if model.moe is None or not model.moe.needs_groups:
        return None
    if groups is None:
        raise ConfigError(
            "The recipe routes by language group (model.moe.decoder_router), but no groups "
            "artifact is given. Name one (--groups, or `groups` of a declaration)."
        )
    missing = [code for code in languages if code not in groups]
    if missing:
        raise ConfigError(
            f"The groups artifact has no group for {', '.join(missing)}. Run group_languages on "
            "this corpus, or add them to groups.extend."
        )
    found = {groups[code] for code in languages}
    if len(found) < 2 or sorted(found) != list(range(max(groups.values()) + 1)):
        raise ConfigError(
            f"A language-group router needs two or more groups, all of them used by the corpus's "
            f"languages, but these belong to {len(found)} of {max(groups.values()) + 1}. Run "
            "group_languages on this corpus with a lower groups.max_group_share, or with more "
            "families (languages.family)."
        )
    expected = model.moe.num_groups
    if expected is not None and expected != len(found):
        raise ConfigError(
            f"The recipe expects {expected} language groups (model.moe.num_groups) and the groups "
            f"artifact has {len(found)}. Change one of them."
        )
    return tuple(groups[code] for code in languages)


def refuse_languages_without_modules(spec: ModelSpec, codes: Iterable[str]) -> None:
    """Check that a model with language modules has one for each of the languages.

    Raises:
        ConfigError: a language has none.
    """
    own = spec.languages_with_modules
    missing = sorted(set(codes) - set(own))
    if missing:
        raise ConfigError(
            f"The model has no language module for {', '.join(missing)}. Choose among "
            f"{', '.join(own)}"
            + (", or use the shared route." if spec.model.has_shared_route else ".")
        )
