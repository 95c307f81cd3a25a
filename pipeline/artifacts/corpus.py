"""What translations hold beside the one hypothesis of every line, where it was asked for.

``details/{source}-{target}.jsonl``: one JSON object per test line, in the corpus's order.

Reading corpus and translations artifacts: which pairs, which directions, which lines.

A corpus holds ``{train,valid,test}/{pair}/{language}.txt``: UTF-8, one sentence per line, lines
end with ``\n`` and nothing else does; none is longer than import lets in. A pair is two codes in
alphabetical order, ``de-en``; pairs that never had training lines are the zero-shot ones. Its
statistics list ``{"pairs": {pair: {split: lines}}}``, as ``emptied`` the pairs that lost all their
training lines, and where lines were dropped, as ``imported``, the training lines there were before,
in the form of ``pairs``. Translations hold ``hypotheses/{source}-{target}.jsonl``, in
the order of the corpus's test lines.

The part of a corpus that a stage reads: the files of some splits, and what counts them.

A stage that reads training lines alone is not to run again where test lines change. It declares
the splits it reads (``stages.Input.splits``), is given no more of the corpus than these, and its
manifest has the digest of that part. So what the digest leaves out cannot reach the result.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import TypeAdapter, ValidationError

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.manifest import OTHER_LANGUAGES, describe_name
from pipeline.config.documents import RESTORE, read_json_lines
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError
from pipeline.terminal import counted


@dataclass(frozen=True)
class Alternative:
    """One of several hypotheses of a line; its score is as that of the translation."""

    text: str
    score: float


@dataclass(frozen=True)
class Word:
    """A word of the translation; its score is the log-probability of its tokens, summed."""

    text: str
    score: float


@dataclass(frozen=True)
class Details:
    """Empty where not asked for, and of an empty line."""

    n_best: tuple[Alternative, ...] = ()
    """The translation first."""
    words: tuple[Word, ...] = ()
    """Of the translation, in order."""
    source_words: tuple[str, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()
    """(source word, word of the translation), both from 0, by word of the translation."""


_DETAILS = TypeAdapter(Details)


def details_name(direction: object) -> str:
    """``direction`` is written as source-target."""
    return f"details/{direction}.jsonl"


def record_of(details: Details) -> dict[str, Any]:
    """The details as JSON has them."""
    return dataclasses.asdict(details)


def write_details(path: Path, lines: Sequence[Details]) -> None:
    """One JSON object per line, in order."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for details in lines:
            stream.write(json.dumps(record_of(details), ensure_ascii=False) + "\n")


def read_details(path: Path) -> list[Details]:
    """What :func:`write_details` wrote.

    Raises:
        ArtifactError: names the line that is none.
    """
    return [
        _details_of(record, what=f"Line {number} of {path}")
        for number, record in enumerate(read_json_lines(path), start=1)
    ]


def _details_of(record: object, *, what: str) -> Details:
    try:
        return _DETAILS.validate_python(record)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ArtifactError(f"{what} has no details of a line ({message}): {RESTORE}.") from error


Split = Literal["train", "valid", "test"]


def pair_name(first: str, second: str) -> str:
    """The name of the pair of two languages, whichever comes first."""
    return "-".join(sorted((first, second)))


