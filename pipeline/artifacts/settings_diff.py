"""In what two resolved settings differ, told in one way everywhere."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.config import Recipe
from pipeline.settings import Settings

DECIDE_NOTHING = (
    "training.checkpoint_every",
    "training.cpu_kernels",
    "training.expert_parallel_size",
    "training.keep_last",
    "training.recompute_layers",
    "training.resource_thresholds",
    "training.skip_nonfinite_after",
)
"""Settings of training stages that change neither an update nor which weights are kept: how often
and how many states are written in the run's folder, by which kernels the same is computed (save
rounding), on which ranks experts lie, what is computed twice to save memory, how the curves sum up
validation, and whether a run that cannot go on without leaving micro-batches out ends there.
([logging] and [saving], which say how metrics and states are written, are in no manifest.)"""

THRESHOLDS = "training.resource_thresholds"
STATES_SAVED = "training.checkpoint_every"

DECIDE_WHICH_WEIGHTS = (
    "batches.evaluation_tokens",
    "training.average_last",
    "training.best_by_route",
    "training.patience",
    "training.validate_every",
)
"""Settings that change no update, but after which of them the weights may be kept, or how many
there are: a run goes on with other ones, a finished model is another with them. (With another
``training.best_by`` it does not: the perplexity of what was kept is of other pairs.)"""


def undeciding(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Of settings that decide nothing, those that do not with these other ones.

    Resource thresholds say which pairs a tier has, and with ``training.best_by`` a tier says which
    weights are kept. With ``training.average_last`` the weights are the mean of states saved.
    """
    training = config.get("training", {})
    deciding = {
        THRESHOLDS: training.get("best_by", "all") != "all",
        STATES_SAVED: training.get("average_last", 0) > 0,
    }
    return [name for name in names if not deciding.get(name, False)]


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``section.setting: old → new`` for every setting that differs, sorted."""
    before, after = _flatten(old), _flatten(new)
    return [
        f"{name}: {before.get(name, 'unset')} → {after.get(name, 'unset')}"
        for name in sorted({*before, *after})
        if before.get(name, "unset") != after.get(name, "unset")
    ]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first setting that differs, as ``training.updates: 10 → 20``; None if none does."""
    return next(iter(setting_changes(old, new)), None)


def without_settings(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Nested settings but those named: ``section``, ``section.setting``, and so on down."""
    kept = dict(tree)
    for name in names:
        first, _, below = name.partition(".")
        if not below:
            kept.pop(first, None)
        elif isinstance(table := kept.get(first), Mapping):
            kept[first] = without_settings(table, [below])
    return kept


def with_defaults(noted: Mapping[str, Any], *, sections: Iterable[str]) -> dict[str, Any]:
    """What an artifact notes of a recipe's sections, with the settings there were not yet.

    Those are at their defaults, since a new setting does by default what was done before. As noted
    where a section cannot be read any more. Names that are no sections of a recipe are passed over;
    of a setting (``training.seed``) the whole section is filled in.
    """
    kinds = {name: type(one) for name, one in Recipe(name="defaults") if isinstance(one, Settings)}
    try:
        read = {
            name: kinds[name].model_validate(noted.get(name, {}))
            for name in {entry.partition(".")[0] for entry in sections}
            if name in kinds
        }
    except ValidationError:
        return dict(noted)
    return {**noted, **{name: section.model_dump(mode="json") for name, section in read.items()}}
