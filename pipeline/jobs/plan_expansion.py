"""Expand ``[defaults]`` and ``[matrix]`` of a plan to stages that are written out.

``pipeline/jobs/plan.py`` documents both. Expansion works on the parsed TOML, before the stages are
checked.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, product
from typing import Any, Literal

from pydantic import Field, ValidationError

from pipeline.config.documents import merge
from pipeline.config.recipe import TABLES, without_other_kinds
from pipeline.config.settings import Settings, describe_validation
from pipeline.errors import ConfigError, no_such
from pipeline.registry import STAGES

_TABLES = frozenset(f"set.{name}" for name in TABLES)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_OF_ALL = ("recipe", "set", "processes", "threads", "ds_config", "job")
"""Settings of stages that ``[defaults]`` may set for all of them."""


class Matrix(Settings):
    """``[matrix.NAME]``: the rows over which stages are expanded."""

    rows: dict[str, dict[str, Any]] = Field(min_length=1)
    """Row → its values, for example ``lms_64`` → ``{ label = "d = 64" }``. Placeholders stand for
    them; ``recipe``, ``set`` and the like are settings of the row's stages, too."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Values of rows without their own."""
    order: Literal["stages", "rows"] = "stages"
    """Order of consecutive stages of the matrix: each stage with all rows, or each row with all
    stages."""
    times: str | None = None
    """A second matrix, for example of seeds: each of its rows takes all rows of this one. Row a
    times row b is named ``a_b`` and has the values of both; placeholders with the names of the two
    matrices stand for ``a`` and ``b``."""

    def row(self, name: str) -> dict[str, Any]:
        """Return the values of a row, its name among them."""
        return {**self.values, **self.rows[name], "row": name}


