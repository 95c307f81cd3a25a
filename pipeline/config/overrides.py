"""Parse overrides: settings that a command line or a plan lays over a recipe.

On a command line an override is ``--set SECTION.SETTING=VALUE``. In a plan it is a table ``set``
with the structure of a recipe. Both become the same nested table. ``load_recipe`` lays it over
parent, recipe and overlays, and checks the result.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.config.documents import MAX_TOML_DOTS, check_settings, merge, toml_key, toml_value
from pipeline.config.settings import shown
from pipeline.errors import ConfigError

_BARE_WORD = re.compile(r"[^\s\[{\"'][^\n\r]*")
"""Text that is no TOML value, and that does not begin like one."""


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return the nested table of ``--set`` values; a later value replaces an earlier one.

    Raises:
        ConfigError: one is not of the form SECTION.SETTING=VALUE, or its value is not TOML.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        overrides = merge(overrides, _parse(text))
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
    key, separator, value = text.partition("=")
    if not separator or "." not in key or not value.strip() or text.count("\n"):
        raise ConfigError(
            f"--set {shown(text)}: it is not of the form SECTION.SETTING=VALUE. "
            "Write, for example, --set training.updates=300."
        )
    if key.count(".") > MAX_TOML_DOTS:
        raise ConfigError(
            f"--set {shown(text)}: its name has more than {MAX_TOML_DOTS} dots. Settings nest "
            "4 deep."
        )
    document = _toml(f"{key} = 0")
    if document is None:
        raise ConfigError(
            f"--set {shown(text)}: {shown(key)!r} is not the name of a setting. "
            "Write it as SECTION.SETTING."
        )
    found = _toml(f"{key} = {value}") or _with_text(document, _bare_word(text, value.strip()))
    check_settings(found, path=f"--set {shown(text)}")
    return found


def _toml(line: str) -> dict[str, Any] | None:
    """Return the one setting of a line of TOML; None if it is not TOML."""
    try:
        return tomllib.loads(line)
    except (ValueError, RecursionError):
        return None


def _bare_word(text: str, value: str) -> str:
    if not _BARE_WORD.fullmatch(value):
        raise ConfigError(
            f"--set {shown(text)}: its value is not valid TOML. Write a number, true, false, a "
            "word, or a TOML list or table in the quotes of your shell."
        )
    return value


def _with_text(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the document with its one setting, however deep, set to a text."""
    [(key, value)] = document.items()
    return {key: _with_text(value, text) if isinstance(value, dict) else text}