@dataclass(frozen=True, order=True)
class Direction:
    """A translation direction."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def pair(self) -> str:
        return pair_name(self.source, self.target)


@dataclass(frozen=True)
class Hypothesis:
    """One translated line; ``score`` is the length-normalised log-probability (0 where none)."""

    text: str
    score: float = 0.0
    truncated: bool = False
    """Part of the source was left out: it did not fit the model, and could not be divided."""
    split: int = 0
    """Parts that a source too long for the model was translated in; 0: it was translated whole."""
    invalid: int = 0
    """Sequences of bytes that the model wrote and that are no UTF-8: the text is without them."""
    details: Details | None = None
    """What else was asked for; it stands in a file of its own."""


_HYPOTHESIS = TypeAdapter(Hypothesis)


def pair_counts(artifact: Artifact, name: str = "pairs") -> dict[str, dict[str, int]]:
    """Pair → what is counted → how many, as the statistics of an artifact have it under a name.

    Of a corpus or shards, ``pairs`` has the lines of every split; of shards, ``tokens`` has the
    training tokens of every language.

    Raises:
        ArtifactError: the statistics do not say, or something else.
    """
    table = artifact.statistics.get(name)
    if not isinstance(table, dict):
        _refuse_statistics(artifact, f"have no table {name!r}")
    for pair, counts in table.items():
        first, _, second = pair.partition("-")
        is_name = "/" not in pair and not any(map(describe_name, (first, second)))
        if not is_name or "-" in second or first >= second:
            _refuse_statistics(artifact, f"name a pair {shown(pair)!r} under {name!r}")
        if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
            _refuse_statistics(artifact, f"have no counts of {shown(pair)!r} under {name!r}")
    return dict(sorted(table.items()))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _refuse_statistics(artifact: Artifact, problem: str) -> NoReturn:
    raise ArtifactError(
        f"The statistics of {artifact.directory} {problem}: run stage "
        f"{artifact.manifest.stage!r} again."
    )


def line_counts(artifact: Artifact, split: Split) -> dict[str, int]:
    """Pair → number of lines of a corpus or shards artifact, pairs without any left out."""
    pairs = pair_counts(artifact)
    return {name: counts[split] for name, counts in pairs.items() if counts.get(split)}


def imported_lines(artifact: Artifact) -> dict[str, int]:
    """Pair → training lines as they were imported: what its resource group goes by.

    So a group is that of the data set, as in the paper, whatever is dropped later. What is itself
    an import, or of a version that did not note it, says what it has.

    Raises:
        ArtifactError: the statistics have something else there.
    """
    noted = pair_counts(artifact, "imported") if "imported" in artifact.statistics else {}
    imported = {pair: counts["train"] for pair, counts in noted.items() if counts.get("train")}
    return line_counts(artifact, "train") | imported


def imported_statistics(artifact: Artifact) -> dict[str, dict[str, int]]:
    """What a stage that drops training lines of an artifact notes as ``imported``."""
    return {pair: {"train": number} for pair, number in imported_lines(artifact).items()}


def emptied_pairs(artifact: Artifact) -> set[str]:
    """Pairs of a corpus or shards artifact that had training text of which nothing is left.

    They are no zero-shot pairs. An artifact that does not say has none.

    Raises:
        ArtifactError: the statistics have something else there.
    """
    return listed_names(artifact, "emptied")


def listed_names(artifact: Artifact, name: str) -> set[str]:
    """The names that the statistics of an artifact list; none where they say nothing.

    Raises:
        ArtifactError: the statistics have something else there.
    """
    found = artifact.statistics.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        _refuse_statistics(artifact, f"have no list of names under {name!r}")
    return set(found)


def found_scripts(corpus: Artifact) -> dict[str, str]:
    """Language → the ISO 15924 code of the script that its text was found to be in, where it was.

    Raises:
        ArtifactError: the statistics have something else there.
    """
    found = corpus.statistics.get("languages", {})
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        _refuse_statistics(corpus, "have no table of languages under 'languages'")
    scripts = {code: entry.get("script") for code, entry in found.items()}
    if not all(script is None or isinstance(script, str) for script in scripts.values()):
        _refuse_statistics(corpus, "name no script under 'languages'")
    return {code: script for code, script in scripts.items() if script}


Resource = Literal["high", "medium", "low", "extremely_low"]
_TIERS: tuple[Resource, ...] = ("extremely_low", "low", "medium")
"""Below high, ascending."""


def resource_of(imported_lines: int, *, thresholds: tuple[int, ...]) -> Resource:
    """Resource tier of a pair: high from the last threshold on, low up to the first of two.

    Of three thresholds the first is the most of an extremely low pair, the second of a low one.
    """
    *upper_bounds, high = thresholds
    if imported_lines >= high:
        return "high"
    tiers = _TIERS[-len(thresholds) :]
    bounded = zip(tiers, upper_bounds, strict=False)
    return next((tier for tier, most in bounded if imported_lines <= most), "medium")


def languages(artifact: Artifact) -> list[str]:
    """All languages of a corpus or shards artifact, sorted; of a part too, those of the whole."""
    found = {code for name in pair_counts(artifact) for code in name.split("-")}
    return sorted(found | listed_names(artifact, OTHER_LANGUAGES))


def directions(artifact: Artifact, split: Split) -> list[Direction]:
    """Both directions of every pair that has lines in the split, sorted."""
    found = []
    for name in line_counts(artifact, split):
        first, second = name.split("-")
        found += [Direction(first, second), Direction(second, first)]
    return sorted(found)


def text_name(split: Split, pair: str, language: str) -> str:
    """Name of a text file within a corpus."""
    return f"{split}/{pair}/{language}.txt"


def iterate_lines(path: Path) -> Iterator[str]:
    """Lines of a text file without their ``\\n``; no other character ends a line.

    Raises:
        ArtifactError: it cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 ({error.reason}): {RESTORE}.") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {RESTORE}.") from error


def read_lines(corpus: Artifact, split: Split, pair: str, language: str) -> list[str]:
    """All lines of one side of a pair.

    Raises:
        ArtifactError: there are more or fewer than the statistics say.
    """
    path = corpus.file(text_name(split, pair, language))
    lines = list(iterate_lines(path))
    wanted = line_counts(corpus, split).get(pair, 0)
    if len(lines) != wanted:
        raise ArtifactError(
            f"{path} has {counted(len(lines), 'line')}, the statistics of {corpus.directory} say "
            f"{wanted:,}: {RESTORE}."
        )
    return lines


def aligned_lines(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    """Lines of two files that stand beside each other.

    Raises:
        ArtifactError: one file ends before the other.
    """
    for one, other in zip_longest(iterate_lines(first), iterate_lines(second)):
        if one is None or other is None:
            raise ArtifactError(f"{first} and {second} differ in their number of lines: {RESTORE}.")
        yield one, other


def hypotheses_name(direction: Direction) -> str:
    return f"hypotheses/{direction}.jsonl"


def write_hypotheses(path: Path, hypotheses: list[Hypothesis]) -> None:
    """One JSON object per line, in order, without details."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for hypothesis in hypotheses:
            stream.write(json.dumps(without_details(hypothesis), ensure_ascii=False) + "\n")


def without_details(hypothesis: Hypothesis) -> dict[str, Any]:
    """A hypothesis as JSON has it, without its details."""
    return {name: value for name, value in vars(hypothesis).items() if name != "details"}


def read_hypotheses(translations: Artifact, direction: Direction) -> list[Hypothesis]:
    """Hypotheses of one direction, in the order of the corpus's test lines.

    Raises:
        ArtifactError: names the line that is no hypothesis.
    """
    path = translations.file(hypotheses_name(direction))
    return [
        hypothesis_of(record, what=f"Line {number} of {path}")
        for number, record in enumerate(read_json_lines(path), start=1)
    ]


def hypothesis_of(record: Mapping[str, Any], *, what: str) -> Hypothesis:
    """A hypothesis from its JSON; ArtifactError begins with ``what``."""
    try:
        return _HYPOTHESIS.validate_python(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(shown(str(part)) for part in first["loc"])
        raise ArtifactError(
            f"{what} is no hypothesis ({where}: {first['msg']}): {RESTORE}."
        ) from error
