"""Translate lines of standard input as they arrive: ``mmnmt translate --from en --to de``.

Line n of the output is the translation of line n of the input. An unreadable line is reported on
standard error and gives an empty line. If the recipe asks for more than a text, an output line is a
JSON object with ``text``, ``score`` and the details (``artifacts/corpus.py``).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Alternative, Details, Direction, Hypothesis
from pipeline.artifacts.spelling import is_blank
from pipeline.decoding.settings import LENGTH_LIMITS, DecodingConfig
from pipeline.decoding.text_input import IncomingLine, IncomingLines, without_line_breaks
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.kernels.cpu import sparing_loops
from pipeline.languages import codes_of_setting
from pipeline.terminal import counted, listed

BATCH_LINES = 256
"""Most lines that are translated at once."""
FEW_LINES = 16
"""Number of first lines that are translated without compiled loops, which take long to load."""
NAMED_PROBLEMS = 20
"""Most unreadable lines that are reported one by one; further lines are counted."""


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
    """Lines in which a translation had bytes that are not UTF-8."""
    invalid_sequences: int = 0
    unknown: int = 0
    """Lines with characters that the vocabulary does not have."""
    at_limit: int = 0
    """Lines with a translation as long as the settings permit."""

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
        self.at_limit += hypothesis.at_limit

    def sentences(self, *, max_tokens: int) -> Iterator[str]:
        """Yield one sentence for each kind of remark, after the last line."""
        lines = counted(self.lines, "line")
        if self.unreadable > NAMED_PROBLEMS:
            yield (
                f"{self.unreadable:,} of {self.lines:,} lines could not be read. Each was "
                "translated as an empty line."
            )
        if self.split:
            yield (
                f"{self.split:,} of {lines} exceeded the model's {max_tokens:,} tokens: split "
                f"into {self.parts:,} parts, at sentence ends if possible, translated, and joined "
                "again."
            )
        if self.unknown:
            yield (
                f"{self.unknown:,} of {self.lines:,} lines have characters that the model's "
                "vocabulary does not have. The model cannot tell these apart."
            )
        if self.at_limit:
            yield (
                f"{self.at_limit:,} of {lines} have a translation as long as {LENGTH_LIMITS} "
                "permit: its end may be cut off."
            )
        if self.truncated:
            yield (
                f"{self.truncated:,} of {lines} lost text: a single character has more than "
                f"the model's {max_tokens:,} tokens."
            )
        if self.invalid:
            yield (
                f"The translations of {self.invalid:,} of {lines} had "
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
    lists_hypotheses: bool = False,
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
        phrases: required phrases of every line in order.
        lists_hypotheses: whether to write a list of hypotheses even if it has one only.
        segmenters: segmenters named by the recipe.

    Returns:
        Counts of the lines.

    Raises:
        ConfigError: the model does not know a language, both are the same, or there are more or
            fewer lines of phrases than lines.
        DataError: the input cannot be read any further.
    """
    translator = Translator(checkpoint, decoding, segmenters=segmenters)
    direction = find_direction(translator, source=source, target=target)
    translator.load_segmenters([direction.source])
    counts = FilterCounts()
    try:
        while batch := lines.take(BATCH_LINES):
            wanted = [()] * len(batch) if phrases is None else [*islice(phrases, len(batch))]
            taken = [
                _job_of(translator, direction, line, of_line, has_prefix=has_prefixes)
                for line, of_line in zip(batch, wanted, strict=False)
            ]
            # An int8 translation does not depend on its batch, so it has the same kernels always.
            is_few = counts.lines + len(batch) <= FEW_LINES and decoding.precision != "int8"
            with sparing_loops() if is_few else nullcontext():
                translations = translate_jobs(translator, [job for _, job in taken])
            for (line, _), hypothesis in zip(taken, translations, strict=True):
                counts.add(line, hypothesis)
                if line.problem and counts.unreadable <= NAMED_PROBLEMS:
                    say(f"Line {line.number} {line.problem}. It is translated as an empty line.")
                write(without_line_breaks(_written(hypothesis, lists_hypotheses)))
            # What has its phrases is translated first: these lines are complete.
            if len(wanted) < len(batch):
                raise _other_length("fewer", counts.lines)
        if phrases is not None and next(phrases, None) is not None:
            raise _other_length("more", counts.lines)
    finally:
        for sentence in counts.sentences(max_tokens=translator.max_tokens):
            say(sentence)
    return counts


def find_direction(translator: Translator, *, source: str, target: str) -> Direction:
    """Return the direction in the model's own codes.

    Raises:
        ConfigError: the model does not know a language, both are the same, or ``decoding.targets``
            leaves the target out.
    """
    direction = Direction(translator.code_of(source), translator.code_of(target))
    if direction.source == direction.target:
        raise ConfigError(
            f"--from {source} and --to {target} are one language. Name two different ones."
        )
    translator.tokenizer.refuse_to_write(direction.target)
    asked, known = translator.config.targets, translator.tokenizer.languages
    meant = codes_of_setting(asked, known, setting="decoding.targets", place="the model")
    if asked and direction.target not in meant.values():
        raise ConfigError(
            f"--to {target} is not in decoding.targets ({listed(asked)}). Name one of these, or "
            "add it with --set."
        )
    return direction


def translate_jobs(translator: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
    """Translate lines in batches of similar length; return the translations in order."""
    found: dict[int, Hypothesis] = {}
    for batch in translator.cut(jobs):
        hypotheses = translator.translate(batch)
        found.update(zip((job.line for job in batch), hypotheses, strict=True))
    return [found[job.line] for job in jobs]


def _job_of(
    translator: Translator,
    direction: Direction,
    line: IncomingLine,
    phrases: tuple[str, ...],
    *,
    has_prefix: bool,
) -> tuple[IncomingLine, Job]:
    """Return a line, with a problem if no translation can be as required, and its job."""
    text, _, prefix = line.text.partition("\t") if has_prefix else (line.text, "", "")
    problem = line.problem or translator.prefix_problem(prefix)
    problem = problem or translator.phrases_problem(phrases, prefix=prefix)
    if phrases and is_blank(text):
        problem = problem or "is empty, and its translation must have phrases"
    if problem:
        text, prefix, phrases = "", "", ()
    job = Job(direction, line.number - 1, without_line_breaks(text), prefix, phrases)
    return replace(line, problem=problem), job


def _other_length(compared: Literal["fewer", "more"], lines: int) -> ConfigError:
    beyond = "" if compared == "more" else f", which goes on after line {lines:,}"
    return ConfigError(
        f"The file of required phrases has {compared} lines than the input{beyond}. Write one line "
        "for every line to translate, and leave it empty if nothing is required."
    )


def _written(hypothesis: Hypothesis, lists_hypotheses: bool) -> str:
    """Return the text, or as JSON everything that is asked for."""
    details = hypothesis.details
    if lists_hypotheses and not (details and details.n_best):
        has_any = hypothesis.text or hypothesis.score  # which may be rounded to 0
        only = (Alternative(hypothesis.text, hypothesis.score),) if has_any else ()
        details = replace(details or Details(), n_best=only)
    if details is None:
        return hypothesis.text
    return json.dumps(written_record(replace(hypothesis, details=details)), ensure_ascii=False)


def written_record(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return the text, its score and its details as a JSON object."""
    details = {} if hypothesis.details is None else asdict(hypothesis.details)
    return {"text": hypothesis.text, "score": hypothesis.score, **details}
