"""``mmnmt translate --from en --to de``: lines of standard input, translated as they come.

Line n of the output is the translation of line n of the input, whatever is in it: a line that
cannot be read is named on standard error and stands as an empty one. Where more than a text is
asked for, it is a JSON object with ``text``, ``score`` and the details (``artifacts/corpus.py``).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis, record_of
from pipeline.decoding.incoming_lines import IncomingLine, IncomingLines, without_line_breaks
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.terminal import counted

BATCH_LINES = 256
"""Lines translated at once, where that many are there."""
NAMED_PROBLEMS = 20
"""So many lines that cannot be read are named; the others are counted."""


@dataclass
class FilterCounts:
    """What has been read and written, and of how many lines there is something to say."""

    lines: int = 0
    unreadable: int = 0
    split: int = 0
    parts: int = 0
    """Of the lines that were split, together."""
    truncated: int = 0
    invalid: int = 0
    invalid_sequences: int = 0

    def add(self, line: IncomingLine, hypothesis: Hypothesis) -> None:
        self.lines += 1
        self.unreadable += bool(line.problem)
        self.split += hypothesis.split > 0
        self.parts += hypothesis.split
        self.truncated += hypothesis.truncated
        self.invalid += hypothesis.invalid > 0
        self.invalid_sequences += hypothesis.invalid

    def sentences(self, *, max_tokens: int) -> Iterator[str]:
        """One for each thing that is worth saying, when all is done."""
        if self.unreadable > NAMED_PROBLEMS:
            yield (
                f"{self.unreadable:,} of {self.lines:,} lines could not be read: an empty line "
                "stands for each of them."
            )
        if self.split:
            yield (
                f"{self.split:,} of {self.lines:,} lines were longer than the model's "
                f"{max_tokens:,} tokens: they were translated in {self.parts:,} parts, split at "
                "sentence ends where there are any, and joined again."
            )
        if self.truncated:
            yield (
                f"{self.truncated:,} of {self.lines:,} lines were truncated: a single character of "
                f"theirs has more than the model's {max_tokens:,} tokens."
            )
        if self.invalid:
            yield (
                f"the translations of {self.invalid:,} of {self.lines:,} lines had "
                f"{counted(self.invalid_sequences, 'sequence')} of bytes that are no UTF-8: they "
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
    """Translate the lines in order, as they come.

    Args:
        checkpoint: the model.
        decoding: how it searches.
        source, target: languages of the model, in any usual spelling.
        lines: where they come from.
        write: gets each translation, without a line end or what could be taken for one.
        say: gets each sentence about a line that cannot be read, and at the end those about lines
            that were split.
        has_prefixes: a line's translation begins with what stands behind its first tab, if it has
            one.
        phrases: of every line in order, what its translation must have; those behind the last
            must have none.
        segmenters: those that the recipe names.

    Raises:
        ConfigError: a language the model does not know, or both the same.
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
            translations = translate_lines(
                translator, direction, batch, prefixes=prefixes, required=required
            )
            for line, hypothesis in zip(batch, translations, strict=True):
                counts.add(line, hypothesis)
                if line.problem and counts.unreadable <= NAMED_PROBLEMS:
                    say(f"line {line.number} {line.problem}: an empty line stands for it.")
                write(without_line_breaks(_written(hypothesis)))
    finally:
        for sentence in counts.sentences(max_tokens=translator.max_tokens):
            say(sentence)
    return counts


def find_direction(translator: Translator, *, source: str, target: str) -> Direction:
    """The direction by the model's own codes; ConfigError as in ``filter_lines``."""
    direction = Direction(translator.code_of(source), translator.code_of(target))
    if direction.source == direction.target:
        raise ConfigError(
            f"--from {source} and --to {target} are one language: name two different ones."
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
    """Their translations in order; computed in batches of similar length."""
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
    """The lines up to their tabs, and what stands behind; a prefix nothing begins with is named."""
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
    """The next lines and what their translations must have; what none can have is named."""
    taken, required = [], []
    for line, prefix in zip(lines, prefixes or [""] * len(lines), strict=True):
        wanted = next(phrases, ())
        if not line.problem and (problem := translator.phrases_problem(wanted, prefix=prefix)):
            wanted, line = (), replace(line, text="", problem=problem)
        taken.append(line)
        required.append(wanted)
    return taken, required


def _written(hypothesis: Hypothesis) -> str:
    """The text, or all that was asked for as JSON."""
    if hypothesis.details is None:
        return hypothesis.text
    found = {"text": hypothesis.text, "score": hypothesis.score}
    return json.dumps(found | record_of(hypothesis.details), ensure_ascii=False)
