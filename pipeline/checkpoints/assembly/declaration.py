"""Read the TOML file that declares an assembly: the source of each part, and the rules.

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

Paths are relative to the current directory, as on a command line.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from data_prep.settings import MAX_VOCABULARY
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.documents import read_toml, toml_path
from pipeline.config.settings import MAX_GROUPS, Settings, describe_validation, whole
from pipeline.errors import ConfigError
from pipeline.model.settings import MoEConfig

FRESH = "fresh"
"""The source of a part that is initialized instead of copied."""


class SourceDeclaration(Settings):
    """A checkpoint, or the shape of a recipe's model for a dry run."""

    path: str = ""
    recipe: str = ""
    """A recipe in place of a path, for dry runs only."""
    vocabulary_size: Annotated[int, whole(1, MAX_VOCABULARY)] | None = None
    """Vocabulary size of a recipe's model. None: that of its tokenizer."""
    groups: Annotated[int, whole(2, MAX_GROUPS)] | None = None
    """Number of language groups of a recipe's model. None: the recipe's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.path) == bool(self.recipe):
            raise ValueError("a source is a path or the name of a recipe: write one of them")
        return self


class PartsDeclaration(Settings):
    """The source of each part of the model, or ``fresh``."""

    embeddings: str
    encoder: str
    decoder: str


class Assembly(Settings):
    """A declared assembly."""

    sources: dict[str, SourceDeclaration]
    parts: PartsDeclaration
    model: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``[model]`` that differ from the sources, as ``encoder_layers`` of a fresh
    one."""
    experts: MoEConfig | None = None
    """Experts of the result. None: those of the sources."""
    upcycling: UpcyclingConfig = UpcyclingConfig()
    groups: str = ""
    """Path of a groups artifact, for a language-group router that no source has."""
    tokenizer: str = ""
    """Path of another vocabulary: a tokenizer artifact, or a checkpoint that contains one."""
    languages: dict[str, str] = Field(default_factory=dict)
    """New language → a language whose row and group it starts from, or ``fresh``."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the written tensors."""

    @field_validator("sources", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        """Read ``dense = "runs/dense"`` as ``dense = { path = "runs/dense" }``."""
        if not isinstance(value, dict):
            return value
        return {
            name: {"path": source} if isinstance(source, str) else source
            for name, source in value.items()
        }

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


def read_assembly(name: str) -> Assembly:
    """Read a declaration by its path, ``PATH.toml``, or by the name of one in the package.

    Raises:
        ConfigError: There is none, it cannot be read, or it is invalid.
    """
    try:
        path = toml_path(name, folder="assemblies", what="assembly")
        return Assembly.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe_validation(error, Assembly)}") from error
