"""Read corpora and translations: pairs, directions, lines and hypotheses.

A corpus holds ``{train,valid,test}/{pair}/{language}.txt``: UTF-8, one sentence per line, each line
ended by a newline and by nothing else. A pair is two codes in alphabetical order, for example
``de-en``; a pair that never had training lines is a zero-shot pair.

A side that a machine wrote has a mark after its language. It makes the pair a pair of its own, that
has training lines only and is trained in one direction: ``de+back-en`` from back-translated German
into English, ``de+distilled-en`` from English into German that a teacher wrote.
``provenance/{pair}.jsonl`` has one JSON object per line of such a pair, in the same order: the
``system`` that translated it, the ``direction`` of the translation, its ``score`` and, if it was
translated back, ``round_trip``, the chrF++ of the result with the line.

The statistics of a corpus hold

- ``pairs``: pair → split → lines;
- ``emptied``: pairs that lost all their training lines;
- ``joined``: pair → ``matched`` → lines joined over the pivot before any were dropped;
- ``imported``: pair → ``train`` → lines before any were dropped, where some were.

A stage that declares splits (``stages.Input.splits``) is given a part of the corpus, and its
manifest records only the digest of that part: new test lines do not make training run again.

Translations hold ``hypotheses/{source}-{target}.jsonl``, one JSON object per test line in the order
of the corpus, and where asked for ``details/{source}-{target}.jsonl`` in the same order.

Translated text holds ``text/{language}/{file}``, the lines of a file in the language of the text
and in each language that they were translated into, and ``scores/{language}/{file}.jsonl``, the
rest of each translation. The statistic ``directions`` counts the lines of every direction.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.manifest import OTHER_LANGUAGES, describe_name
from pipeline.config.documents import RESTORE, read_json_lines
from pipeline.errors import ArtifactError, ConfigError, unreadable
from pipeline.languages import find_code
from pipeline.terminal import counted

Value = TypeVar("Value")


@dataclass(frozen=True)
class Alternative:
    """One of several hypotheses of a line, scored like the translation."""

    text: str
    score: float


@dataclass(frozen=True)
class Word:
    """Word of a translation with the summed log-probability of its tokens."""

    text: str
    score: float


@dataclass(frozen=True)
class Details:
    """Alternatives, words and alignment of one line; empty if not asked for or if the line is."""

    n_best: tuple[Alternative, ...] = ()
    """The hypotheses, the translation first."""
    words: tuple[Word, ...] = ()
    """Words of the translation, in order."""
    source_words: tuple[str, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()
    """Pairs (source word, target word), both counted from 0, by target word."""


def details_name(direction: object) -> str:
    """Return the name of the details of a direction, ``source-target``, in the artifact."""
    return f"details/{direction}.jsonl"


def write_details(path: Path, lines: Sequence[Details]) -> None:
    """Write one JSON object per line, in order."""
    _write_json_lines(path, map(dataclasses.asdict, lines))


def _write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


Split = Literal["train", "valid", "test"]


def pair_name(first: str, second: str) -> str:
    """Return the name of the pair of two languages, given in any order."""
    return "-".join(sorted((first, second)))


BACK_TRANSLATED, DISTILLED = "+back", "+distilled"
"""Marks of sides that a machine wrote: a source, and a target."""


def language_of(side: str) -> str:
    """Return the language of a side of a pair: ``de`` of ``de+back``."""
    return side.partition("+")[0]


def is_synthetic(name: str) -> bool:
    """Return whether the name of a side, pair or direction contains a side that a machine wrote."""
    return "+" in name


@dataclass(frozen=True, order=True)
class Direction:
    """Translation direction from ``source`` to ``target``."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def pair(self) -> str:
        """Return the name of the pair."""
        return pair_name(self.source, self.target)

    @property
    def suits_marks(self) -> bool:
        """Return whether sides that a machine wrote, if any, are where their marks want them."""
        return not self.source.endswith(DISTILLED) and not self.target.endswith(BACK_TRANSLATED)


