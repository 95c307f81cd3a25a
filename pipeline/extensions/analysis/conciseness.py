"""Measure languages in test lines: bytes (MoCE, §5.1, appendix A) and pieces per word.

Byte lengths are those of UTF-8 lines without surrounding white space.

Fertility is the mean number of pieces per word (Rust et al., 2021), as in LOBEF's Tables 1 and 2.
White space separates words; pieces of white space alone do not count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import languages, line_counts, read_lines
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.errors import ArtifactError

WHITE_SPACE = ("\u2581", "<0x20>", " ")
"""Pieces that are white space alone."""


@dataclass(frozen=True)
class Segmentation:
    """Counts of the words and pieces of a language."""

    words: int
    pieces: int
    unknown: int
    """Pieces that are not in the vocabulary."""

    @property
    def fertility(self) -> float | None:
        """Pieces per word; None without words."""
        return self.pieces / self.words if self.words else None

    @property
    def unknown_share(self) -> float | None:
        """Share of unknown pieces among all; None without pieces."""
        return self.unknown / self.pieces if self.pieces else None


def measure_segmentation(corpus: Artifact, tokenizer: Tokenizer) -> dict[str, Segmentation]:
    """Count the words and pieces of every language over the test lines of all its pairs."""
    words, pieces, unknown = Counter[str](), Counter[str](), Counter[str]()
    white = {index for index in range(tokenizer.size) if tokenizer.piece(index) in WHITE_SPACE}
    for pair in sorted(line_counts(corpus, "test")):
        for code in pair.split("-"):
            lines = read_lines(corpus, "test", pair, code)
            words[code] += sum(len(line.split()) for line in lines)
            for ids in tokenizer.encode_batch(lines, language=code):
                pieces[code] += sum(index not in white for index in ids)
                unknown[code] += ids.count(tokenizer.unk_id)
    return {code: Segmentation(words[code], pieces[code], unknown[code]) for code in sorted(words)}


@dataclass(frozen=True)
class Conciseness:
    """Lengths of languages in bytes for the same text."""

    pivot: str
    parallel_lines: int
    """Number of lines of the pivot that are in all its pairs."""
    mean_bytes: Mapping[str, float]
    """Language → mean length of its translations of those lines; empty without such lines."""
    ratio_to_pivot: Mapping[str, float]
    """Language → its bytes / the pivot's bytes, over all lines of their pair."""

    @property
    def order(self) -> list[str]:
        """Languages from the longest to the most concise."""
        known = self.mean_bytes or self.ratio_to_pivot
        return sorted(known, key=lambda code: (-known[code], code))


def byte_length(line: str) -> int:
    """Return the length in UTF-8, without surrounding white space."""
    return len(line.strip().encode())


def length_ratio(corpus: Artifact, pair: str) -> float | None:
    """Return bytes of a pair's first language / its second in the test lines; None without any."""
    first, second = (total_bytes(corpus, pair, code) for code in pair.split("-"))
    return first / second if second else None


def total_bytes(corpus: Artifact, pair: str, code: str) -> int:
    """Return the bytes of all test lines of one side of a pair."""
    return sum(map(byte_length, read_lines(corpus, "test", pair, code)))


def measure_conciseness(corpus: Artifact, *, pivot: str | None = None) -> Conciseness:
    """Measure the translations of the pivot's lines that are in all its pairs.

    Args:
        corpus: a corpus with test lines.
        pivot: by default the language of most pairs, preferably English.

    Raises:
        ArtifactError: the corpus has no test lines, or none of the pivot.
    """
    pairs = sorted(line_counts(corpus, "test"))
    if not pairs:
        raise ArtifactError(
            f"{corpus.directory} has no test lines. Name a corpus that has test sets."
        )
    pivot = pivot or most_paired(pairs)
    sides = {
        _other(pair, pivot): translations_of(corpus, pair, pivot)
        for pair in pairs
        if pivot in pair.split("-")
    }
    if not sides:
        raise ArtifactError(
            f"{corpus.directory} has no test lines of {pivot!r}. Name one of its languages: "
            f"{', '.join(languages(corpus))}."
        )
    shared = set.intersection(*map(set, sides.values()))
    return Conciseness(
        pivot=pivot,
        parallel_lines=len(shared),
        mean_bytes=_means(sides, shared, pivot=pivot) if shared else {},
        ratio_to_pivot={
            pivot: 1.0,
            **{
                code: total_bytes(corpus, pair, code) / total
                for code in sides
                for pair in ["-".join(sorted((code, pivot)))]
                if (total := total_bytes(corpus, pair, pivot))
            },
        },
    )


def most_paired(pairs: Sequence[str]) -> str:
    """Return the language of most pairs; of several, English, or the first in the alphabet."""
    found = Counter(code for pair in pairs for code in pair.split("-"))
    return min(found, key=lambda code: (-found[code], code != "en", code))


def _other(pair: str, pivot: str) -> str:
    first, second = pair.split("-")
    return second if first == pivot else first


def translations_of(corpus: Artifact, pair: str, pivot: str) -> dict[str, str]:
    """Return line of the pivot → its (first) translation in the test lines of a pair."""
    other = _other(pair, pivot)
    found: dict[str, str] = {}
    for line, translation in zip(
        read_lines(corpus, "test", pair, pivot),
        read_lines(corpus, "test", pair, other),
        strict=True,
    ):
        if line.strip():
            found.setdefault(line.strip(), translation)
    return found


def _means(
    sides: Mapping[str, Mapping[str, str]], shared: set[str], *, pivot: str
) -> dict[str, float]:
    found = {pivot: sum(map(byte_length, shared)) / len(shared)}
    for code, texts in sides.items():
        found[code] = sum(byte_length(texts[line]) for line in shared) / len(shared)
    return dict(sorted(found.items()))
