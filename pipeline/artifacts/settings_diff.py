"""In what two resolved settings differ, told in one way everywhere."""

from collections.abc import Mapping
from typing import Any


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
