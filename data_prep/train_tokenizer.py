"""train_tokenizer: a vocabulary from a temperature-balanced sample, and language tokens.

Reads a corpus, makes a tokenizer. SentencePiece sees training lines only, drawn without replacement
so that small languages weigh more than their share; text is not normalised. SentencePiece holds the
sample in memory, many times its size: as many lines are drawn as ``tokenizer.memory_bytes`` has
room for by prediction, ``tokenizer.sample_lines`` at most. The default, 4 GiB, fits into a machine
of 8 GB. What was predicted and what was taken stand in the summary. Import bounds each line.

Where ``tokenizer.target_languages`` have pieces of their own, two models are trained one after the
other, each on a sample of its languages.
"""

import io
import math
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sentencepiece import SentencePieceTrainer

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    emptied_pairs,
    iterate_lines,
    languages,
    line_counts,
    text_name,
)
from pipeline.artifacts.mixture import lines_per_language, temperature_probabilities
from pipeline.artifacts.segmenters import segmenter_records
from pipeline.artifacts.settings import TokenizerConfig
from pipeline.artifacts.tokenizer import (
    SPECIALS,
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
    language_token,
)
from pipeline.artifacts.vocabularies import BYTE_LINE, write_bytes
from pipeline.errors import ConfigError, DataError
from pipeline.machine import peak_memory
from pipeline.seeds import derive_seed
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed, track

MAX_LINE_BYTES = 2**20
"""SentencePiece leaves out longer lines; its own limit would lose letters of long Indic lines."""

MEMORY_PER_BYTE, MEMORY_PER_LINE, MEMORY_AT_LEAST = 22, 200, 2**23
"""Of text, in bytes of memory, while SentencePiece 0.2.3 trains."""


@dataclass(frozen=True)
class Side:
    """Languages that share a vocabulary."""

    languages: frozenset[str]
    setting: str
    """Which says how many pieces it has."""
    size: int


@dataclass
class Sample:
    """Training lines for the vocabulary, drawn while they are read."""

    corpus: Artifact
    quotas: Mapping[str, int]
    """Language → lines to draw."""
    seed: int
    predicted_bytes: int = 0
    """Of memory that training on it takes."""
    characters: set[str] = field(default_factory=set)
    """What the lines given so far consist of."""

    def __iter__(self) -> Iterator[str]:
        totals = lines_per_language(self.corpus)
        for code, quota in sorted(self.quotas.items()):
            generator = random.Random(derive_seed("tokenizer sample", self.seed, code))
            lines = _lines_of(self.corpus, code)
            for line in draw(lines, total=totals[code], wanted=quota, generator=generator):
                self.characters.update(line)
                yield line


def run(call: StageCall) -> None:
    """Train the vocabulary and write it with a language token for every language."""
    config = call.recipe.tokenizer
    corpus = call.artifacts["corpus"]
    sides = sides_of(corpus, config) if config.kind != "bytes" else []
    description = TokenizerDescription(
        # Characters are a kind of SentencePiece model: nothing else is to be known to read them.
        kind="sentencepiece" if config.kind == "characters" else config.kind,
        languages=tuple(languages(corpus)),
        language_token_scheme=config.language_token_scheme,
        target_languages=tuple(sorted(config.target_languages)),
        segmenters=segmenter_records(config.segmenters, languages(corpus)),
    )
    with call.new_artifact() as writer:
        samples = [draw_sample(corpus, config=config, among=side.languages) for side in sides]
        with peak_memory() as taken:
            models = [
                train_sentencepiece(sample, side=side, config=config)
                for side, sample in zip(sides, samples, strict=True)
            ]
        model, target_model = [*models, None, None][:2]
        files = TokenizerFiles(description, model, target_model)
        if samples:
            writer.statistics |= sample_statistics(samples, files.build())
            writer.statistics["memory"] = {
                "allowed": config.memory_bytes,
                "predicted": max(sample.predicted_bytes for sample in samples),
                "measured": taken.num_bytes,
            }
        files.write(writer.directory)
        writer.statistics |= vocabulary_statistics(files)
        writer.summary += summary(writer.statistics, description, corpus)


def sides_of(corpus: Artifact, config: TokenizerConfig) -> list[Side]:
    """One vocabulary for all languages, or two: the source's, then the target's.

    Raises:
        ConfigError: target languages are none of the corpus's, or all of them.
        DataError: one side has no training lines.
    """
    present, own = languages(corpus), config.target_languages
    if not own:
        return [Side(frozenset(present), "vocabulary_size", config.vocabulary_size)]
    unknown, others = sorted(set(own) - set(present)), set(present) - set(own)
    if unknown or not others:
        problem = (
            f"names {listed(unknown)}, which {corpus.directory} does not have"
            if unknown
            else f"names all languages of {corpus.directory}"
        )
        raise ConfigError(
            f"tokenizer.target_languages {problem}: name those that are translated into and have "
            "pieces of their own, or leave it out for one vocabulary."
        )
    lines = lines_per_language(corpus)
    for side in (others, own):
        if not any(lines[code] for code in side):
            raise DataError(
                f"{corpus.directory} has no training lines in {listed(sorted(side))}, which are to "
                "have pieces of their own (tokenizer.target_languages parts the languages): give "
                "it some, or change that setting."
            )
    return [
        Side(frozenset(others), "vocabulary_size", config.vocabulary_size),
        Side(frozenset(own), "target_vocabulary_size", config.target_vocabulary_size),
    ]


