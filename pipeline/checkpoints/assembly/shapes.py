"""The shape of a recipe's model as a source: an assembly is planned before anything is trained."""

from pathlib import Path
from typing import NoReturn

from pipeline.artifacts.manifest import InputRecord, json_digest
from pipeline.artifacts.tokenizer import (
    SPECIALS,
    ByteVocabulary,
    Numbering,
    TokenizerDescription,
    TokenizerFiles,
)
from pipeline.checkpoints.assembly.declaration import SourceDeclaration
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.config import load_recipe
from pipeline.errors import ConfigError
from pipeline.model.spec import ModelSpec, make_spec

_LANGUAGES = tuple(f"l{index:02d}" for index in range(32))
"""Without names; a group has at least one of them."""


class ShapesAlone:
    """The tensors of a model that does not exist."""

    def __init__(self, spec: ModelSpec, *, recipe: str) -> None:
        self.origin = Path(recipe)
        self._shapes = {name: tuple(shape) for name, shape in tensor_shapes(spec).items()}

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> NoReturn:
        """Raises ConfigError: there are no values."""
        raise ConfigError(
            f"{self.origin} is the shape of a recipe's model and has no {name}: name a checkpoint."
        )


def recipe_source(source: SourceDeclaration) -> ModelSource:
    """A source that has nothing but its shape.

    Raises:
        ConfigError: no such recipe, or its number of language groups is not known.
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
    """A vocabulary of that size of which nothing but the size is known; two of a size are equal."""
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
