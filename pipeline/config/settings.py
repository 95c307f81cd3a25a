"""Define the base classes of settings, ranges of numbers, and error messages for wrong values.

A variant is an encoder front end or a kind of language modules. Its settings
(:class:`VariantSettings`) say what it asks of the model's shape and of the tokenizer, and what the
model can then do. Extensions (:mod:`pipeline.extensions`) subclass them, and
:mod:`pipeline.config.recipe` composes them.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo

from pipeline.config.documents import toml_value
from pipeline.errors import hint

MAX_FINDINGS = 3
"""Most wrong settings that one error message lists."""
_SHOWN = 40
"""Most characters of a value that an error message repeats."""
_FORMATS = dict.fromkeys(("csv", "json", "jsonl", "parquet"), "columns")
"""Format of files → value of ``corpus.source`` that reads it."""
_LONGEST = 300
"""Most characters of another library's message that an error message repeats."""


class Settings(BaseModel):
    """Frozen settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    removed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Settings of earlier versions → values with the result of today, which stored runs note."""

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return settings that earlier versions had in another form as today has them."""
        return values

    @model_validator(mode="before")
    @classmethod
    def _leave_out_removed(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = cls.of_today({**values})
        others = [
            f"{name} = {_given(values[name])}"
            for name, same in cls.removed.items()
            if name in values
            and values[name] not in same
            and str(values[name]) not in map(_given, same)  # "true" in quotes is true
        ]
        if others:
            raise ValueError(
                f"{', '.join(others)} is gone, and had another result than today's. Leave it out"
            )
        return {name: value for name, value in values.items() if name not in cls.removed}


def tables_of_names(settings: type[BaseModel], *, table: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings that are a table of the user's names."""
    for name, setting in settings.model_fields.items():
        path = f"{table}.{name}".removeprefix(".")
        kinds = [setting.annotation]
        while kinds:
            kind = kinds.pop()
            if get_origin(kind) is dict:
                yield path
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from tables_of_names(kind, table=path)
            elif get_origin(kind) in (Annotated, Union, UnionType):
                kinds += get_args(kind)


def settings_of_kinds(settings: type[BaseModel]) -> dict[str, dict[str, Collection[str]]]:
    """Return setting → kind → names of its table's settings, for tables of several kinds."""
    tables = {name: _tables_in(one.annotation) for name, one in settings.model_fields.items()}
    return {
        name: {str(_kind_of(kind)): kind.model_fields for kind in kinds}
        for name, kinds in tables.items()
        if len(kinds) > 1
    }


# ---------------------------------------------------------------- ranges


@dataclass(frozen=True)
class Range:
    """A range of numbers from ``low`` to ``high``; an open end is excluded."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def __contains__(self, number: float) -> bool:
        """Return whether a number is in the range; NaN is in none."""
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    @property
    def words(self) -> str:
        """The range in words: ``a whole number from 1 to 1,000``, ``a number of more than 0 …``."""
        kind = "a whole number" if self.whole else "a number"
        low = f"of more than {_figure(self.low)}" if self.open_low else f"from {_figure(self.low)}"
        if math.isinf(self.high) and not self.open_high:
            return f"{kind} {low} on, inf included"
        if self.open_high:
            return f"{kind} {low} and less than {_figure(self.high)}"
        if self.open_low:
            return f"{kind} {low} and at most {_figure(self.high)}"
        return f"{kind} {low} to {_figure(self.high)}"

    def validate(self, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Return the number in its field's type, or raise ValueError with the range in words."""
        if not isinstance(value, bool | str | bytes):
            try:
                number = handler(value)
            except (ValidationError, OverflowError):
                number = math.nan
            if number in self:
                return number
        raise ValueError(f"Choose {self.words}")


def whole(low: int, high: int) -> WrapValidator:
    """Accept whole numbers of a range in an ``Annotated`` type, for example from 1 to 10."""
    return WrapValidator(Range(low, high, whole=True).validate)


def number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> WrapValidator:
    """Accept numbers from ``least`` (or above ``above``) to ``most`` (or below ``below``)."""
    low, high = (above if least is None else least), (below if most is None else most)
    assert low is not None
    assert high is not None
    within = Range(low, high, open_low=least is None, open_high=most is None)
    return WrapValidator(within.validate)


