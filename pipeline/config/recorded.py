"""Compare settings that a manifest recorded with settings of today."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from pipeline.config.recipe import Recipe
from pipeline.config.settings import Settings

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
such as a vocabulary that a model was trained with."""

THRESHOLDS = "training.resource_thresholds"
STATES_SAVED = "training.checkpoint_every"

DECIDE_WHICH_WEIGHTS = (
    "batches.evaluation_tokens",
    "training.average_last",
    "training.best_by_route",
    "training.patience",
    "training.validate_every",
)
"""Settings that change no update but decide which weights are kept, and how many.

A run goes on when one of them changes; a finished model becomes another. ``training.best_by`` is
not among them: with another value, the stored perplexity covers other pairs.
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
    before, after = _flatten(old), _flatten(new)
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


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return the first difference, as ``training.updates: 10 → 20``; None if there is none."""
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
    settings of ``NEWER`` stay missing.
    A section is unchanged if it cannot be read any more, for example because it has a removed
    setting with an effect other than today's. Names that are not sections of a recipe are skipped;
    for a setting (``training.seed``) the whole section is completed.
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
