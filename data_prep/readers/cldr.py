"""Make a demo corpus of localized phrases from Unicode CLDR, formatted by Babel.

A phrase joins one to three parts; a part is a template (a date, an amount, a list of countries)
filled with a value. Babel formats every value in each language: a phrase exists in all languages,
for example ``Friday, March 5, 2021: 37 kilometers``.

Held-out phrases share no value and no combination of templates with training phrases:

- One in five values of each template is reserved, by a digest of the value. All digits, months,
  units and names occur in training, but not the whole date, amount or pair of names. One and two
  have irregular forms and are never reserved.
- One in five unordered pairs of templates is reserved. A training phrase has no reserved pair; a
  held-out phrase has one, and only reserved values.

Pairs with the pivot have all splits, zero-shot pairs only test phrases.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

from babel import Locale, UnknownLocaleError
from babel.core import get_global
from babel.dates import format_date, format_interval, format_skeleton, format_timedelta
from babel.lists import format_list
from babel.numbers import format_currency, format_percent
from babel.units import format_unit

from data_prep.readers.raw_text import LineSource, RawLine, RawText, Section, wanted_codes
from data_prep.settings import CldrConfig, CorpusConfig
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.errors import ConfigError
from pipeline.languages import canonical, language

PIVOT = "en"
"""Language that training phrases are paired with."""
SEED = 1
"""Seed of the choice of phrases."""

Template = Literal[
    "full_date",
    "long_date",
    "month",
    "day",
    "weekday_time",
    "interval",
    "relative_time",
    "long_quantity",
    "short_quantity",
    "named_amount",
    "amount",
    "percent",
    "countries",
    "languages",
    "currencies",
]
TEMPLATES: tuple[Template, ...] = get_args(Template)
Joint = Literal["colon", "dash", "brackets", "and"]
JOINTS: tuple[Joint, ...] = get_args(Joint)
Phrase: TypeAlias = dict[str, str]
"""Language → text."""

COUNTRIES = (
    "AR AT AU BE BG BR CA CH CL CN CO CZ DE DK EG ES FI FR GB GR "
    "HU IE IL IN IT JP KE KR MX NG NL NO NZ PL PT RU SE TR UA US"
).split()
LANGUAGES = "ar bg cs da de el en es fi fr he hi hu id it ja ko nl pl pt ru sv tr uk zh".split()
CURRENCIES = "AUD BRL CAD CHF CNY EUR GBP INR JPY KRW RUB USD".split()
_WHOLE_CURRENCIES = ("JPY", "KRW")
"""Currencies shown without cents, for which different cents would be one text."""
UNITS = (
    "length-kilometer length-meter length-centimeter length-mile mass-kilogram mass-gram mass-ton "
    "volume-liter volume-milliliter area-square-meter area-hectare area-square-kilometer "
    "speed-kilometer-per-hour temperature-celsius duration-day duration-hour duration-minute "
    "duration-week energy-kilowatt-hour power-watt"
).split()
TimeUnit = Literal["second", "minute", "hour", "day", "week", "month", "year"]
SECONDS: dict[TimeUnit, int] = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 7 * 86400,
    "month": 30 * 86400,
    "year": 365 * 86400,
}
_SAME_VALUES: dict[Template, str] = {
    "full_date": "date",
    "long_date": "date",
    "long_quantity": "quantity",
    "short_quantity": "quantity",
    "named_amount": "amount",
}
"""Template → group of templates that show the same value and reserve it together."""

_YEAR = 2023
"""Year of values that show only month and day; any year without a leap day."""
_RESERVED_SHARE = 5
"""One in this many values, and pairs of templates, is reserved."""
_CLDR_LOCALES = {"zh": "zh_Hans", "sh": "sr_Latn", "tl": "fil", "no": "nb"}
_WIDE_LANGUAGES = ("ja", "zh", "yue")
_BIDI_MARKS = dict.fromkeys(
    (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
)


class Part(NamedTuple):
    """Template and its value: codes of units, currencies or places, and numbers."""

    template: Template
    names: tuple[str, ...]
    numbers: tuple[int, ...]


class Clause(NamedTuple):
    """Parts and the joints between them, independent of any language."""

    parts: tuple[Part, ...]
    joints: tuple[Joint, ...]


@dataclass(frozen=True)
class PhraseSplits:
    """Phrases of all splits; a held-out phrase exists in every language."""

    train: dict[str, list[Phrase]]
    """Language → phrases in the pivot and that language."""
    valid: list[Phrase]
    test: list[Phrase]


def read_phrases(config: CorpusConfig) -> RawText:
    """Make the phrases of all pairs of wanted languages."""
    cldr = check_languages(config.cldr)
    splits = _splits_of_pairs(make_phrases(cldr), cldr)
    wanted = wanted_codes(config.languages, [pair.split("-") for pair in splits])
    sections = [
        _section(phrases, pair, split)
        for pair, of_pair in sorted(splits.items())
        if wanted.issuperset(pair.split("-"))
        for split, phrases in of_pair.items()
    ]
    raw = RawText(sections, is_found=False)
    raw.left_out["pairs_not_selected"] = 0  # the others are never made
    return raw


def make_phrases(config: CldrConfig) -> PhraseSplits:
    """Make all phrases of a configuration, the same in every run."""
    config = check_languages(config)
    held_out = held_out_clauses(config)
    everywhere = [
        {code: format_clause(clause, code) for code in (PIVOT, *config.train_pairs)}
        for clause in held_out
    ]
    return PhraseSplits(
        train={
            code: [
                {other: format_clause(clause, other) for other in (PIVOT, code)}
                for clause in training_clauses(config, language=code)
            ]
            for code in config.train_pairs
        },
        valid=everywhere[: config.valid_phrases],
        test=everywhere[config.valid_phrases :],
    )


def _splits_of_pairs(
    phrases: PhraseSplits, config: CldrConfig
) -> dict[str, dict[Split, list[Phrase]]]:
    splits: dict[str, dict[Split, list[Phrase]]] = {
        pair_name(PIVOT, code): {
            "train": phrases.train[code],
            "valid": phrases.valid,
            "test": phrases.test,
        }
        for code in config.train_pairs
    }
    for first, second in combinations(config.zero_shot, 2):
        splits[pair_name(first, second)] = {"test": phrases.test}
    return splits


def _section(phrases: Sequence[Phrase], pair: str, split: Split) -> Section:
    first, second = pair.split("-")
    one, other = (
        LineSource(f"{pair}/{split}.{code}", f"CLDR phrases in {code}") for code in (first, second)
    )
    return Section(
        split=split,
        languages=(first, second),
        spellings=(first, second),
        sources=(one, other),
        lines=(
            RawLine(number, (phrase[first].encode(), phrase[second].encode()))
            for number, phrase in enumerate(phrases, start=1)
        ),
    )


def check_languages(config: CldrConfig) -> CldrConfig:
    """Return the configuration with usual codes, once each; ConfigError for those that do not fit.

    A code keeps the script or region that its phrases differ in, for example ``zh_Hant``.
    """
    train_pairs = {_usual_code(code): number for code, number in config.train_pairs.items()}
    zero_shot = tuple(dict.fromkeys(map(_usual_code, config.zero_shot)))
    if not train_pairs:
        raise ConfigError(
            "corpus.cldr.train_pairs is empty. Name each language and its number of phrases, "
            "for instance train_pairs = { de = 20000 }."
        )
    if PIVOT in train_pairs or len(train_pairs) < len(config.train_pairs):
        raise ConfigError(
            f"corpus.cldr.train_pairs names the pivot {PIVOT!r} or one language twice. "
            "Name every other language once."
        )
    if unpaired := sorted(set(zero_shot) - set(train_pairs)):
        raise ConfigError(
            f"corpus.cldr.zero_shot names {', '.join(unpaired)}, which corpus.cldr.train_pairs "
            f"does not pair with {PIVOT!r}. Add these pairs or take the languages out."
        )
    for code in (PIVOT, *train_pairs):
        locale(code)
    return config.model_copy(update={"train_pairs": train_pairs, "zero_shot": zero_shot})


def _usual_code(spelling: str) -> str:
    code, plain = language(spelling).code, canonical(spelling)
    usual = get_global("likely_subtags").get(plain, "").split("_")
    return plain if {*code.split("_")} <= {plain, *usual} else code


def training_clauses(config: CldrConfig, *, language: str) -> list[Clause]:
    """Draw the clauses of one pair, all different; a longer list begins as a shorter one."""
    random = Random(f"cldr {SEED} train {'' if config.same_phrases else language}")
    return _distinct(random, config.train_pairs[language], held_out=False)


def held_out_clauses(config: CldrConfig) -> list[Clause]:
    """Draw validation clauses, then test clauses, independent of the languages."""
    random = Random(f"cldr {SEED} held out")
    return _distinct(random, config.valid_phrases + config.test_phrases, held_out=True)


def is_reserved_pair(first: Template, second: Template) -> bool:
    """Return whether two templates occur together only in held-out phrases."""
    return (TEMPLATES.index(first) + TEMPLATES.index(second)) % _RESERVED_SHARE == 0


def is_reserved(part: Part) -> bool:
    """Return whether a value is reserved; a list of names is if any two of them are."""
    kind = _SAME_VALUES.get(part.template, part.template)
    if kind in ("countries", "languages", "currencies"):
        return any(_is_reserved_key((kind, *pair)) for pair in combinations(sorted(part.names), 2))
    if _count(part) in (1, 2):
        return False
    return _is_reserved_key((kind, *part.names, *part.numbers))


def draw_clause(random: Random, *, held_out: bool) -> Clause:
    """Draw a clause for training, or for held-out phrases.

    About a quarter of training clauses are a single part; a held-out one joins two or three.
    """
    sizes, weights = ((2, 3), (4, 1)) if held_out else ((1, 2, 3), (4, 11, 7))
    while True:
        size = random.choices(sizes, weights)[0]
        templates = tuple(random.choice(TEMPLATES) for _ in range(size))
        if any(is_reserved_pair(*pair) for pair in combinations(templates, 2)) == held_out:
            break
    parts = tuple(_draw_part(random, template, held_out=held_out) for template in templates)
    # From the outermost in, all different; ``and`` only joins the last two.
    joints = sorted(random.sample(JOINTS, size - 1), key=JOINTS.index)
    return Clause(parts, joints=tuple(joints))


def format_clause(clause: Clause, language: str) -> str:
    """Format a clause as one line, without bidi marks and with plain spaces."""
    texts = [format_part(part, language) for part in clause.parts]
    text = texts[-1]
    for before, joint in zip(reversed(texts[:-1]), reversed(clause.joints), strict=True):
        text = _join(before, text, joint=joint, language=language)
    return " ".join(text.translate(_BIDI_MARKS).split())


def format_part(part: Part, language: str) -> str:
    """Format a value as Babel writes it; ConfigError if CLDR lacks it in this language."""
    try:
        return _format_value(part, locale(language))
    except (KeyError, AttributeError, ValueError) as error:
        raise _refusal(f"{part.template} {'/'.join(part.names)}", language) from error


@lru_cache(maxsize=512)
def locale(language: str) -> Locale:
    """Return Babel's locale of a language; ConfigError if CLDR has none."""
    try:
        return Locale.parse(_CLDR_LOCALES.get(language, language))
    except (UnknownLocaleError, ValueError) as error:
        raise _refusal("locale", language) from error


