"""In what two resolved settings differ, told in one way everywhere."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.config import Recipe
from pipeline.settings import Settings


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


def with_defaults(noted: Mapping[str, Any], *, sections: Iterable[str]) -> dict[str, Any]:
    """What an artifact notes of a recipe's sections, with the settings there were not yet.

    Those are at their defaults, since a new setting does by default what was done before. As noted
    where a section cannot be read any more. Names that are no sections of a recipe are passed over.
    """
    kinds = {name: type(one) for name, one in Recipe(name="defaults") if isinstance(one, Settings)}
    try:
        read = {
            name: kinds[name].model_validate(noted.get(name, {}))
            for name in sections
            if name in kinds
        }
    except ValidationError:
        return dict(noted)
    return {**noted, **{name: section.model_dump(mode="json") for name, section in read.items()}}
