"""analyze_lengths: measure the bytes of languages for the same text (MoCE, §5.1, appendix A).

Reads a corpus with test lines, best of one text in all languages (FLORES-200 as ``import_tests``
reads it). Makes an analysis: ``lengths.json``, and ``lengths.svg`` as MoCE's Figure 3. Byte lengths
are measured on UTF-8 lines without surrounding white space.

With a tokenizer it also counts that tokenizer's pieces (LOBEF, Tables 1 and 2). Fertility is the
mean number of pieces per word (Rust et al., 2021). White space separates words; pieces of
only white space do not count.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import languages, line_counts, pair_name, read_lines
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from pipeline.errors import ArtifactError
from pipeline.extensions.analysis.report import write_analysis
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

WHITE_SPACE = ("\u2581", "<0x20>", " ")
"""Pieces that are only white space."""


def run(call: StageCall) -> None:
    """Measure the test lines and write the analysis."""
    found = measure_conciseness(call.artifacts["corpus"])
    document = {"analysis": "lengths", "order": found.order, **asdict(found)}
    segmented = {}
    if "tokenizer" in call.artifacts:
        tokenizer = load_tokenizer(tokenizer_folder(call.artifacts["tokenizer"]))
        segmented = measure_segmentation(call.artifacts["corpus"], tokenizer)
        document["segmentation"] = {
            code: {**asdict(one), "fertility": one.fertility, "unknown_share": one.unknown_share}
            for code, one in segmented.items()
        }
    with call.new_artifact() as writer:
        write_analysis(writer, document)
        writer.statistics.update(languages=len(found.order), parallel_lines=found.parallel_lines)
        if found.parallel_lines:
            writer.summary.append(
                f"bytes of {counted(len(found.order), 'language')} in "
                f"{counted(found.parallel_lines, 'line')} that all of them have: "
                f"{found.order[0]} is the longest, {found.order[-1]} the most concise"
            )
        else:
            writer.summary.append(
                f"no line of {found.pivot} is in all of its pairs; languages are compared by the "
                f"ratio of their bytes to those of {found.pivot}, each on its own lines"
            )
        if segmented:
            writer.summary.append(
                "pieces a word: "
                + listed(f"{code} {one.fertility or 0:.2f}" for code, one in segmented.items())
            )
        if unknown := {code: one for code, one in segmented.items() if one.unknown}:
            writer.summary.append(
                "unknown pieces: "
                + listed(f"{code} {one.unknown_share or 0:.2%}" for code, one in unknown.items())
            )


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
    mean_bytes = {}
    if shared:
        texts = {pivot: dict(zip(shared, shared, strict=True)), **sides}
        mean_bytes = {
            code: sum(byte_length(translations[line]) for line in shared) / len(shared)
            for code, translations in sorted(texts.items())
        }
    ratios = {pivot: 1.0}
    for code in sides:
        pair = pair_name(code, pivot)
        if total := total_bytes(corpus, pair, pivot):
            ratios[code] = total_bytes(corpus, pair, code) / total
    return Conciseness(pivot, len(shared), mean_bytes, ratios)


def most_paired(pairs: Sequence[str]) -> str:
    """Return the language that occurs in most pairs. Ties go to English, then alphabetically."""
    pairs_of = Counter(code for pair in pairs for code in pair.split("-"))
    return min(pairs_of, key=lambda code: (-pairs_of[code], code != "en", code))


def _other(pair: str, pivot: str) -> str:
    first, second = pair.split("-")
    return second if first == pivot else first


def translations_of(corpus: Artifact, pair: str, pivot: str) -> dict[str, str]:
    """Return line of the pivot → its (first) translation in the test lines of a pair."""
    found: dict[str, str] = {}
    for line, translation in zip(
        read_lines(corpus, "test", pair, pivot),
        read_lines(corpus, "test", pair, _other(pair, pivot)),
        strict=True,
    ):
        if line.strip():
            found.setdefault(line.strip(), translation)
    return found


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_lengths"))
