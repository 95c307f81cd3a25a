"""train_tokenizer: a vocabulary from a temperature-balanced sample, and language tokens.

Reads a corpus, makes a tokenizer. SentencePiece sees training lines only, drawn without replacement
so that small languages weigh more than their share; text is not normalised. SentencePiece holds the
sample in memory: ``tokenizer.sample_lines`` bounds it, import bounds each line.
"""

import io
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    emptied_pairs,
    iterate_lines,
    languages,
    line_counts,
    text_name,
)
from pipeline.artifacts.mixture import lines_per_language, temperature_probabilities
from pipeline.artifacts.tokenizer import (
    SPECIALS,
    TokenizerDescription,
    build_tokenizer,
    language_token,
    write_tokenizer,
)
from pipeline.config import TokenizerConfig
from pipeline.errors import ConfigError, DataError
from pipeline.seeds import derive_seed
from pipeline.stages import StageCall
from pipeline.summary import counted, listed
from pipeline.terminal import track

MAX_LINE_BYTES = 2**20
"""SentencePiece leaves out longer lines; its own limit would lose letters of long Indic lines."""


@dataclass
class Sample:
    """Training lines for the vocabulary, drawn while they are read."""

    corpus: Artifact
    quotas: Mapping[str, int]
    """Language → lines to draw."""
    seed: int
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
    description = TokenizerDescription(
        kind=config.kind,
        languages=tuple(languages(corpus)),
        language_token_scheme=config.language_token_scheme,
    )
    with call.new_artifact() as writer:
        model = None
        if config.kind == "sentencepiece":
            sample = draw_sample(corpus, config=config)
            model = train_sentencepiece(sample, config=config)
            writer.statistics |= sample_statistics(sample, model)
        write_tokenizer(writer.directory, description=description, model=model)
        writer.statistics |= vocabulary_statistics(description, model)
        writer.summary += summary(writer.statistics, description, corpus)


def draw_sample(corpus: Artifact, *, config: TokenizerConfig) -> Sample:
    """The sample the settings ask for; lines are read when it is iterated over.

    Raises:
        DataError: the corpus has no training lines.
    """
    totals = lines_per_language(corpus)
    quotas = sample_quotas(
        totals,
        sampling_temperature=config.sampling_temperature,
        sample_lines=config.sample_lines,
    )
    return Sample(corpus, quotas=quotas, seed=config.seed)


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


def train_sentencepiece(sample: Sample, *, config: TokenizerConfig) -> bytes:
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
            sentence_iterator=lines,
            model_writer=model,
            model_type=config.model_type,
            vocab_size=config.vocabulary_size,
            character_coverage=config.character_coverage,
            normalization_rule_name="identity",
            byte_fallback=False,
            max_sentence_length=MAX_LINE_BYTES,
            pad_id=SPECIALS["pad"],
            bos_id=SPECIALS["bos"],
            eos_id=SPECIALS["eos"],
            unk_id=SPECIALS["unk"],
            # With more threads the unigram trainer adds in another order, and learns other pieces.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise explain_failure(error, config=config) from error
    return model.getvalue()


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


def explain_failure(error: RuntimeError, *, config: TokenizerConfig) -> ConfigError | DataError:
    """SentencePiece's failure as a sentence that says which vocabulary size would do."""
    text = str(error)
    where = f"tokenizer.vocabulary_size = {config.vocabulary_size} is too"
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


def sample_statistics(sample: Sample, model: bytes) -> dict[str, object]:
    """Lines per language, and how many of the sample's characters the vocabulary has."""
    processor = SentencePieceProcessor(model_proto=model)
    # SentencePiece writes a space as U+2581.
    found = sorted(sample.characters - {" "})
    covered = [
        character for character in found if processor.piece_to_id(character) != processor.unk_id()
    ]
    return {
        "train_lines": lines_per_language(sample.corpus),
        "sampled_lines": dict(sample.quotas),
        "characters": {"sample": len(found), "covered": len(covered)},
    }


def vocabulary_statistics(
    description: TokenizerDescription, model: bytes | None
) -> dict[str, object]:
    """Sizes, and how each language's token is written."""
    tokenizer = build_tokenizer(description, model)
    scheme = description.language_token_scheme
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
    if unseen := [code for code in languages if not sampled.get(code)]:
        lines.append(f"no text was sampled of: {listed(unseen)}")
    if emptied := sorted(emptied_pairs(corpus)):
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _lines_of(corpus: Artifact, code: str) -> Iterator[str]:
    for pair in line_counts(corpus, "train"):
        if code in pair.split("-"):
            yield from iterate_lines(corpus.file(text_name("train", pair, code)))


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("train_tokenizer"))
