"""Translate lines of standard input as they arrive: ``mmnmt translate --from en --to de``.

Line n of the output is the translation of line n of the input. An unreadable line is reported on
standard error and gives an empty line. If the recipe asks for more than a text, an output line is a
JSON object with ``text``, ``score`` and the details (``artifacts/corpus.py``).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.decoding.incoming_lines import IncomingLine, IncomingLines, without_line_breaks
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.kernels.cpu import sparing_loops
from pipeline.terminal import counted

BATCH_LINES = 256
"""Most lines that are translated at once."""
FEW_LINES = 16
"""Number of first lines that are translated without compiled loops, which take long to load."""
NAMED_PROBLEMS = 20
"""Most unreadable lines that are reported one by one; further ones are counted."""


@dataclass
class FilterCounts:
    """Lines read, and the lines among them that call for a remark."""

    lines: int = 0
    unreadable: int = 0
    split: int = 0
    parts: int = 0
    """Parts of all lines that were split."""
    truncated: int = 0
    invalid: int = 0
    """Lines whose translations had bytes that are not UTF-8."""
    invalid_sequences: int = 0
    unknown: int = 0
    """Lines with characters that the vocabulary does not have."""

    def add(self, line: IncomingLine, hypothesis: Hypothesis) -> None:
        """Count a line and its translation."""
        self.lines += 1
        self.unreadable += bool(line.problem)
        self.split += hypothesis.split > 0
        self.parts += hypothesis.split
        self.truncated += hypothesis.truncated
        self.invalid += hypothesis.invalid > 0
        self.invalid_sequences += hypothesis.invalid
        self.unknown += hypothesis.unknown > 0

    def sentences(self, *, max_tokens: int) -> Iterator[str]:
        """Yield one sentence for each kind of remark, after the last line."""
        if self.unreadable > NAMED_PROBLEMS:
            yield (
                f"{self.unreadable:,} of {self.lines:,} lines could not be read. Each was "
                "translated as an empty line."
            )
        if self.split:
            yield (
                f"{self.split:,} of {self.lines:,} lines were longer than the model's "
                f"{max_tokens:,} tokens. They were split into {self.parts:,} parts, at sentence "
                "ends if possible, translated, and joined again."
            )
        if self.unknown:
            yield (
                f"{self.unknown:,} of {self.lines:,} lines have characters that the model's "
                "vocabulary does not have. The model cannot tell these apart."
            )
        if self.truncated:
            yield (
                f"{self.truncated:,} of {self.lines:,} lines were truncated: they have a single "
                f"character of more than the model's {max_tokens:,} tokens."
            )
        if self.invalid:
            yield (
                f"The translations of {self.invalid:,} of {self.lines:,} lines had "
                f"{counted(self.invalid_sequences, 'sequence')} of bytes that are not UTF-8, which "
                "were dropped."
            )


def filter_lines(
    checkpoint: Artifact,
    *,
    decoding: DecodingConfig,
    source: str,
    target: str,
    lines: IncomingLines,
    write: Callable[[str], None],
    say: Callable[[str], None],
    has_prefixes: bool = False,
    phrases: Iterator[tuple[str, ...]] | None = None,
    segmenters: Mapping[str, str] | None = None,
) -> FilterCounts:
    """Translate the lines in order, as they arrive.

    Args:
        checkpoint: the model.
        decoding: settings of the search.
        source: source language, in any usual spelling.
        target: target language, in any usual spelling.
        lines: reader of the input.
        write: receives each translation, without any character that could be taken for a line end.
        say: receives remarks: one for each unreadable line, and the summary at the end.
        has_prefixes: whether the text behind a line's first tab is a prefix of its translation.
        phrases: required phrases of every line in order; lines behind the last have none.
        segmenters: segmenters named by the recipe.

    Returns:
        Counts of the lines.

    Raises:
        ConfigError: the model does not know a language, or both are the same.
        DataError: the input cannot be read any further.
    """
    translator = Translator(checkpoint, decoding, segmenters=segmenters)
    direction = find_direction(translator, source=source, target=target)
    translator.load_segmenters([direction.source])
    counts = FilterCounts()
    try:
        while batch := lines.take(BATCH_LINES):
            batch, prefixes = _take_prefixes(translator, batch) if has_prefixes else (batch, None)
            batch, required = _take_phrases(translator, batch, prefixes, phrases or iter(()))
            # An int8 translation does not depend on its batch, so it has the same kernels always.
            is_few = counts.lines + len(batch) <= FEW_LINES and decoding.precision != "int8"
            with sparing_loops() if is_few else nullcontext():
                translations = translate_lines(
                    translator, direction, batch, prefixes=prefixes, required=required
                )
            for line, hypothesis in zip(batch, translations, strict=True):
                counts.add(line, hypothesis)
                if line.problem and counts.unreadable <= NAMED_PROBLEMS:
                    say(f"Line {line.number} {line.problem}. It is translated as an empty line.")
                write(without_line_breaks(_written(hypothesis)))
    finally:
        for sentence in counts.sentences(max_tokens=translator.max_tokens):
            say(sentence)
    return counts


def find_direction(translator: Translator, *, source: str, target: str) -> Direction:
    """Return the direction in the model's own codes.

    Raises:
        ConfigError: the model does not know a language, or both are the same.
    """
    direction = Direction(translator.code_of(source), translator.code_of(target))
    if direction.source == direction.target:
        raise ConfigError(
            f"--from {source} and --to {target} are one language. Name two different ones."
        )
    translator.tokenizer.refuse_to_write(direction.target)
    return direction


def translate_lines(
    translator: Translator,
    direction: Direction,
    lines: Sequence[IncomingLine],
    *,
    prefixes: Sequence[str] | None = None,
    required: Sequence[tuple[str, ...]] | None = None,
) -> list[Hypothesis]:
    """Translate lines in batches of similar length; return the translations in order."""
    begun = prefixes or [""] * len(lines)
    wanted = required or [()] * len(lines)
    jobs = [
        Job(direction, index, without_line_breaks(line.text), prefix=prefix, required=phrases)
        for index, (line, prefix, phrases) in enumerate(zip(lines, begun, wanted, strict=True))
    ]
    found: dict[int, Hypothesis] = {}
    for batch in translator.cut(jobs):
        hypotheses = translator.translate(batch)
        found.update(zip((job.line for job in batch), hypotheses, strict=True))
    return [found[index] for index in range(len(jobs))]


def _take_prefixes(
    translator: Translator, lines: Sequence[IncomingLine]
) -> tuple[list[IncomingLine], list[str]]:
    """Split lines at their first tabs into texts and prefixes; report impossible prefixes."""
    texts, prefixes = [], []
    for line in lines:
        text, _, prefix = line.text.partition("\t")
        if problem := translator.prefix_problem(prefix):
            text, prefix, line = "", "", replace(line, problem=problem)
        texts.append(replace(line, text=text))
        prefixes.append(prefix)
    return texts, prefixes


def _take_phrases(
    translator: Translator,
    lines: Sequence[IncomingLine],
    prefixes: Sequence[str] | None,
    phrases: Iterator[tuple[str, ...]],
) -> tuple[list[IncomingLine], list[tuple[str, ...]]]:
    """Return the lines and their required phrases; report phrases that no translation can have."""
    taken, required = [], []
    for line, prefix in zip(lines, prefixes or [""] * len(lines), strict=True):
        wanted = next(phrases, ())
        if not line.problem and (problem := translator.phrases_problem(wanted, prefix=prefix)):
            wanted, line = (), replace(line, text="", problem=problem)
        taken.append(line)
        required.append(wanted)
    return taken, required


def _written(hypothesis: Hypothesis) -> str:
    """Return the text, or as JSON everything that the recipe asks for."""
    if hypothesis.details is None:
        return hypothesis.text
    return json.dumps(written_record(hypothesis), ensure_ascii=False)


def written_record(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return the text, its score and its details as a JSON object."""
    details = {} if hypothesis.details is None else asdict(hypothesis.details)
    return {"text": hypothesis.text, "score": hypothesis.score, **details}
