"""Recipes: every setting of the science once, typed, documented, with its default.

A recipe is a TOML file. It may name a ``parent`` and then states only what differs. A name can be
followed by overlays, ``bible24_moe+smoke``: each overlay is a recipe file without a parent whose
settings are laid over what stands before it. Where files lie, how many processes run and which
machine they run on are not settings of a recipe (see ``jobs/plan.py``, ``ds_configs/``,
``slurm/``).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import ValidationError, create_model, model_validator

from pipeline.artifacts.settings import (
    CleanConfig,
    CorpusConfig,
    GroupsConfig,
    LanguagesConfig,
    MixtureConfig,
    OutsideTestsConfig,
    ShardsConfig,
    TokenizerConfig,
)
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.documents import merge, read_toml, shipped, toml_path
from pipeline.config.overrides import override_texts
from pipeline.config.settings import EXTRA_TOKENS, Settings, describe_validation, shown
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.settings import EvaluationConfig
from pipeline.extensions.installed import INSTALLED
from pipeline.model.settings import ModelConfig
from pipeline.training.settings import (
    LoggingConfig,
    LossConfig,
    OptimizerConfig,
    SavingConfig,
    TrainingConfig,
)

_Section = TypeVar("_Section", bound=Settings)


class CoreRecipe(Settings):
    """All settings, one section per concern; a stage reads only the sections it declares."""

    name: str
    description: str = ""
    corpus: CorpusConfig = CorpusConfig()
    tests: OutsideTestsConfig = OutsideTestsConfig()
    clean: CleanConfig = CleanConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    shards: ShardsConfig = ShardsConfig()
    mixture: MixtureConfig = MixtureConfig()
    groups: GroupsConfig = GroupsConfig()
    languages: LanguagesConfig = LanguagesConfig()
    model: ModelConfig = ModelConfig()
    batches: BatchesConfig = BatchesConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    upcycling: UpcyclingConfig = UpcyclingConfig()
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    saving: SavingConfig = SavingConfig()

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        warmup, updates = self.optimizer.warmup_updates, self.training.updates
        if self.optimizer.schedule == "polynomial" and warmup >= updates:
            raise ValueError(
                f"optimizer.warmup_updates {warmup:,} is not below training.updates {updates:,}, "
                "so that the learning rate would only rise: lower it, or train longer"
            )
        return self

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        if self.training.updates_of == "bytes" and self.mixture.phases:
            raise ValueError(
                'training.updates_of is "bytes", and mixture.phases begin at updates, whose number '
                "then depends on the vocabulary: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        """Of what is to be trained; a stored model of such a shape can still be used."""
        model, moe = self.model, self.model.moe
        if moe is None:
            return self
        if moe.every > max(model.encoder_layers, model.decoder_layers):
            raise ValueError(
                f"model.moe.every {moe.every} exceeds the numbers of layers, so that no layer "
                "would have experts: lower it, or leave [model.moe] out"
            )
        if moe.top_k == 1 < moe.num_experts and moe.combine_weights == "renormalized":
            raise ValueError(
                "model.moe.combine_weights is renormalized with top_k 1: the one weight is then "
                "always 1, and the router learns nothing from the translations; set it to "
                '"probability", or top_k to 2'
            )
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        into, own = self.mixture.targets, self.tokenizer.target_languages
        if own and not (into and set(into) <= set(own)):
            raise ValueError(
                f"tokenizer.target_languages, {', '.join(own)}, are all that can be translated "
                "into: let mixture.targets name them, or some of them"
            )
        if own and self.batches.tag_is_label:
            raise ValueError(
                "batches.tag_is_label is true, and with tokenizer.target_languages the model "
                "predicts pieces of those languages alone, no language token: set it to false"
            )
        return self

    @model_validator(mode="after")
    def _check_routes(self) -> Self:
        """Of what is to be trained: every module learns something."""
        has_shared = self.model.has_shared_route
        if self.loss.objective == "fuse_distillation" and not has_shared:
            raise ValueError(
                "loss.objective is fuse_distillation, which wants a model of two routes: set "
                "model.language_modules.shared to true, of kind low_rank or language_experts"
            )
        if self.loss.objective != "fuse_distillation" and has_shared:
            raise ValueError(
                "model.language_modules.shared is true, and the shared module would learn nothing: "
                'set it to false, or loss.objective to "fuse_distillation"'
            )
        return self

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sentence in shards: ``shards.max_tokens``, or what the model takes.

        A model takes a sentence that has a position for each token, tag and end-of-sentence, and
        fits into a micro-batch.
        """
        if self.shards.max_tokens is not None:
            return self.shards.max_tokens
        return max(1, min(self.model.max_positions, self.batches.tokens) - EXTRA_TOKENS)

    def section_of(self, settings: type[_Section]) -> _Section:
        """Return the section of an extension, told by the type of its settings."""
        (section,) = (value for _, value in self if isinstance(value, settings))
        return section

    def sections(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The named sections, and settings of others (``training.seed``), as plain JSON.

        ``shards.max_tokens`` is resolved, so that a manifest says how long sentences could be.
        """
        shards = self.shards.model_copy(update={"max_tokens": self.max_tokens})
        resolved = self.model_copy(update={"shards": shards})
        return chosen_settings(resolved.model_dump(mode="json"), names)


if TYPE_CHECKING:
    Recipe = CoreRecipe
else:
    Recipe = create_model(
        "Recipe",
        __base__=CoreRecipe,
        __module__=__name__,
        __doc__=CoreRecipe.__doc__,
        **{name: (kind, kind()) for one in INSTALLED for name, kind in one.sections.items()},
    )
    """The sections of the core and those of the installed extensions."""


def chosen_settings(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of nested settings, the sections (``loss``) and settings (``training.seed``) named."""
    found: dict[str, Any] = {}
    for name in names:
        section, _, setting = name.partition(".")
        value = tree.get(section)
        if not setting and section in tree:
            found[section] = value
        elif isinstance(value, Mapping) and setting in value:
            found[section] = {**found.get(section, {}), setting: value[setting]}
    return found


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package, overlays included."""
    return [*shipped("recipes")]


def load_recipe(name: str | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Resolve ``NAME`` or ``PATH.toml``: its parents, itself, its ``+overlays``, the overrides.

    Args:
        name: the recipe; None: all settings at their defaults.
        overrides: sections and settings, as ``--set`` of a command or ``set`` of a plan has them.

    Raises:
        ConfigError: no such recipe, a circle of parents, or a setting that does not exist or fit.
    """
    base, *overlays = (None,) if name is None else name.split("+")
    merged = {} if base is None else _with_parents(base, seen=())
    for overlay in overlays:
        merged = _laid_over(merged, read_overlay(overlay, base=base))
    sections = overrides or {}
    where = "The default settings" if name is None else f"Recipe {name!r}"
    if sections:
        where += f" with {', '.join(map(shown, override_texts(sections)))}"
    for key in ("name", "description", "parent"):
        if key in sections:
            raise ConfigError(f"{where}: {key!r} is not a section. Set SECTION.SETTING.")
    try:
        resolved = {**_laid_over(merged, sections), "name": "defaults" if name is None else name}
        return Recipe.model_validate(resolved)
    except ValidationError as error:
        said = describe_validation(error, Recipe, also=("parent",))
        raise ConfigError(f"{where}: {said}") from error


def read_overlay(name: str, *, base: str | None) -> dict[str, Any]:
    """Return what an overlay states.

    Raises:
        ConfigError: no such recipe, or it has a parent.
    """
    document = _read_recipe(name)
    if "parent" in document:
        raise ConfigError(
            f"Recipe {name!r} has a parent, so it cannot be laid over {base!r}: "
            "an overlay states only differences."
        )
    return document


def _with_parents(name: str, *, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise ConfigError(f"Recipes {' → '.join((*seen, name))} form a circle: remove one parent.")
    document = _read_recipe(name)
    parent = document.pop("parent", None)
    if parent is None:
        return document
    if not isinstance(parent, str):
        raise ConfigError(f"Recipe {name!r}: its parent is the name of a recipe: write one.")
    return _laid_over(_with_parents(parent, seen=(*seen, name)), document)


def _laid_over(base: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``base`` with those of ``document`` laid over them."""
    return merge(_inherited(base, document), dict(document))


def _inherited(parent: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe inherits: all of its parent, but no thresholds of another corpus.

    ``training.resource_thresholds`` are numbers of lines of the parent's corpus: by those of the
    demo every pair of a corpus of ordinary size would be high-resource.
    """
    source = CorpusConfig().source
    own, its = (
        tree["corpus"].get("source", default) if isinstance(tree.get("corpus"), dict) else default
        for tree, default in ((parent, source), (document, None))
    )
    training = parent.get("training")
    if its in (None, own) or not isinstance(training, dict):
        return parent
    kept = {name: value for name, value in training.items() if name != "resource_thresholds"}
    return {**parent, "training": kept}


def _read_recipe(name: str) -> dict[str, Any]:
    return read_toml(toml_path(name, folder="recipes", what="recipe"))