def expand(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a plan without ``[defaults]`` and ``[matrix]``.

    Args:
        document: the parsed plan.
        where: the plan, for error messages.

    Raises:
        ConfigError: a name in either of them is unknown, or two stages have one name.
    """
    plain = {key: value for key, value in document.items() if key not in ("defaults", "matrix")}
    stages = document.get("stages")
    if not isinstance(stages, dict) or not all(isinstance(s, dict) for s in stages.values()):
        return plain  # the plan's own check refuses it
    matrices = _matrices(document.get("matrix", {}), where)
    expanded: dict[str, Any] = {}
    for name, stage in _over_rows(stages, matrices, where):
        if name in expanded:
            raise _named_twice(f"{where}: two stages are named", name, _IN_NAME)
        expanded[name] = stage
    _refuse_unread_values(matrices, stages, where)
    return {**plain, "stages": _under_defaults(expanded, document.get("defaults", {}), where)}


_IN_NAME = "Write {row}, or another placeholder that tells the rows apart, into the name"


def _named_twice(what: str, name: str, fix: str) -> ConfigError:
    """Return the refusal of rows that do not differ in a name that is made of them."""
    return ConfigError(f"{what} {name!r}. {fix}.")


# ---------------------------------------------------------------- matrix


def _matrices(document: Any, where: str) -> dict[str, Matrix]:
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: matrix is not a table. Write [matrix.NAME.rows].")
    matrices = {}
    for name, matrix in document.items():
        try:
            matrices[name] = Matrix.model_validate(matrix)
        except ValidationError as error:
            said = describe_validation(error, Matrix)
            raise ConfigError(f"{where}, [matrix.{name}]: {said}") from error
    return {name: _product(name, matrices, where) for name in matrices}


def _refuse_unread_values(
    matrices: Mapping[str, Matrix], stages: Mapping[str, dict[str, Any]], where: str
) -> None:
    """Refuse a value of rows that no stage reads: mistyped, it would be lost without a word."""
    read = dict.fromkeys((*_OF_ALL, *_PLACEHOLDER.findall(str(stages))))
    for name, matrix in matrices.items():
        for key in dict.fromkeys(chain(matrix.values, *matrix.rows.values())):
            if key not in read and key not in matrices:  # rows of a product have their names
                at = f"{where}, [matrix.{name}]: no stage reads the value"
                raise no_such(at, key, [*read], otherwise="or remove it")


def _product(name: str, matrices: Mapping[str, Matrix], where: str) -> Matrix:
    """Return a matrix, its rows multiplied by the rows of the matrix ``times``."""
    matrix = matrices[name]
    if matrix.times is None:
        return matrix
    other = matrices.get(matrix.times)
    if other is None or other.times is not None:
        fault = "there is no matrix" if other is None else "times is not allowed twice:"
        known = [candidate for candidate in matrices if matrices[candidate].times is None]
        raise no_such(f"{where}, [matrix.{name}], times: {fault}", matrix.times, known)
    rows = {}
    for second, first in product(other.rows, matrix.rows):
        values = _laid_over(other.values | other.rows[second], matrix.values | matrix.rows[first])
        row = f"{first}_{second}"
        if row in rows:
            raise _named_twice(
                f"{where}, [matrix.{name}], times: two rows would be named",
                row,
                "Rename a row that it joins",
            )
        rows[row] = {**values, name: first, matrix.times: second}
    return Matrix(rows=rows, order=matrix.order, times=matrix.times)


def _over_rows(
    stages: Mapping[str, dict[str, Any]], matrices: Mapping[str, Matrix], where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the stages in order, stages of a matrix once per row."""
    used = {stage["matrix"] for stage in stages.values() if isinstance(stage.get("matrix"), str)}
    used |= {matrices[name].times for name in used & matrices.keys()}
    for name in matrices:
        if name not in used:
            raise ConfigError(
                f'{where}: no stage has matrix = "{name}". Remove [matrix.{name}], or give it to '
                "a stage."
            )
    for (chosen, is_repeated), group in groupby(stages.items(), key=_group_of):
        templates = list(group)
        if chosen is None:
            yield from templates
            continue
        if not isinstance(chosen, str) or chosen not in matrices:
            at = f"{where}, stage {templates[0][0]!r}: there is no matrix"
            raise no_such(at, str(chosen), [*matrices], otherwise="add it under [matrix]")
        expand_group = _repeated if is_repeated else _with_repeated_inputs
        yield from expand_group(templates, matrices[chosen], where)


def _group_of(item: tuple[str, dict[str, Any]]) -> tuple[Any, bool]:
    """Return the matrix of a stage, and whether the stage is repeated for every row."""
    return item[1].get("matrix"), _PLACEHOLDER.search(item[0]) is not None


def _repeated(
    templates: Sequence[tuple[str, dict[str, Any]]], matrix: Matrix, where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    pairs = (
        [(row, template) for row in matrix.rows for template in templates]
        if matrix.order == "rows"
        else [(row, template) for template in templates for row in matrix.rows]
    )
    for row, (name, stage) in pairs:
        values, at = matrix.row(row), f"{where}, stage {name!r}, row {row!r}"
        row_settings = {key: values[key] for key in _OF_ALL if key in values}
        own = _filled(_without_matrix(stage), values, at)
        yield str(_filled(name, values, at)), _laid_over(row_settings, own)


def _with_repeated_inputs(
    templates: Sequence[tuple[str, dict[str, Any]]], matrix: Matrix, where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, stage in templates:
        own, at = _without_matrix(stage), f"{where}, stage {name!r}"
        inputs = own.get("inputs")
        if isinstance(inputs, dict):
            own["inputs"] = {
                key: _entries_over_rows(table, matrix, at) if isinstance(table, dict) else table
                for key, table in inputs.items()
            }
        yield name, own


def _entries_over_rows(table: Mapping[str, Any], matrix: Matrix, where: str) -> dict[str, Any]:
    """Return a table that repeats entries with a placeholder in their name per row."""
    entries: dict[str, Any] = {}
    for key, entry in table.items():
        if _PLACEHOLDER.search(key) is None:
            entries[key] = entry
            continue
        for row in matrix.rows:
            values, at = matrix.row(row), f"{where}, row {row!r}"
            name = str(_filled(key, values, at))
            if name in entries:
                raise _named_twice(f"{at}: another row also gives an entry", name, _IN_NAME)
            entries[name] = _filled(entry, values, at)
    return entries


def _without_matrix(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stage.items() if key != "matrix"}


def _filled(value: Any, values: Mapping[str, Any], where: str) -> Any:
    """Fill the placeholders of a value; a text that is one placeholder becomes its value."""
    match value:
        case str() if whole := _PLACEHOLDER.fullmatch(value):
            return _value(whole[1], values, where)
        case str():
            return _PLACEHOLDER.sub(lambda found: str(_value(found[1], values, where)), value)
        case dict():
            return {
                str(_filled(key, values, where)): _filled(entry, values, where)
                for key, entry in value.items()
            }
        case list():
            return [_filled(entry, values, where) for entry in value]
    return value


def _value(name: str, values: Mapping[str, Any], where: str) -> Any:
    if name not in values:
        raise no_such(f"{where}: the row has no value", name, [*values])
    return values[name]


# ---------------------------------------------------------------- defaults


def _under_defaults(
    stages: Mapping[str, dict[str, Any]], document: Any, where: str
) -> dict[str, dict[str, Any]]:
    """Return the stages with the defaults of ``[defaults]`` and ``[defaults.KIND]`` below them."""
    if not isinstance(document, dict):
        raise ConfigError(f"{where}, [defaults] is not a table. Write settings of stages below it.")
    used = {str(stage.get("run")) for stage in stages.values()}
    for key, settings in document.items():
        if key not in (*STAGES, *_OF_ALL):
            at = f"{where}, [defaults]: there is no setting of stages, and no stage,"
            raise no_such(at, key, [*_OF_ALL, *STAGES])
        if key in _OF_ALL:
            continue
        for name in settings if isinstance(settings, dict) else ("",):
            if name not in (*_OF_ALL, "inputs"):
                at = f"{where}, [defaults.{key}]: there is no setting of stages"
                raise no_such(at, name, (*_OF_ALL, "inputs"))
        if key not in used:
            raise ConfigError(f"{where}, [defaults.{key}]: no stage runs {key}. Remove it.")
    merged = {}
    for name, stage in stages.items():
        kind = STAGES.get(str(stage.get("run")))
        if kind is None:
            merged[name] = dict(stage)  # the plan's own check refuses it
            continue
        taken = {
            "recipe": bool(kind.sections),
            "set": bool(kind.sections),
            "processes": kind.parallel != "no",
            "threads": kind.parallel != "no",
            "ds_config": kind.trains,
            "job": True,
        }
        defaults = {key: value for key, value in document.items() if taken.get(key)}
        merged[name] = _laid_over(_laid_over(defaults, document.get(kind.name, {})), stage)
    return merged


def _laid_over(base: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a stage into others' settings entry by entry; a recipe ``+x`` adds an overlay."""
    below, own = base.get("set"), stage.get("set")
    if isinstance(below, dict) and isinstance(own, Mapping):
        base = {**base, "set": without_other_kinds(below, own)}
    merged = merge(dict(base), stage, values=_TABLES)
    recipe = stage.get("recipe")
    if "recipe" in base and isinstance(recipe, str) and (recipe == "" or recipe[0] == "+"):
        merged["recipe"] = f"{base['recipe']}{recipe}"
    return merged