def directions_of(pair: str) -> tuple[Direction, Direction]:
    """Return the direction from the first language to the second, and the reverse."""
    first, second = pair.split("-")
    return Direction(first, second), Direction(second, first)


@dataclass(frozen=True)
class Hypothesis:
    """Translated line with its length-normalized log-probability (0 where there is none)."""

    text: str
    score: float = 0.0
    truncated: bool = False
    """True if part of the source was left out because it neither fit the model nor could be
    split."""
    split: int = 0
    """Parts that a source too long for the model was translated in; 0 if it was translated
    whole."""
    invalid: int = 0
    """Byte sequences that are not valid UTF-8 and were dropped from the text."""
    unknown: int = 0
    """Tokens of the source for characters that the vocabulary does not have, one per run."""
    at_limit: bool = False
    """Whether it is as long as settings and model permit, so that its end may be cut off."""
    details: Details | None = None
    """Alternatives, words and alignment, which are stored in a file of their own."""


_HYPOTHESIS = TypeAdapter(Hypothesis)


def pair_counts(artifact: Artifact, name: str = "pairs") -> dict[str, dict[str, int]]:
    """Return the table pair → counted thing → count that the statistics hold under ``name``.

    ``pairs`` counts the lines of every split, for example ``{"de-en": {"train": 8000}}``;
    ``tokens``, of shards, the training tokens of every language.

    Raises:
        ArtifactError: The statistics lack the table, or it is malformed.
    """
    return dict(sorted(statistic(artifact, name, _PAIRS).items()))


@cache  # statistics name the same hundreds of pairs whenever they are read
def _pair(name: str) -> str:
    first, _, second = name.partition("-")
    if "/" in name or "-" in second or any(map(describe_name, (first, second))) or first >= second:
        raise ValueError("it names no pair")
    return name


def line_counts(artifact: Artifact, split: Split) -> dict[str, int]:
    """Return the number of lines of every pair that has lines in the split."""
    pairs = pair_counts(artifact)
    return {name: counts[split] for name, counts in pairs.items() if counts.get(split)}


def imported_lines(artifact: Artifact) -> dict[str, int]:
    """Return the training lines of every pair as imported, which decide its resource tier.

    The data set keeps its tier, as in the paper, even if `clean` drops lines. An artifact
    without the statistic ``imported`` counts its own lines.
    """
    noted = pair_counts(artifact, "imported") if "imported" in artifact.statistics else {}
    imported = {pair: counts["train"] for pair, counts in noted.items() if counts.get("train")}
    return line_counts(artifact, "train") | imported


def imported_statistics(artifact: Artifact) -> dict[str, dict[str, int]]:
    """Return the statistic ``imported`` for a stage that drops training lines."""
    return {pair: {"train": number} for pair, number in imported_lines(artifact).items()}


def emptied_pairs(artifact: Artifact) -> set[str]:
    """Return the pairs that lost all their training lines, which are not zero-shot pairs."""
    return listed_names(artifact, "emptied")


def joined_lines(artifact: Artifact) -> dict[str, dict[str, int]]:
    """Return the lines of every pair that `clean` joined over a pivot, before any were dropped."""
    return pair_counts(artifact, "joined") if "joined" in artifact.statistics else {}


def listed_names(artifact: Artifact, name: str) -> set[str]:
    """Return the names that the statistics list under ``name``; none if they do not say."""
    names: list[str] = statistic(artifact, name, _NAMES, default=[])
    return set(names)


def found_scripts(corpus: Artifact) -> dict[str, str]:
    """Return the ISO 15924 script of each language, if its text has a known script."""
    entries = statistic(corpus, "languages", _LANGUAGES, default={})
    return {code: entry.script for code, entry in entries.items() if entry.script}