def _figure(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


# ---------------------------------------------------------------- refusals


def describe_validation(
    error: ValidationError, settings: type[Settings], *, also: Sequence[str] = ()
) -> str:
    """Describe pydantic's first findings in sentences: where, which value, what is allowed.

    ``also`` are further names that the file may have at its top, for example ``parent``.
    """
    findings = [*filter(_is_true, error.errors(include_url=False))]
    described = _with_choices_once(
        [_describe_finding(finding, settings, also) for finding in findings[:MAX_FINDINGS]]
    )
    if len(findings) > MAX_FINDINGS:
        described.append(f"And {len(findings) - MAX_FINDINGS:,} more")
    text = " ".join(one if one[-1] in ".?" else f"{one}." for one in described)
    return re.sub(r"(?<=[.?] )t(?=here is no setting )", "T", text)


def _is_true(finding: Mapping[str, Any]) -> bool:
    """Return whether a finding about a list's length is true of the list as given."""
    length = finding.get("ctx", {}).get("actual_length")  # pydantic counts the valid entries only
    if finding["type"] == "missing" and isinstance(finding["loc"][-1], int):
        length = finding["loc"][-1]  # each missing number of a pair is a finding
    return length is None or length == len(finding["input"])


def _with_choices_once(sentences: Sequence[str]) -> list[str]:
    """Remove a list of choices from a sentence if an earlier one has the same list."""
    listed: set[str] = set()
    kept = []
    for sentence in sentences:
        head, _, choices = sentence.partition(". Choose from ")
        kept.append(head if choices and choices in listed else sentence)
        listed.add(choices)
    return kept


def _describe_finding(
    finding: Mapping[str, Any], settings: type[Settings], also: Sequence[str]
) -> str:
    location: tuple[str | int, ...] = finding["loc"]
    found, field, path = _place(settings, location)
    where = ".".join(shown(str(part)) for part in path)
    if path and isinstance(path[-1], int):
        item = "" if finding["type"] == "missing" else f" (item {path[-1] + 1})"
        where = f"{where.rpartition('.')[0]}{item}"
    value = shown(finding["input"]) or '""'
    match finding["type"]:
        case "extra_forbidden":
            names = _tables_in(_place(settings, location[:-1])[0])[0].model_fields
            known = (*names, *(also if len(location) == 1 else ()))
            return f"there is no setting {where!r}{hint(str(location[-1]), known)}"
        case "missing" if not isinstance(location[-1], int):
            return f"{where} is missing. Set it"
        case "value_error" if isinstance(finding["input"], BaseModel | dict):
            return f"{where}: {finding['ctx']['error']}".removeprefix(": ")
        case "value_error":
            return f"{where} is {_given(finding['input'])}. {finding['ctx']['error']}"
        case "tuple_type" | "missing" | "too_short" | "too_long" if length := _length(field):
            return f"{where} is {value}. Write a list of {length}"
        case "list_type" | "tuple_type":
            entry = _place(settings, (*location, 0))[0]
            if _tables_in(entry):
                return f"{where} is {value}. Write it as a table, [[{where}]]"
            if isinstance(finding["input"], dict):
                return f"{where} is {value}. Write a list"
            given = finding["input"]
            entries = [toml_value(given) if entry is str and not isinstance(given, str) else given]
            if isinstance(entries[0], str) and not re.search(r"[^,]\s", entries[0]):
                entries = [*filter(None, re.split(r"[,\s]+", entries[0]))]  # de,en
            example = shown(toml_value(entries))
            return f"{where} is {value}. Write a list, {example}"
        case "string_type":
            return f"{where} is {value}. Write text in quotes"
        case "model_type" | "model_attributes_type" | "dict_type":
            table = re.sub(r"^(.*) \(item \d+\)$", r"[\1]", where)
            return f"{where} is {value}. Write it as a table, [{table}]"
        case "too_short" if not finding["input"]:
            return f"{where} is empty. Add an entry"
        case "bool_type" | "bool_parsing":
            return f"{where} is {_given(finding['input'])}. Write true or false"
        case "literal_error":
            given, expected = finding["input"], finding["ctx"]["expected"]
            choices = [choice.strip("'") for choice in re.split(", | or ", expected)]
            if not isinstance(given, str) or given in choices:  # a number in quotes
                return f"{where} is {_given(given)}{hint('', choices)}"
            return f"{where} is {value}{hint(_FORMATS.get(given, given), choices)}"
        case "union_tag_invalid" | "union_tag_not_found":
            kinds = [*filter(None, map(_kind_of, _tables_in(found)))]
            tag = finding["ctx"].get("tag", "")
            return f"{where}.kind is {shown(tag) or 'missing'}{hint(tag, kinds)}"
    return f"{where} is {value}: {finding['msg']}"


def _given(value: object) -> str:
    """Return a value as it was given: text in quotes, since a number in quotes is none."""
    is_plain = isinstance(value, str | bool)  # as TOML spells both
    return shown(json.dumps(value, ensure_ascii=False) if is_plain else value)


def _place(settings: type[Settings], location: Sequence[str | int]) -> tuple[Any, Any, list[Any]]:
    """Return the type and setting at pydantic's location, and its path without tags of unions."""
    found: Any = settings
    field: FieldInfo | None = None
    path = []
    for part in location:
        tables = _tables_in(found)
        if tagged := [table for table in tables if _kind_of(table) == part]:
            found = tagged[0]
            continue
        path.append(part)
        if tables:
            field = tables[0].model_fields.get(str(part))
            found = field and field.annotation
        else:
            found = next((e for e in reversed(get_args(found)) if e is not Ellipsis), None)
    return found, field, path


def _length(field: FieldInfo | None) -> str:
    """Return the length of a setting's list, with its default as an example; empty if free."""
    if field is None or get_origin(field.annotation) is not tuple:
        return ""
    low = high = len(get_args(field.annotation))
    if Ellipsis in get_args(field.annotation):
        low = max((getattr(limit, "min_length", 0) for limit in field.metadata), default=0)
        high = max((getattr(limit, "max_length", 0) for limit in field.metadata), default=0)
    if not high:
        return ""
    length = f"{low}" if low == high else f"{low} to {high}"
    if not isinstance(field.default, tuple):
        return f"{length} entries"
    return f"{length} numbers, for example {json.dumps(field.default)}"


def _tables_in(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes among the types of a field, those told apart by kind too."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _tables_in(get_args(annotation)[0])
    if get_origin(annotation) in (UnionType, Union):
        return [table for entry in get_args(annotation) for table in _tables_in(entry)]
    return []


def _kind_of(table: type[Settings]) -> str | None:
    """Return the tag that tells a table from others in its place; None if it has none."""
    kind = table.model_fields.get("kind")
    return None if kind is None else str(kind.default)


def one_line(error: Exception) -> str:
    """Return the message of another library's error on one line, cut to a length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def shown(value: object) -> str:
    """Return a value for an error message: short, on one line."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python prints no 5,000 digits
        return f"a number of {value.bit_length():,} bits"
    try:
        text = value if isinstance(value, str) else repr(value)
        text = value.isoformat() if isinstance(value, date | time) else text  # as TOML has it
    except ValueError:  # a list that contains such a number
        return f"a {type(value).__name__} with a number of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


Route = Literal["specific", "shared"]
"""Route through a model with language modules: language-specific, or shared by all languages."""

Seed = Annotated[int, whole(0, 2**63 - 1)]
Lines = Annotated[int, whole(0, 10**12)]
Updates = Annotated[int, whole(1, 10**9)]
BatchTokens = Annotated[int, whole(1, 10**8)]
Layers = Annotated[int, whole(1, 1000)]
Temperature = Annotated[float, number(above=0, most=float("inf"))]
"""Sampling temperature T, p ∝ n^(1/T): 1 is proportional, inf uniform."""
DropRate = Annotated[float, number(least=0, below=1)]
LossWeight = Annotated[float, number(least=0, most=1000)]
NUM_SPECIALS = 4
"""Special tokens: padding, beginning and end of a sentence, unknown."""
EXTRA_TOKENS = 2
"""Positions of a sentence besides its own tokens: a tag and end-of-sentence."""
MAX_EXPERTS = 2**14
MAX_GROUPS = 10**4
MAX_STATES = 10**6


SHARED = "shared"
"""The module of all languages, and the name of its route."""


class ModelShape(Protocol):
    """The settings of a model that a variant may depend on."""

    @property
    def width(self) -> int:
        """Width of the model's states."""

    @property
    def num_heads(self) -> int:
        """Heads of an attention."""

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers."""

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers."""


class PieceIds(Protocol):
    """The tokenizer, as far as a variant may ask."""

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages, in the order of their tokens."""

    def language_token_id(self, language: str, /) -> int:
        """Return the id of a language's token."""

    def white_space_ids(self) -> tuple[int, ...]:
        """Return the ids of pieces that are white space."""


class VariantSettings(Settings):
    """Settings of a variant, told apart by ``kind``."""

    kind: str

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the variant does not fit the model's shape."""

    def check_languages(self, languages: Sequence[str]) -> None:
        """Raise ValueError if the variant does not fit the tokenizer's languages."""

    def marks(self, vocabulary: PieceIds) -> dict[str, Any]:  # noqa: ARG002 (one signature)
        """Return the fields of a model's spec that the variant takes from the tokenizer."""
        return {}

    def export_problem(self, directory: Path) -> str:  # noqa: ARG002 (one signature)
        """Say why other software cannot have the variant, and what to do; empty where it can."""
        return ""


class FrontSettings(VariantSettings):
    """Settings of an encoder front end."""

    parts_words: ClassVar[bool] = False
    """It is given where words begin, which a segmenter of the recipe may find."""


class LanguageModuleSettings(VariantSettings):
    """Settings of weights that belong to single languages."""

    languages: tuple[str, ...] | None = None
    """Languages that have modules; None: all of the tokenizer's."""
    fits_encoder_alone: ClassVar[bool] = False
    """An encoder without a decoder can have them."""

    @property
    def needs_dense_layers(self) -> bool:
        """Whether only layers without experts can have them."""
        return False

    @property
    def has_shared_route(self) -> bool:
        """Whether the model also has a route for all languages."""
        return False

    def languages_among(self, languages: tuple[str, ...]) -> tuple[str, ...]:
        """Return the languages of a tokenizer that have modules."""
        return languages if self.languages is None else self.languages

    def check_languages(self, languages: Sequence[str]) -> None:
        """Raise ValueError for modules of unknown languages, or a language called shared."""
        unknown = sorted(set(self.languages or ()) - set(languages))
        if unknown or self.languages == ():
            raise ValueError(
                "model.language_modules.languages must name one or more of the tokenizer's "
                f"languages, {', '.join(languages)}"
                + (f"; {', '.join(unknown)} is none of them" if unknown else "")
            )
        if SHARED in languages:
            raise ValueError("a language is called shared, as the module of all languages is")

    def export_problem(self, directory: Path) -> str:
        """Say why other software cannot have such modules, and what to do."""
        fix = (
            f"fold the route that all languages share into a plain model, `mmnmt checkpoint fold "
            f"{directory} --out DIR`, and export that"
            if self.has_shared_route
            else "`mmnmt checkpoint fold` makes a plain model where model.language_modules.shared "
            "is true, and here it is not: train one with it"
        )
        return (
            f"{directory} has weights of languages' own (model.language_modules), which no format "
            f"can have: {fix}."
        )


class InstalledExtension:
    """Declarations of an extension package; by default nothing.

    Recipes are made of its settings. Everything else is imported when a method asks for it, since
    stages, reports and the model import recipes, and the model and reports import large packages.
    """

    front_ends: ClassVar[tuple[type[FrontSettings], ...]] = ()
    language_modules: ClassVar[tuple[type[LanguageModuleSettings], ...]] = ()
    sections: ClassVar[Mapping[str, type[Settings]]] = {}
    """Sections of recipes by name. Each has a type of its own, and all its settings a default."""

    def load_model(self) -> Any:
        """Return the :class:`~pipeline.model.extension.Extension`; None: the model is unchanged."""
        return None

    def load_stages(self) -> Any:
        """Return a sequence of :class:`~pipeline.stage.Stage`."""
        return ()

    def report_sections(self, analyses: Mapping[str, Any]) -> Any:  # noqa: ARG002 (one signature)
        """Return each :class:`~pipeline.evaluation.tables.ReportSection` about analyses.

        ``analyses`` are artifacts by name, as the stage ``evaluate`` is given them.
        """
        return ()


def one_of(kinds: Sequence[type[VariantSettings]]) -> Any:
    """Return the type of a setting with several forms of table, told apart by ``kind``."""
    if not kinds:
        return type(None)
    union: Any = reduce(or_, kinds)
    return Annotated[union, Field(discriminator="kind")] if len(kinds) > 1 else union