def draw_sample(
    corpus: Artifact, *, config: TokenizerConfig, among: frozenset[str] | None = None
) -> Sample:
    """The sample the settings ask for, of all languages or of some; lines are read when it is
    iterated over.

    Raises:
        ConfigError: there is no memory for any line.
        DataError: the corpus has no training lines.
    """
    every = lines_per_language(corpus)
    line_bytes = bytes_per_line(corpus, every)
    totals = {code: lines for code, lines in every.items() if among is None or code in among}
    most = min(config.sample_lines, sum(totals.values()))
    # The largest number of lines that there is room for.
    fits = bisect_right(
        range(1, most + 1),
        config.memory_bytes,
        key=lambda lines: predicted_memory(_quotas(totals, lines, config), line_bytes),
    )
    quotas = _quotas(totals, fits or config.sample_lines, config)
    if fits < most and (not fits or not any(quotas.values())):
        raise ConfigError(
            f"tokenizer.memory_bytes = {config.memory_bytes:,} has no room for a line of every "
            "language: raise it."
        )
    predicted = predicted_memory(quotas, line_bytes)
    return Sample(corpus, quotas, config.seed, predicted_bytes=predicted)


def predicted_memory(quotas: Mapping[str, int], line_bytes: Mapping[str, float]) -> int:
    """What SentencePiece takes for training on a sample, in bytes.

    Args:
        quotas: language → lines.
        line_bytes: language → mean size of a line in UTF-8.
    """
    text = sum(quota * line_bytes[code] for code, quota in quotas.items())
    lines = sum(quotas.values())
    return math.ceil(MEMORY_AT_LEAST + lines * MEMORY_PER_LINE + text * MEMORY_PER_BYTE)


def bytes_per_line(corpus: Artifact, totals: Mapping[str, int]) -> dict[str, float]:
    """Language → mean size of a training line in UTF-8, of those that have any.

    Args:
        totals: language → training lines.
    """
    sizes = dict.fromkeys(totals, 0)
    for pair in line_counts(corpus, "train"):
        for code in pair.split("-"):
            sizes[code] += corpus.manifest.files[text_name("train", pair, code)].size
    return {code: sizes[code] / total for code, total in totals.items() if total}


def _quotas(totals: Mapping[str, int], lines: int, config: TokenizerConfig) -> dict[str, int]:
    return sample_quotas(
        totals, sampling_temperature=config.sampling_temperature, sample_lines=lines
    )


def sample_quotas(
    totals: Mapping[str, int], *, sampling_temperature: float, sample_lines: int
) -> dict[str, int]:
    """Language → lines to draw: by temperature, and never more than the language has.

    What a small language cannot fill is shared among the others, in their proportions. The sum
    stays within ``sample_lines``, below it by rounding or because there are no more lines.

    Raises:
        DataError: no language has any.
    """
    left = {code: total for code, total in sorted(totals.items()) if total}
    quotas: dict[str, int] = {}
    while True:
        budget = sample_lines - sum(quotas.values())
        shares = temperature_probabilities(left, sampling_temperature=sampling_temperature)
        full = {code: left[code] for code in left if left[code] <= shares[code] * budget}
        if not full:
            return quotas | {code: int(shares[code] * budget) for code in left}
        quotas |= full
        left = {code: total for code, total in left.items() if code not in full}
        if not left:
            return quotas


def draw(
    lines: Iterator[str], *, total: int, wanted: int, generator: random.Random
) -> Iterator[str]:
    """Exactly ``wanted`` of ``total`` lines, each subset equally likely, in their order.

    Knuth, The Art of Computer Programming 2, §3.4.2, algorithm S: nothing is kept in memory.
    """
    for seen, line in enumerate(lines):
        if not wanted:
            return
        if generator.random() * (total - seen) < wanted:
            wanted -= 1
            yield line