def meant_languages(corpus: Artifact, codes: Collection[str]) -> dict[str, set[str]]:
    """Return language of a corpus → the codes among ``codes`` that its raw spellings mean.

    A single script or region of a language has the plain code: text in ``zho_Hant`` is ``zh``, and
    means ``zh_Hant`` among codes that have both. A language that means none of them is itself.
    """
    found = {code: {code} for code in languages(corpus)}
    whole = Artifact(corpus.directory, corpus.whole or corpus.manifest)  # a part does not say
    for code, entry in statistic(whole, "languages", _LANGUAGES, default={}).items():
        meant = {one for spelling in entry.spellings if (one := find_code(spelling, codes))}
        if code in found and meant:
            found[code] = meant
    return found


def refuse_other_codes(corpus: Artifact, codes: Collection[str], *, place: str) -> None:
    """Refuse a corpus in which a language has a code that means another language elsewhere."""
    for code, meant in meant_languages(corpus, codes).items():
        if code in codes and code not in meant:
            raise ConfigError(
                f"{corpus.directory} calls {code!r} what {place} knows as {min(meant)!r}. Import "
                f"its text together with text in the other {code!r}: both then have their codes."
            )


class _Language(BaseModel):
    script: str | None = None
    spellings: list[str] = []


_NAMES = TypeAdapter(list[str])
_LANGUAGES = TypeAdapter(dict[str, _Language])
_PAIRS = TypeAdapter(dict[Annotated[str, AfterValidator(_pair)], dict[str, NonNegativeInt]])
_OfDirections = dict[Annotated[str, Field(pattern="^[^-]+-[^-]+$")], int]
_DIRECTIONS = TypeAdapter(Annotated[_OfDirections, Field(min_length=1)])


def statistic(
    artifact: Artifact, name: str, form: TypeAdapter[Value], *, default: Value | None = None
) -> Value:
    """Return what the statistics hold under a name; ArtifactError if it has another form."""
    try:
        return form.validate_python(artifact.statistics.get(name, default), strict=True)
    except ValidationError as error:
        raise artifact.refusal(
            f"The statistics of {artifact.directory} do not have under {name!r} what its stage "
            "writes there"
        ) from error


Resource = Literal["high", "medium", "low", "extremely_low"]
_TIERS: tuple[Resource, ...] = ("extremely_low", "low", "medium")
"""Tiers below ``high``, ascending."""


def resource_of(imported_lines: int, *, thresholds: tuple[int, ...]) -> Resource:
    """Return the resource tier of a pair by its number of imported training lines.

    A pair is high from the last threshold on. Of two thresholds, the first is the most of a low
    pair; of three, the first is the most of an extremely low pair and the second of a low one.
    """
    *upper_bounds, high = thresholds
    if imported_lines >= high:
        return "high"
    tiers = _TIERS[-len(thresholds) :]
    bounded = zip(tiers, upper_bounds, strict=False)
    return next((tier for tier, most in bounded if imported_lines <= most), "medium")


def tiers_of(training: Artifact, *, thresholds: tuple[int, ...]) -> dict[str, Resource]:
    """Return the resource tier of every pair that has training lines left; others have none."""
    imported = imported_lines(training)
    trained = line_counts(training, "train")
    return {pair: resource_of(imported[pair], thresholds=thresholds) for pair in trained}


def languages(artifact: Artifact) -> list[str]:
    """Return all languages of a corpus or shards, sorted; for a part, of the whole corpus."""
    sides = {code for name in pair_counts(artifact) for code in name.split("-")}
    sides |= listed_names(artifact, OTHER_LANGUAGES)
    return sorted({language_of(side) for side in sides})


def directions(artifact: Artifact, split: Split) -> list[Direction]:
    """Return both directions of every pair that has lines in the split, sorted."""
    return sorted(way for name in line_counts(artifact, split) for way in directions_of(name))


def text_name(split: Split, pair: str, language: str) -> str:
    """Return the name of a text file of a corpus."""
    return f"{split}/{pair}/{language}.txt"


def provenance_name(pair: str) -> str:
    """Return the name of the origins of a pair's machine translations, line by line."""
    return f"provenance/{pair}.jsonl"


def iterate_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without their newline; no other character ends a line.

    Raises:
        ArtifactError: It cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _damaged(f"{path} is not UTF-8 ({error.reason})") from error
    except OSError as error:
        raise ArtifactError(unreadable(path, error, f"{RESTORE}.")) from error