def _refusal(what: str, language: str) -> ConfigError:
    return ConfigError(
        f"Unicode CLDR has no {what} for {language!r}. Take this language out of corpus.cldr."
    )


def _distinct(random: Random, number: int, *, held_out: bool) -> list[Clause]:
    """Draw distinct clauses; there are billions, more than any wanted number."""
    seen: dict[Clause, None] = {}
    while len(seen) < number:
        seen[draw_clause(random, held_out=held_out)] = None
    return list(seen)


def _is_reserved_key(key: tuple[str | int, ...]) -> bool:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _RESERVED_SHARE == 0


def _count(part: Part) -> int:
    """Return the number that decides the form of its noun; 0 if there is none."""
    match part.template:
        case "relative_time":
            return abs(part.numbers[0])
        case "long_quantity" | "short_quantity":
            return part.numbers[0]
        case "amount" | "named_amount":
            return part.numbers[0] // 100
        case _:
            return 0


def _draw_part(random: Random, template: Template, *, held_out: bool) -> Part:
    while True:
        part = _draw_value(random, template)
        if is_reserved(part) == held_out:
            return part


def _draw_value(random: Random, template: Template) -> Part:
    match template:
        case "full_date" | "long_date":
            day = _draw_day(random)
            return Part(template, (), (random.randint(1990, 2029), day.month, day.day))
        case "month":
            return Part(template, (), (random.randint(1990, 2029), random.randint(1, 12)))
        case "day":
            day = _draw_day(random)
            return Part(template, (), (day.month, day.day))
        case "weekday_time":
            minute = 5 * random.randrange(12)
            return Part(template, (), (random.randint(1, 7), random.randrange(24), minute))
        case "interval":
            length = random.randint(1, 40)
            first = _draw_day(random, days=365 - length)
            last = first + timedelta(days=length)
            return Part(template, (), (first.month, first.day, last.month, last.day))
        case "relative_time":
            number = random.choice((-1, 1)) * random.randint(1, 60)
            return Part(template, (random.choice(list(SECONDS)),), (number,))
        case "long_quantity" | "short_quantity":
            return Part(template, (random.choice(UNITS),), (_draw_number(random),))
        case "named_amount":
            return Part(template, (random.choice(CURRENCIES),), (100 * _draw_number(random),))
        case "amount":
            currency = random.choice(CURRENCIES)
            cents = 0 if currency in _WHOLE_CURRENCIES else random.choice((0, 25, 50, 75, 99))
            return Part(template, (currency,), (100 * _draw_number(random) + cents,))
        case "percent":
            return Part(template, (), (5 * random.randint(0, 200),))
        case "countries":
            return Part(template, _draw_names(random, COUNTRIES), ())
        case "languages":
            return Part(template, _draw_names(random, LANGUAGES), ())
        case "currencies":
            return Part(template, _draw_names(random, CURRENCIES), ())