def train_sentencepiece(sample: Sample, *, side: Side, config: TokenizerConfig) -> bytes:
    """A serialised SentencePiece model; the same sample and settings give the same bytes.

    Raises:
        ConfigError: the vocabulary is too large, or too small, for the sample.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    tracked = track(sample, label="sample lines", total=sum(sample.quotas.values()))
    lines = remember_failure(tracked, failures)
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_written_bytes(lines) if config.kind == "byte_bpe" else lines,
            model_writer=model,
            vocab_size=side.size,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",
            max_sentence_length=MAX_LINE_BYTES,
            pad_id=SPECIALS["pad"],
            bos_id=SPECIALS["bos"],
            eos_id=SPECIALS["eos"],
            unk_id=SPECIALS["unk"],
            # With more threads the unigram trainer adds in another order, and learns other pieces.
            num_threads=1,
            minloglevel=2,
            **_options_of_kind(config),
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise explain_failure(error, side=side) from error
    return model.getvalue()


def _options_of_kind(config: TokenizerConfig) -> dict[str, Any]:
    """What SentencePiece is told of the kind of pieces."""
    match config.kind:
        case "characters":
            # As many as there are, if that is less than the vocabulary may have.
            kind: dict[str, Any] = {"model_type": "char", "hard_vocab_limit": False}
        case "byte_bpe":
            # A byte is no letter or digit; spaces are kept as they are.
            return {
                "model_type": "bpe",
                "character_coverage": 1.0,
                "split_by_unicode_script": False,
                "split_by_number": False,
                "add_dummy_prefix": False,
                "remove_extra_whitespaces": False,
            }
        case _:
            kind = {"model_type": config.model_type}
    return {**kind, "character_coverage": config.character_coverage}


def _written_bytes(lines: Iterator[str]) -> Iterator[str]:
    """The lines as a model of bytes sees them, and every byte, so that each has a piece."""
    yield BYTE_LINE
    yield from map(write_bytes, lines)


def remember_failure(lines: Iterator[str], failures: list[BaseException]) -> Iterator[str]:
    """The lines, and in ``failures`` what ended them early.

    SentencePiece turns whatever is raised while it reads, a stop request too, into RuntimeError.
    """
    try:
        yield from lines
    except GeneratorExit:
        raise
    except BaseException as error:
        failures.append(error)
        raise


def explain_failure(error: RuntimeError, *, side: Side) -> ConfigError | DataError:
    """SentencePiece's failure as a sentence that says which vocabulary size would do."""
    text = str(error)
    where = f"tokenizer.{side.setting} = {side.size} is too"
    if found := re.search(r"set it to a value <= (\d+)", text):
        return ConfigError(
            f"{where} large for the sample: the largest vocabulary possible is {found[1]}; set "
            "that or less, or draw more sample_lines."
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return ConfigError(
            f"{where} small: the characters of the sample and the specials alone need "
            f"{found[1]}; set more, or a lower character_coverage."
        )
    return DataError(
        f"SentencePiece could not train on the sample ({text.strip()}): look for empty or "
        "damaged text in the corpus."
    )


def sample_statistics(samples: Sequence[Sample], tokenizer: Tokenizer) -> dict[str, object]:
    """Lines per language, and how many of the samples' characters their vocabularies have."""
    quotas: dict[str, int] = {}
    found = covered = 0
    for sample in samples:
        quotas |= sample.quotas
        # SentencePiece takes a space for the mark of a word.
        characters = sorted(sample.characters - {" "})
        encoded = tokenizer.encode_batch(characters, language=next(iter(sample.quotas)))
        found += len(characters)
        covered += sum(tokenizer.unk_id not in ids for ids in encoded)
    return {
        "train_lines": lines_per_language(samples[0].corpus),
        "sampled_lines": quotas,
        "characters": {"sample": found, "covered": covered},
    }


def vocabulary_statistics(files: TokenizerFiles) -> dict[str, object]:
    """Sizes, and how each language's token is written."""
    tokenizer, scheme = files.build(), files.description.language_token_scheme
    return {
        "pieces": tokenizer.size - len(tokenizer.languages),
        "size": tokenizer.size,
        "language_tokens": {
            code: {"token": language_token(code, scheme), "id": tokenizer.language_token_id(code)}
            for code in tokenizer.languages
        },
    }


def summary(
    statistics: Mapping[str, Any], description: TokenizerDescription, corpus: Artifact
) -> list[str]:
    """What was sampled, what the vocabulary covers, and languages it has seen nothing of."""
    languages = description.languages
    lines = [
        f"{counted(statistics['pieces'], 'piece')} and {counted(len(languages), 'language token')}"
    ]
    if description.kind == "bytes":
        return [f"{lines[0]}; bytes need no training, nothing was read"]
    sampled, read = statistics["sampled_lines"], statistics["train_lines"]
    characters = statistics["characters"]
    lines.append(
        f"sampled {sum(sampled.values()):,} of {counted(sum(read.values()), 'training line')} of "
        f"{counted(len(sampled), 'language')}; the vocabulary has {characters['covered']:,} of "
        f"their {counted(characters['sample'], 'different character')}"
    )
    lines.append(_memory_line(statistics["memory"]))
    if unseen := [code for code in languages if not sampled.get(code)]:
        lines.append(f"no text was sampled of: {listed(unseen)}")
    if emptied := sorted(emptied_pairs(corpus)):
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _memory_line(memory: Mapping[str, int | None]) -> str:
    allowed, predicted, measured = (
        "unknown" if number is None else f"{number / 2**20:,.0f} MiB"
        for number in (memory["allowed"], memory["predicted"], memory["measured"])
    )
    return f"training was to take {predicted} of memory ({allowed} allowed), and took {measured}"


def _lines_of(corpus: Artifact, code: str) -> Iterator[str]:
    for pair in line_counts(corpus, "train"):
        if code in pair.split("-"):
            yield from iterate_lines(corpus.file(text_name("train", pair, code)))


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("train_tokenizer"))
