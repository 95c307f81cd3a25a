"""The file that declares an assembly: where each part comes from, and by which rules.

    [sources]
    dense = "runs/dense"                  # a checkpoint of ours, or one of other software
    moe_lgr = "runs/moe_lgr"

    [parts]                               # of each the name of a source, or "fresh"
    embeddings = "dense"
    encoder = "dense"
    decoder = "moe_lgr"

    [experts]                             # as [model.moe] of a recipe
    num_experts = 32
    decoder_router = "language_group"

    [upcycling]                           # as [upcycling] of a recipe
    mask_ratio = 0.1

Paths are relative to the folder that the command is given in, as on a command line.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from pipeline.artifacts.settings import MAX_VOCABULARY
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.documents import read_toml, toml_path
from pipeline.config.settings import MAX_GROUPS, Settings, describe_validation, whole
from pipeline.errors import ConfigError
from pipeline.model.settings import MoEConfig

FRESH = "fresh"
"""What a part is said to come from that starts anew."""


class SourceDeclaration(Settings):
    """A checkpoint, or the shape of a recipe's model, with which an assembly can be planned."""

    path: str = ""
    recipe: str = ""
    """Instead of a path: nothing can be made of it, a dry run only."""
    vocabulary_size: Annotated[int, whole(1, MAX_VOCABULARY)] | None = None
    """Of a recipe's model; None: its tokenizer's."""
    groups: Annotated[int, whole(2, MAX_GROUPS)] | None = None
    """Language groups of a recipe's model; None: its own number."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.path) == bool(self.recipe):
            raise ValueError("a source is a path or the name of a recipe: write one of them")
        return self


class PartsDeclaration(Settings):
    """Where the parts of the model come from: each the name of a source, or ``fresh``."""

    embeddings: str
    encoder: str
    decoder: str


class Assembly(Settings):
    """All that a declaration says."""

    sources: dict[str, SourceDeclaration]
    parts: PartsDeclaration
    model: dict[str, Any] = Field(default_factory=dict)
    """What of ``[model]`` is to differ from the sources: ``encoder_layers`` of a fresh encoder."""
    experts: MoEConfig | None = None
    """None: as the sources have them."""
    upcycling: UpcyclingConfig = UpcyclingConfig()
    groups: str = ""
    """A groups artifact, for a language-group router that no source has."""
    tokenizer: str = ""
    """Another vocabulary: a tokenizer artifact, or a checkpoint that carries one."""
    languages: dict[str, str] = Field(default_factory=dict)
    """New language → a language whose row and group it starts from, or ``fresh``."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the tensors written."""

    @field_validator("sources", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        """``dense = "runs/dense"`` is ``dense = { path = "runs/dense" }``."""
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
            raise ValueError(f"parts name {unknown[0]!r}, and the sources are: {known}")
        unused = sorted(set(self.sources) - named)
        if unused:
            raise ValueError(f"no part comes from the source {unused[0]!r}: leave it out")
        if not named - {FRESH}:
            raise ValueError("all parts start fresh: train such a model from scratch (pretrain)")
        if "moe" in self.model:
            raise ValueError("model.moe is what [experts] says: write it there")
        return self


def read_assembly(name: str) -> Assembly:
    """A declaration: ``PATH.toml``, or the name of one that comes with the package.

    Raises:
        ConfigError: there is none, it cannot be read, or it says what cannot be.
    """
    try:
        path = toml_path(name, folder="assemblies", what="assembly")
        return Assembly.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe_validation(error, Assembly)}") from error