def _draw_day(random: Random, *, days: int = 365) -> date:
    return date(_YEAR, 1, 1) + timedelta(days=random.randrange(days))


def _draw_number(random: Random) -> int:
    """Draw a number, most often small, for its plural forms, and sometimes round."""
    largest, step = random.choice(((12, 1), (99, 1), (2000, 25)))
    return step * random.randint(1, largest // step)


def _draw_names(random: Random, names: list[str]) -> tuple[str, ...]:
    return tuple(random.sample(names, random.choices((1, 2, 3), (1, 3, 1))[0]))


def _join(before: str, after: str, *, joint: Joint, language: str) -> str:
    wide = canonical(language) in _WIDE_LANGUAGES
    match joint:
        case "colon":
            return f"{before}：{after}" if wide else f"{before}: {after}"
        case "dash":
            return f"{before} – {after}"
        case "brackets":
            return f"{before}（{after}）" if wide else f"{before} ({after})"
        case "and":
            return format_list([before, after], "standard", locale=locale(language))


def _format_value(part: Part, where: Locale) -> str:
    names, numbers = part.names, part.numbers
    match part.template:
        case "full_date" | "long_date" as template:
            return format_date(date(*numbers), template.removesuffix("_date"), locale=where)
        case "month":
            year, month = numbers
            return format_skeleton("yMMMM", datetime(year, month, 1), locale=where)
        case "day":
            month, day = numbers
            return format_skeleton("MMMMd", datetime(_YEAR, month, day), locale=where)
        case "weekday_time":
            weekday, hour, minute = numbers
            moment = datetime.combine(date(2024, 1, weekday), time(hour, minute))
            return format_skeleton("EHm", moment, locale=where)
        case "interval":
            first, last = date(_YEAR, *numbers[:2]), date(_YEAR, *numbers[2:])
            return format_interval(first, last, "MMMd", locale=where)
        case "relative_time":
            return _format_relative_time(names[0], numbers[0], where)
        case "long_quantity":
            return _format_quantity(names[0], numbers[0], ("long", "short"), where)
        case "short_quantity":
            return _format_quantity(names[0], numbers[0], ("short", "long"), where)
        case "named_amount":
            return format_currency(
                numbers[0] // 100,
                names[0],
                format="#,##0.##",
                format_type="name",
                currency_digits=False,
                locale=where,
            )
        case "amount":
            return format_currency(numbers[0] / 100, names[0], locale=where)
        case "percent":
            return format_percent(numbers[0] / 1000, locale=where, decimal_quantization=False)
        case "countries":
            return format_list([where.territories[name] for name in names], "standard", where)
        case "languages":
            return format_list([where.languages[name] for name in names], "or", where)
        case "currencies":
            return format_list([where.currencies[name] for name in names], "standard", where)


def _format_relative_time(unit: str, number: int, where: Locale) -> str:
    """Format ``in 3 hours`` for 3 and ``3 hours ago`` for -3, never in the next unit."""
    granularity, seconds = next(item for item in SECONDS.items() if item[0] == unit)
    return format_timedelta(
        timedelta(seconds=number * seconds),
        granularity=granularity,
        threshold=1e9,
        add_direction=True,
        locale=where,
    )


def _format_quantity(
    unit: str, number: int, lengths: tuple[Literal["long", "short"], ...], where: Locale
) -> str:
    """Format in the first length that CLDR has; it stores only one if they agree."""
    for length in lengths:
        text = format_unit(number, unit, length, locale=where)
        if unit not in text:
            return text
    raise ValueError(f"no unit {unit}")