def _damaged(problem: str) -> ArtifactError:
    return ArtifactError(f"{problem}: {RESTORE}.")


def read_lines(corpus: Artifact, split: Split, pair: str, language: str) -> list[str]:
    """Return all lines of one side of a pair; ArtifactError unless the statistics count as many."""
    path = corpus.file(text_name(split, pair, language))
    lines = list(iterate_lines(path))
    wanted = line_counts(corpus, split).get(pair, 0)
    if len(lines) != wanted:
        raise _damaged(
            f"{path} has {counted(len(lines), 'line')}, the statistics of {corpus.directory} say "
            f"{wanted:,}"
        )
    return lines


def aligned_lines(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of two files side by side; ArtifactError if one ends before the other."""
    for line, counterpart in zip_longest(iterate_lines(first), iterate_lines(second)):
        if line is None or counterpart is None:
            raise _damaged(f"{first} and {second} differ in their number of lines")
        yield line, counterpart


def hypotheses_name(direction: Direction) -> str:
    """Return the name of the hypotheses of a direction in the artifact."""
    return f"hypotheses/{direction}.jsonl"


def write_hypotheses(path: Path, hypotheses: list[Hypothesis]) -> None:
    """Write one JSON object per line, in order, without details."""
    plain = (dataclasses.replace(hypothesis, details=None) for hypothesis in hypotheses)
    _write_json_lines(path, map(hypothesis_record, plain))


def hypothesis_record(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return a hypothesis as a JSON object, with its details if it has any."""
    record = dict(vars(hypothesis))
    if (details := record.pop("details")) is not None:
        record["details"] = dataclasses.asdict(details)
    return record


def read_hypotheses(translations: Artifact, direction: Direction) -> list[Hypothesis]:
    """Return the hypotheses of one direction, in the order of the corpus's test lines."""
    path = translations.file(hypotheses_name(direction))
    return [
        hypothesis_of(record, what=f"Line {number} of {path}")
        for number, record in enumerate(read_json_lines(path), start=1)
    ]


def hypothesis_of(record: Mapping[str, Any], *, what: str) -> Hypothesis:
    """Return the hypothesis of a JSON object; the ArtifactError for others begins with ``what``."""
    try:
        return _HYPOTHESIS.validate_python(record)
    except ValidationError as error:
        raise _damaged(f"{what} is no hypothesis as its stage writes it") from error


# ---------------------------------------------------------------- translated text


def translated_name(language: str, name: str) -> str:
    """Return the name of a file's lines in a language in the artifact."""
    return f"text/{language}/{name}"


def scores_name(language: str, name: str) -> str:
    """Return the name of the scores of a file's translations in the artifact."""
    return f"scores/{language}/{name}.jsonl"


def translated_directions(translated: Artifact) -> list[Direction]:
    """Return the directions of translated text."""
    names = statistic(translated, "directions", _DIRECTIONS)
    return [Direction(*name.split("-")) for name in names]


def translated_lines(
    translated: Artifact, direction: Direction
) -> Iterator[tuple[str, Hypothesis]]:
    """Yield every line of every file with its translation.

    Raises:
        ArtifactError: The lines are missing, as in text of an earlier version, or do not fit.
    """
    below = translated_name(direction.target, "")
    for text in translated.names(below):
        name = text.removeprefix(below)
        if not translated.has(translated_name(direction.source, name)):
            raise ArtifactError(
                f"{translated.directory} has translations without the lines that they translate. "
                "Run translate --text again."
            )
        source = translated.file(translated_name(direction.source, name))
        scores = translated.file(scores_name(direction.target, name))
        lines = aligned_lines(source, translated.file(text))
        try:
            for (line, translation), record in zip(lines, read_json_lines(scores), strict=True):
                what = f"A line of {scores}"
                yield line, hypothesis_of({**record, "text": translation}, what=what)
        except ValueError as error:
            raise _damaged(f"{scores} does not fit {text}") from error
