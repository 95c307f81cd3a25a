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
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import line_counts, pair_name, read_lines
from pipeline.artifacts.spelling import is_blank
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from pipeline.errors import ArtifactError
from pipeline.extensions.analysis.report import write_analysis
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

WHITE_SPACE = ("\u2581", "<0x20>", " ")
"""Pieces that are only white space."""


def run(call: StageCall) -> None:
    """Measure the test lines and write the analysis."""
    corpus = call.artifacts["corpus"]
    document = {"analysis": "lengths", **measure_lengths(corpus)}
    if "tokenizer" in call.artifacts:
        tokenizer = load_tokenizer(tokenizer_folder(call.artifacts["tokenizer"]))
        document["segmentation"] = measure_segmentation(corpus, tokenizer)
    order, lines, pivot = (document[key] for key in ("order", "parallel_lines", "pivot"))
    with call.new_artifact() as writer:
        write_analysis(writer, document)
        writer.statistics.update(languages=len(order), parallel_lines=lines)
        writer.summary.append(
            f"bytes of {counted(len(order), 'language')} in {counted(lines, 'line')} that all of "
            f"them have: {order[0]} is the longest, {order[-1]} the most concise"
            if lines
            else f"no line of {pivot} is in all of its pairs; languages are compared by the ratio "
            f"of their bytes to the bytes of {pivot}, each on its own lines"
        )
        segmented = document.get("segmentation", {})
        for title, key, spec in (
            ("pieces a word", "fertility", ".2f"),
            ("unknown pieces", "unknown_share", ".2%"),
        ):
            known = {code: counts[key] or 0 for code, counts in segmented.items()}
            texts = [f"{code} {value:{spec}}" for code, value in known.items() if value]
            writer.summary += [f"{title}: {listed(texts)}"] if texts else []


def measure_segmentation(corpus: Artifact, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Count the words and pieces of every language over the test lines of all its pairs.

    Fertility is None without words, and the share of unknown pieces is None without pieces.
    """
    words, pieces, unknown = Counter[str](), Counter[str](), Counter[str]()
    white = {index for index in range(tokenizer.size) if tokenizer.piece(index) in WHITE_SPACE}
    for pair in sorted(line_counts(corpus, "test")):
        for code in pair.split("-"):
            lines = read_lines(corpus, "test", pair, code)
            words[code] += sum(len(line.split()) for line in lines)
            for ids in tokenizer.encode_batch(lines, language=code):
                pieces[code] += sum(index not in white for index in ids)
                unknown[code] += ids.count(tokenizer.unk_id)
    return {
        code: {
            "words": words[code],
            "pieces": pieces[code],
            "unknown": unknown[code],
            "fertility": pieces[code] / words[code] if words[code] else None,
            "unknown_share": unknown[code] / pieces[code] if pieces[code] else None,
        }
        for code in sorted(words)
    }


def measure_lengths(corpus: Artifact) -> dict[str, Any]:
    """Measure the lines of the language of most pairs, the pivot, that are in all of its pairs.

    Returns:
        ``pivot``; ``parallel_lines``, the number of these lines; ``mean_bytes``, language → mean
        length of its translations, empty without such lines; ``ratio_to_pivot``, language → its
        bytes divided by the pivot's, over the lines of their pair with text on both sides; and
        ``order``, the languages from the longest to the most concise.

    Raises:
        ArtifactError: the corpus has no test lines.
    """
    pairs = sorted(line_counts(corpus, "test"))
    if not pairs:
        raise ArtifactError(
            f"{corpus.directory} has no test lines. Name a corpus that has test sets."
        )
    pivot = most_paired(pairs)
    others = [_other(pair, pivot) for pair in pairs if pivot in pair.split("-")]
    found = {code: translations_of(corpus, pair_name(code, pivot), pivot) for code in others}
    sides = {code: lines for code, lines in found.items() if lines}
    shared = set.intersection(*map(set, sides.values())) if sides else set()
    texts = {pivot: dict(zip(shared, shared, strict=True)), **sides} if shared else {}
    mean_bytes = {
        code: sum(byte_length(translations[line]) for line in shared) / len(shared)
        for code, translations in sorted(texts.items())
    }
    ratios = {pivot: 1.0}
    for code in others:
        if (ratio := byte_ratio(corpus, code, pivot)) is not None:
            ratios[code] = ratio
    known = mean_bytes or ratios
    return {
        "order": sorted(known, key=lambda code: (-known[code], code)),
        "pivot": pivot,
        "parallel_lines": len(shared),
        "mean_bytes": mean_bytes,
        "ratio_to_pivot": ratios,
    }


def byte_length(line: str) -> int:
    """Return the length in UTF-8, without surrounding white space."""
    return len(line.strip().encode())


def byte_ratio(corpus: Artifact, code: str, other: str) -> float | None:
    """Return a language's bytes divided by another's in the test lines of their pair.

    Only lines with text on both sides count; None without any.
    """
    sides = zip(*_lines_with_text(corpus, code, other), strict=True)
    totals = [sum(map(byte_length, side)) for side in sides]
    return totals[0] / totals[1] if totals else None


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
    for line, translation in _lines_with_text(corpus, pivot, _other(pair, pivot)):
        found.setdefault(line.strip(), translation)
    return found


def _lines_with_text(corpus: Artifact, one: str, other: str) -> Iterator[tuple[str, ...]]:
    sides = (read_lines(corpus, "test", pair_name(one, other), code) for code in (one, other))
    return (line for line in zip(*sides, strict=True) if not any(map(is_blank, line)))


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_lengths"))
