"""Settings: frozen tables whose numbers have ranges, and refusals that say what may stand there."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from pipeline.errors import hint

MAX_FINDINGS = 3
"""Wrong settings that one refusal names."""
_SHOWN = 40
"""Characters of a value that a refusal repeats."""
_LONGEST = 300
"""Characters of another library's message that a refusal repeats."""


class Settings(BaseModel):
    """Frozen settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---------------------------------------------------------------- ranges


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; an open end does not belong to them."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def __contains__(self, number: float) -> bool:
        """NaN lies in no range."""
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    @property
    def words(self) -> str:
        """``a whole number from 1 to 1,000``, ``a number of more than 0 and at most 1``."""
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
        """The number as its field's type; ValueError with the range in words for all else."""
        if not isinstance(value, bool | str | bytes):
            try:
                number = handler(value)
            except (ValidationError, OverflowError):
                number = math.nan
            if number in self:
                return number
        raise ValueError(f"choose {self.words}")


def whole(low: int, high: int) -> WrapValidator:
    """Whole numbers from ``low`` to ``high``, for ``Annotated[int, whole(1, 10)]``."""
    return WrapValidator(Range(low, high, whole=True).validate)


def number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> WrapValidator:
    """Numbers from ``least`` (or more than ``above``) to ``most`` (or less than ``below``)."""
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
    """Return pydantic's first findings as one sentence: where, what stands there, what may.

    Args:
        error: what pydantic found.
        settings: the table that it found it in.
        also: names that the file may have at its top beside those of ``settings``.
    """
    findings = error.errors(include_url=False)
    described = _with_choices_once(
        [_describe_finding(finding, settings, also) for finding in findings[:MAX_FINDINGS]]
    )
    if len(findings) > MAX_FINDINGS:
        described.append(f"and {len(findings) - MAX_FINDINGS:,} more")
    sentence = "; ".join(described).rstrip(".")
    return sentence if sentence.endswith("?") else f"{sentence}."


def _with_choices_once(sentences: Sequence[str]) -> list[str]:
    """Without the names there are to choose from where an earlier sentence lists the same."""
    listed: set[str] = set()
    kept = []
    for sentence in sentences:
        head, _, choices = sentence.partition(": choose from ")
        kept.append(head if choices and choices in listed else sentence)
        listed.add(choices)
    return kept


def _describe_finding(
    finding: Mapping[str, Any], settings: type[Settings], also: Sequence[str]
) -> str:
    location: tuple[str | int, ...] = finding["loc"]
    where = ".".join(shown(str(part)) for part in location)
    match finding["type"]:
        case "extra_forbidden":
            known = (*_names_at(settings, location[:-1]), *(also if len(location) == 1 else ()))
            return f"there is no setting {where!r}{hint(str(location[-1]), known)}"
        case "missing":
            return f"{where} is missing: set it"
        case "value_error" if isinstance(finding["input"], BaseModel | dict):
            return f"{where}: {finding['ctx']['error']}".removeprefix(": ")
        case "value_error":
            return f"{where} is {shown(finding['input'])}: {finding['ctx']['error']}"
        case "list_type" | "tuple_type":
            example = shown(json.dumps([finding["input"]], ensure_ascii=False, default=str))
            return f"{where} is {shown(finding['input'])}: write a list, {example}"
        case "string_type":
            return f"{where} is {shown(finding['input'])}: write text in quotes"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{where} is {shown(finding['input'])}: it is a table, write [{where}]"
        case "bool_type" | "bool_parsing":
            return f"{where} is {shown(finding['input'])}: write true or false"
        case "literal_error" | "union_tag_invalid":
            context = finding["ctx"]
            choices = re.findall("'([^']*)'", context.get("expected", context.get("expected_tags")))
            given = str(context.get("tag", finding["input"]))
            return f"{where} is {shown(given)}{hint(given, choices)}"
    return f"{where} is {shown(finding['input'])}: {finding['msg']}"


def _names_at(settings: type[Settings], location: Sequence[str | int]) -> tuple[str, ...]:
    """Names of the settings of the table that lies at a location below ``settings``."""
    found: Any = settings
    for part in location:
        tables = _tables_in(found)
        tagged = [table for table in tables if _kind_of(table) == part]
        if tagged:
            found = tagged[0]
        elif tables:
            found = tables[0].model_fields[str(part)].annotation
        else:
            found = get_args(found)[-1]
    return tuple(_tables_in(found)[0].model_fields)


def _tables_in(annotation: Any) -> list[type[Settings]]:
    """The settings among the types that a field may have, those told apart by their kind too."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _tables_in(get_args(annotation)[0])
    if get_origin(annotation) in (UnionType, Union):
        return [table for entry in get_args(annotation) for table in _tables_in(entry)]
    return []


def _kind_of(table: type[Settings]) -> str | None:
    """What tells a table from others in its place."""
    kind = table.model_fields.get("kind")
    return None if kind is None else str(kind.default)


def one_line(error: Exception) -> str:
    """What an error of another library says, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def shown(value: object) -> str:
    """A value as a refusal repeats it: short, on one line."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python prints no 5,000 digits
        return f"a number of {value.bit_length():,} bits"
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # of a list with such a number
        return f"a {type(value).__name__} with a number of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


Route = Literal["specific", "shared"]
"""Which way through a model whose languages have weights of their own: theirs, or those of all."""

Seed = Annotated[int, whole(0, 2**63 - 1)]
Lines = Annotated[int, whole(0, 10**12)]
Updates = Annotated[int, whole(1, 10**9)]
BatchTokens = Annotated[int, whole(1, 10**8)]
Layers = Annotated[int, whole(1, 1000)]
Temperature = Annotated[float, number(above=0, most=float("inf"))]
"""1: proportional; inf: uniform."""
DropRate = Annotated[float, number(least=0, below=1)]
LossWeight = Annotated[float, number(least=0, most=1000)]
NUM_SPECIALS = 4
"""Padding, beginning and end of a sentence, and what is unknown."""
EXTRA_TOKENS = 2
"""Positions of a sentence beside its own tokens: a tag and end-of-sentence."""
MAX_EXPERTS = 2**14
MAX_GROUPS = 10**4
MAX_STATES = 10**6
