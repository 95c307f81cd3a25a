"""Compose, load and check recipes: all settings of a model and its training.

A recipe is a TOML file. With a ``parent`` it states only what differs: sections are laid over
sections, and a setting replaces a setting, also a table of the user's names (``TABLES``). A name
can be followed by overlays, for example ``bible24_moe+smoke``: each overlay is a recipe file
without a parent, and its settings replace the settings before it. Paths, numbers of processes and
machines are not settings of a recipe (see ``jobs/plan.py``, ``ds_configs/``, ``slurm/``).

Overrides are laid over all of that: on a command line ``--set SECTION.SETTING=VALUE``, in a plan a
table ``set`` with the structure of a recipe. Both become the same nested table.

Manifests record settings. The last part of this module compares them with settings of today.
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import ValidationError, create_model, model_validator

from data_prep.settings import (
    CleanConfig,
    CorpusConfig,
    GroupsConfig,
    LanguagesConfig,
    MixtureConfig,
    OutsideTestsConfig,
    ShardsConfig,
    SyntheticConfig,
    TokenizerConfig,
)
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.documents import (
    MAX_TOML_DOTS,
    beside,
    check_settings,
    merge,
    read_toml,
    shipped,
    toml_key,
    toml_path,
    toml_value,
)
from pipeline.config.settings import (
    EXTRA_TOKENS,
    Settings,
    describe_validation,
    settings_of_kinds,
    shown,
    tables_of_names,
)
from pipeline.decoding.settings import BYTES_LENGTH_RATIO, DecodingConfig, TextConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.settings import EvaluationConfig
from pipeline.extensions.installed import INSTALLED
from pipeline.languages import meant_code
from pipeline.model.settings import ModelConfig
from pipeline.training.settings import (
    LoggingConfig,
    LossConfig,
    OptimizerConfig,
    SavingConfig,
    TrainingConfig,
    passes_of,
)

_Section = TypeVar("_Section", bound=Settings)


class CoreRecipe(Settings):
    """All settings, one section per concern; a stage reads only the sections it declares."""

    name: str
    description: str = ""
    corpus: CorpusConfig = CorpusConfig()
    tests: OutsideTestsConfig = OutsideTestsConfig()
    synthetic: SyntheticConfig = SyntheticConfig()
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
    text: TextConfig = TextConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    saving: SavingConfig = SavingConfig()

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the length ratio of bytes; leave out pivots of stages that equal the corpus's."""
        decoding = values.get("decoding", {})
        match values.get("tokenizer"):
            case {"kind": "bytes"} if isinstance(decoding, Mapping):
                values["decoding"] = {"max_length_ratio": BYTES_LENGTH_RATIO, **decoding}
        corpus, pivot = values.get("corpus"), CorpusConfig.model_fields["pivot"].default
        if isinstance(corpus, Mapping):
            pivot = corpus.get("pivot", pivot)
        for name in ("tests", "clean", "groups"):
            section = values.get(name)
            if isinstance(section, Mapping) and "pivot" in section:
                if section["pivot"] != pivot:
                    raise ValueError(
                        f"{name}.pivot is {shown(section['pivot'])}, and corpus.pivot, which is "
                        f"the pivot of every stage, is {shown(pivot)}. Set corpus.pivot, and leave "
                        "the other out"
                    )
                values[name] = {key: of for key, of in section.items() if key != "pivot"}
        return values

    @model_validator(mode="after")
    def _check_joined_pairs(self) -> Self:
        for pair in self.clean.joined_pairs:
            if self.corpus.pivot in pair.split("-"):
                raise ValueError(
                    f"clean.joined_pairs names {pair!r}, which has the pivot, corpus.pivot = "
                    f"{self.corpus.pivot!r}. Name pairs of two other languages"
                )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        warmup, updates = self.optimizer.warmup_updates, self.training.updates
        if self.optimizer.schedule == "polynomial" and warmup >= updates:
            raise ValueError(
                f"optimizer.warmup_updates {warmup:,} is not below training.updates {updates:,}, "
                "so that the learning rate would only rise. Lower it, or train longer"
            )
        return self

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        if self.training.updates_of == "bytes" and self.mixture.phases:
            raise ValueError(
                'training.updates_of is "bytes", and mixture.phases begin at updates, whose number '
                "then depends on the text. Leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        """Check the experts of a model to be trained.

        A stored model of such a shape can still be used.
        """
        if problem := self.model.untrainable_experts(section="model.moe"):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        into, own = self.mixture.targets, self.tokenizer.target_languages
        if own and not (into and all(meant_code(code, own) in own for code in into)):
            raise ValueError(
                f"tokenizer.target_languages, {', '.join(own)}, are all that can be translated "
                "into. Let mixture.targets name them, or some of them"
            )
        if own and self.batches.tag_is_label:
            raise ValueError(
                "batches.tag_is_label is true, and with tokenizer.target_languages the model "
                "predicts pieces of those languages only, no language token. Set it to false"
            )
        return self

    @model_validator(mode="after")
    def _check_routes(self) -> Self:
        """Check that every module of a model to be trained learns something."""
        has_shared = self.model.has_shared_route
        if self.loss.objective == "fuse_distillation" and not has_shared:
            raise ValueError(
                "loss.objective is fuse_distillation, which wants a model of two routes. Set "
                "model.language_modules.shared to true, of kind low_rank or language_experts"
            )
        if passes_of(self.loss.objective) == 1 and has_shared:  # a loss of one's own may have two
            raise ValueError(
                "model.language_modules.shared is true, and the shared module would learn nothing. "
                'Set it to false, or loss.objective to "fuse_distillation"'
            )
        return self

    @property
    def max_tokens(self) -> int:
        """Longest sentence in shards, in tokens: ``shards.max_tokens``, or what the model takes.

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
        """Return the named sections, and settings of others (``training.seed``), as plain JSON.

        ``shards.max_tokens`` is resolved: a manifest records the length limit.
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
    """The sections of the core and of the installed extensions."""


KINDS_OF_MODELS = settings_of_kinds(ModelConfig)
"""Setting of ``[model]`` with several kinds → kind → its settings, for example of ``front``."""
TABLES = frozenset(tables_of_names(Recipe))
"""Settings that are a table of the user's names, for example ``corpus.cldr.train_pairs``."""


def chosen_settings(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Select sections (``loss``) and single settings (``training.seed``) from a settings tree."""
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
    """Return the names of the recipes that ship with the package, overlays included."""
    return [*shipped("recipes")]


def load_recipe(name: str | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Resolve ``NAME`` or ``PATH.toml``: its parents, itself, its ``+overlays``, the overrides.

    Args:
        name: the recipe; None: all settings at their defaults.
        overrides: settings of ``--set`` or of a plan, for example ``{"training": {"updates": 9}}``.
    """
    sections = overrides or {}
    merged: dict[str, Any] = {}
    for _, document in _layers(name, sections):
        merged = _laid_over(merged, document)
    where = "The default settings" if name is None else f"Recipe {name!r}"
    if sections:
        where += f" with {', '.join(map(shown, override_texts(sections)))}"
    for key in ("name", "description", "parent"):
        if key in sections:
            raise ConfigError(f"{where}: {key!r} is not a section. Set SECTION.SETTING.")
    try:
        return Recipe.model_validate({**merged, "name": "defaults" if name is None else name})
    except ValidationError as error:
        said = describe_validation(error, Recipe, also=("parent",))
        raise ConfigError(f"{where}: {said}") from error


def read_overlay(name: str, *, base: str | None) -> dict[str, Any]:
    """Return what an overlay states; ConfigError if it has a parent."""
    fix = f"write a model's settings to it: mmnmt checkpoint inspect CHECKPOINT --recipe > {name}"
    path = toml_path(name, folder="recipes", what="recipe")
    document = read_toml(path, fix=f"name a file that is there, or {fix}")
    if "parent" in document:
        raise ConfigError(
            f"Recipe {name!r} has a parent, so it cannot be laid over {base!r}: "
            "an overlay states only differences."
        )
    return document


def setting_origins(name: str | None, overrides: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Map each setting that is not at its default to the layer that decides it.

    Returns:
        Dotted name → ``parent recipe NAME``, ``recipe NAME``, ``overlay NAME`` or ``--set``.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, document in _layers(name, overrides or {}):
        merged = _laid_over(merged, document)
        origins |= {setting: origin for setting, _ in leaf_settings(document)}
        left = dict(leaf_settings(merged))  # a layer may remove what an earlier one states
        origins = {setting: found for setting, found in origins.items() if setting in left}
    return origins


def _layers(
    name: str | None, overrides: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the documents that a recipe is composed of, in order, each with its origin."""
    if name is not None:
        base, *overlays = recipe_layers(name)
        yield from _with_parents(base, origin="recipe", seen={})
        for overlay in overlays:
            yield f"overlay {overlay}", read_overlay(overlay, base=base)
    yield "--set", overrides


def recipe_layers(name: str, *, folder: str | Path = "") -> list[str]:
    """Return the recipe and the overlays of ``RECIPE+OVERLAY``; a path may have a + in it.

    Paths begin at ``folder``.
    """
    path = os.path.join(folder, name)  # noqa: PTH118
    if name.endswith(".toml") and os.path.isfile(path):  # noqa: PTH113  # a name may be too long
        return [name]
    layers: list[str] = []
    for part in name.split("+"):
        if layers and "/" in layers[-1] and not layers[-1].endswith(".toml"):
            layers[-1] += f"+{part}"
        else:
            layers.append(part)
    if "" in layers[1:] or layers[:1] == [""] != layers:
        raise ConfigError(
            f"{name!r} has a + with no name before or after it. Write RECIPE+OVERLAY."
        )
    return layers


def _with_parents(
    name: str, *, origin: str, seen: Mapping[Path, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a recipe's ancestors, the farthest first, and the recipe itself.

    ``seen`` are the files of its descendants: one file may have several names.
    """
    # Path.resolve raises RuntimeError for a link to itself.
    path = Path(os.path.realpath(toml_path(name, folder="recipes", what="recipe")))
    if path in seen:
        circle = " → ".join((*seen.values(), name))
        raise ConfigError(f"Recipes {circle} form a circle. Remove one parent.")
    document = _read_recipe(name)
    parent = document.pop("parent", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"Recipe {name!r}: its parent is the name of a recipe. Write one.")
        parent = beside(parent, Path(name))
        yield from _with_parents(parent, origin="parent recipe", seen={**seen, path: name})
    yield f"{origin} {name}", document


def _laid_over(base: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``base``, changed by the settings of ``document``."""
    inherited = without_other_kinds(_inherited(base, document), document)
    return merge(inherited, document, values=TABLES)


def without_other_kinds(parent: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a parent without those that only a kind replaced by ``document`` has.

    For example, a front end of kind ``msc`` has none of the ``layers`` of a parent's ``wsf``.
    """
    model, its = parent.get("model"), document.get("model")
    if not isinstance(model, dict) or not isinstance(its, Mapping):
        return parent
    kept = dict(model)
    for name, settings in KINDS_OF_MODELS.items():
        old, new = model.get(name), its.get(name)
        if isinstance(old, dict) and isinstance(new, Mapping) and "kind" in new:
            gone = {*settings.get(str(old.get("kind")), ())}
            gone -= {*settings.get(str(new["kind"]), gone)}
            kept[name] = {setting: old[setting] for setting in old if setting not in gone}
    return {**parent, "model": kept}


def _inherited(parent: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe inherits: all of its parent, but no thresholds of another corpus.

    ``training.resource_thresholds`` count training lines of the parent's corpus: by the demo's
    thresholds every pair of a corpus of ordinary size would be high-resource.
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


# ---------------------------------------------------------------- overrides


_ASSIGNMENT = re.compile(r"""((?:[^="']|"(?:[^"\\]|\\.)*+"|'[^']*+')*+)=(.*)""", re.DOTALL)
"""Name and value of a setting; a name in quotes may have a "=", for example ``"n >= 50"``."""
_BARE_WORD = re.compile(r"[^\s\[{\"'][^\n\r]*")
"""Text that is no TOML value, and that does not begin like one."""


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return the nested table of ``--set`` values; a later value replaces an earlier one."""
    overrides: dict[str, Any] = {}
    for text in texts:
        name = text.partition("=")[0].strip()
        overrides = merge(overrides, _parse(text), values=TABLES & {name})
    return overrides


def leaf_settings(tree: Mapping[str, Any], *, table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each setting of a nested table."""
    for key, value in tree.items():
        path = f"{table}.{toml_key(key)}".removeprefix(".")
        if isinstance(value, Mapping) and value:
            yield from leaf_settings(value, table=path)
        else:
            yield path, value


def override_texts(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``SECTION.SETTING=VALUE`` for each setting of a nested table."""
    for path, value in leaf_settings(overrides):
        yield f"{path}={toml_value(value)}"


def without_stated(
    overrides: Mapping[str, Any],
    document: Mapping[str, Any],
    *,
    values: Collection[str] = (),
    table: str = "",
) -> dict[str, Any]:
    """Return overrides without the settings that a document states; see ``documents.merge``."""
    left: dict[str, Any] = {}
    for key, value in overrides.items():
        stated, name = document.get(key), f"{table}.{key}".removeprefix(".")
        if isinstance(value, Mapping) and isinstance(stated, Mapping) and name not in values:
            left[key] = without_stated(value, stated, values=values, table=name)
        elif stated is None:
            left[key] = value
    return {key: value for key, value in left.items() if value != {}}


def _parse(text: str) -> dict[str, Any]:
    assigned = _ASSIGNMENT.fullmatch(text)
    key, value = assigned.groups() if assigned else ("", "")
    if "." not in key or not value.strip() or text.count("\n"):
        fix = "Write, for example, --set training.updates=300"
        raise _unusable(text, f"it is not of the form SECTION.SETTING=VALUE. {fix}")
    if key.count(".") > MAX_TOML_DOTS:
        raise _unusable(text, f"its name has more than {MAX_TOML_DOTS} dots. Settings nest 4 deep")
    document = _toml(f"{key} = 0")
    if document is None:
        fix = "Write it as SECTION.SETTING"
        raise _unusable(text, f"{shown(key)!r} is not the name of a setting. {fix}")
    found = _toml(f"{key} = {value}")
    if not found and not _BARE_WORD.fullmatch(value.strip()):
        fix = "Write a number, true, false, a word, or a TOML list or table in the quotes of your"
        raise _unusable(text, f"its value is not valid TOML. {fix} shell")
    found = found or _with_text(document, value.strip())
    check_settings(found, path=f"--set {shown(text)}")
    return found


def _unusable(text: str, problem: str) -> ConfigError:
    return ConfigError(f"--set {shown(text)}: {problem}.")


def _toml(line: str) -> dict[str, Any] | None:
    """Return the only setting of a line of TOML; None if it is not TOML."""
    try:
        return tomllib.loads(line)
    except (ValueError, RecursionError):
        return None


def _with_text(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the document with its one setting, however deep, set to a text."""
    [(key, value)] = document.items()
    return {key: _with_text(value, text) if isinstance(value, dict) else text}


# ---------------------------------------------------------------- recorded settings

DECIDE_NOTHING = (
    "training.checkpoint_every",
    "training.expert_parallel_size",
    "training.keep_last",
    "training.recompute_layers",
    "training.resource_thresholds",
    "training.skip_nonfinite_after",
)
"""Settings of training that change neither an update nor which weights are kept.

They say how many states are written and when, which rank holds which expert, which layers are
recomputed to save memory, how curves summarize validation, and whether a run ends that can only go
on without some micro-batches. Manifests leave out [logging] and [saving] altogether.
"""

NEW_DEFAULTS: dict[str, tuple[Any, Any]] = {"decoding.precision": ("float32", "auto")}
"""Settings → the default of earlier versions and of today: results of the first stay up to date."""

NEWER = ("tokenizer.normalization",)
"""Settings of which no value is what versions did that had none: results of these stay up to date,
for example a vocabulary that a model was trained with."""

THRESHOLDS = "training.resource_thresholds"
STATES_SAVED = "training.checkpoint_every"

DECIDE_WHICH_WEIGHTS = (
    "batches.evaluation_tokens",
    "training.average_last",
    "training.patience",
    "training.validate_every",
)
"""Settings that change no update but decide which weights are kept, and how many.

A run goes on when such a setting changes; a finished model becomes another. ``training.best_by``
and ``best_by_route`` are not among them: with another value, the stored perplexity is of other
pairs or of another route.
"""


def undeciding(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the names that decide nothing together with the other settings of ``config``.

    Resource thresholds say which pairs a tier has, and with ``training.best_by`` a tier says which
    weights are kept. With ``training.average_last`` the weights are the mean of states saved.
    """
    training = config.get("training", {})
    deciding = {
        THRESHOLDS: training.get("best_by", "all") != "all",
        STATES_SAVED: training.get("average_last", 0) > 0,
    }
    return [name for name in names if not deciding.get(name, False)]


def setting_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, every: bool = False
) -> list[str]:
    """Return ``section.setting: old → new`` for every setting that differs, sorted.

    Unless ``every`` is set, settings that earlier versions had otherwise do not count.
    """
    before, after = dict(leaf_settings(old)), dict(leaf_settings(new))
    return [
        f"{name}: {_shown(name, before)} → {_shown(name, after)}"
        for name in sorted({*before, *after})
        if before.get(name, "unset") != after.get(name, "unset")
        and (every or (before.get(name), after.get(name)) != NEW_DEFAULTS.get(name))
        and (every or name in before or name not in NEWER)
    ]


def _shown(name: str, flat: Mapping[str, Any]) -> Any:
    is_table = any(other.startswith(f"{name}.") for other in flat)
    return flat.get(name, "a table" if is_table else "unset")


def describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return the first difference, for example ``training.updates: 10 → 20``; None without one."""
    return next(iter(setting_changes(old, new)), None)


def without_settings(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return nested settings without some names (``section``, ``section.setting``, …)."""
    kept = dict(tree)
    for name in names:
        first, _, below = name.partition(".")
        if not below:
            kept.pop(first, None)
        elif isinstance(table := kept.get(first), Mapping):
            kept[first] = without_settings(table, [below])
    return kept


def with_defaults(noted: Mapping[str, Any], *, sections: Iterable[str]) -> dict[str, Any]:
    """Return the recorded sections of a recipe, completed by settings that are newer than them.

    A missing setting gets its default, because a new setting does by default what was done before;
    settings of ``NEWER`` stay missing. A section is unchanged if it cannot be read any more, for
    example because it has a removed setting with an effect other than today's. For a setting
    (``training.seed``) the whole section is completed.
    """
    kinds = {name: type(one) for name, one in Recipe(name="defaults") if isinstance(one, Settings)}
    completed = dict(noted)
    for name in {entry.partition(".")[0] for entry in sections} & kinds.keys():
        with suppress(ValidationError):
            section = kinds[name].model_validate(noted.get(name, {}))
            missing = [one for one in NEWER if one.partition(".")[2] not in noted.get(name, {})]
            full = {name: section.model_dump(mode="json")}
            completed |= without_settings(full, missing)
    return completed
