"""Declarations of variants in their settings: the base classes of extensions' settings.

A variant is an encoder front end or a kind of language modules. Its settings say what it asks of
the model's shape and of the tokenizer, and what the model can then do. Extensions
(:mod:`pipeline.extensions`) subclass these; :mod:`pipeline.config.recipe` composes them.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from pipeline.config.settings import Settings

SHARED = "shared"
"""The module of all languages, and the name of its route."""


class ModelShape(Protocol):
    """The settings of a model that a variant may depend on."""

    @property
    def width(self) -> int:
        """Width of the model's states."""

    @property
    def num_heads(self) -> int:
        """Heads of an attention."""

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers."""

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers."""


class Vocabulary(Protocol):
    """The tokenizer, as far as a variant may ask."""

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages, in the order of their tokens."""

    def language_token_id(self, language: str, /) -> int:
        """Return the id of a language's token."""

    def white_space_ids(self) -> tuple[int, ...]:
        """Return the ids of pieces that are white space."""


class VariantSettings(Settings):
    """Settings of a variant, told apart by ``kind``."""

    kind: str

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the variant does not fit the model's shape."""

    def check_languages(self, languages: Sequence[str]) -> None:
        """Raise ValueError if the variant does not fit the tokenizer's languages."""

    def marks(self, vocabulary: Vocabulary) -> dict[str, Any]:  # noqa: ARG002 (one signature)
        """Return the fields of a model's spec that the variant takes from the tokenizer."""
        return {}

    def export_problem(self, directory: Path) -> str:  # noqa: ARG002 (one signature)
        """Say why other software cannot have the variant, and what to do; empty where it can."""
        return ""


class FrontSettings(VariantSettings):
    """Settings of an encoder front end."""

    parts_words: ClassVar[bool] = False
    """It is given where words begin, which a segmenter of the recipe may find."""


class LanguageModuleSettings(VariantSettings):
    """Settings of weights that belong to single languages."""

    languages: tuple[str, ...] | None = None
    """Languages that have modules; None: all of the tokenizer's."""
    fits_encoder_alone: ClassVar[bool] = False
    """An encoder without a decoder can have them."""

    @property
    def has_shared_route(self) -> bool:
        """Whether the model has a route for all languages beside those of its languages."""
        return False

    def languages_among(self, languages: tuple[str, ...]) -> tuple[str, ...]:
        """Return the languages that have modules, of those of a tokenizer."""
        return languages if self.languages is None else self.languages

    def check_languages(self, languages: Sequence[str]) -> None:
        """Raise ValueError for modules of unknown languages, or a language called shared."""
        unknown = sorted(set(self.languages or ()) - set(languages))
        if unknown or self.languages == ():
            raise ValueError(
                "model.language_modules.languages must name one or more of the tokenizer's "
                f"languages, {', '.join(languages)}"
                + (f"; {', '.join(unknown)} is none of them" if unknown else "")
            )
        if SHARED in languages:
            raise ValueError("a language is called shared, as the module of all languages is")

    def export_problem(self, directory: Path) -> str:
        """Say why other software cannot have such modules, and what to do."""
        fix = (
            f"fold the route that all languages share into a plain model, `mmnmt checkpoint fold "
            f"{directory} --out DIR`, and export that"
            if self.has_shared_route
            else "`mmnmt checkpoint fold` makes a plain model where model.language_modules.shared "
            "is true, and here it is not: train one with it"
        )
        return (
            f"{directory} has weights of languages' own (model.language_modules), which no format "
            f"can have: {fix}."
        )


class InstalledExtension:
    """Declarations of an extension package; by default nothing.

    Recipes are made of its settings. Everything else is imported when a method asks for it, since
    stages, reports and the model import recipes, and the model and reports import large packages.
    """

    front_ends: ClassVar[tuple[type[FrontSettings], ...]] = ()
    language_modules: ClassVar[tuple[type[LanguageModuleSettings], ...]] = ()
    sections: ClassVar[Mapping[str, type[Settings]]] = {}
    """Sections of recipes by name. Each has a type of its own, and all its settings a default."""

    def load_model(self) -> Any:
        """Return the :class:`~pipeline.model.extension.Extension`; None: the model is unchanged."""
        return None

    def load_stages(self) -> Any:
        """Return a sequence of :class:`~pipeline.stage.Stage`."""
        return ()

    def report_sections(self, analyses: Mapping[str, Any]) -> Any:  # noqa: ARG002 (one signature)
        """Return each :class:`~pipeline.evaluation.tables.ReportSection` about analyses.

        Args:
            analyses: name → artifact of kind ``analysis``, as the stage ``evaluate`` is given them.
        """
        return ()


def one_of(kinds: Sequence[type[VariantSettings]]) -> Any:
    """Return the type of a setting that is one of several tables, told apart by ``kind``."""
    if not kinds:
        return type(None)
    union: Any = reduce(or_, kinds)
    return Annotated[union, Field(discriminator="kind")] if len(kinds) > 1 else union
