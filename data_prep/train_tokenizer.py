"""Stage train_tokenizer: train a vocabulary on a sample balanced by temperature.

Reads a corpus. Makes a tokenizer with a token for every language. SentencePiece sees training lines
only, drawn without replacement: small languages weigh more than their share. Its models hold the
rule by which they normalize text (``artifacts/spelling.py``), and the sample is normalized by it.
Languages in ``tokenizer.target_languages`` get a model of their own.

With ``base``, the stage extends a vocabulary: it trains one on the languages that the base lacks,
and adds its pieces and the tokens of these languages. All ids of the base stay.

SentencePiece holds many times the size of the sample in memory. The sample therefore has at most
``tokenizer.sample_lines`` lines, and as many as the predicted memory, ``tokenizer.memory_bytes``,
allows; the default of 4 GiB suits a machine with 8 GB.
"""

import io
import math
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor, SentencePieceTrainer

from data_prep.settings import TokenizerConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    emptied_pairs,
    iterate_lines,
    languages,
    line_counts,
    text_name,
)
from pipeline.artifacts.segmenters import segmenter_records
from pipeline.artifacts.shards import lines_per_language
from pipeline.artifacts.spelling import rule_of, with_any_rule, with_rule
from pipeline.artifacts.tokenizer import (
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
    read_tokenizer_files,
    tokenizer_folder,
    with_languages,
    with_pieces_of,
)
from pipeline.artifacts.vocabularies import (
    BYTE_LINE,
    SPACE,
    SPECIALS,
    has_nbest,
    text_pieces,
    write_bytes,
)
from pipeline.config.settings import NUM_SPECIALS
from pipeline.distributed.process import track
from pipeline.errors import ConfigError, DataError
from pipeline.languages import codes_of_setting
from pipeline.seeds import derive_seed
from pipeline.stage import StageCall
from pipeline.temperature_sampling import temperature_probabilities
from pipeline.terminal import counted, listed

MAX_LINE_BYTES = 2**20
"""Longest line for SentencePiece; its own limit would lose letters of long Indic lines."""

SEED = 1
"""Seed of the sample."""
COVERAGE = 0.9995
"""Share of the characters that a warning advises to have pieces: SentencePiece's default."""
THREADS = 16
"""Threads of SentencePiece. The unigram trainer sums what each has found in an order that their
number decides: a constant makes the pieces the same on every machine."""

SEEDS_PER_PIECE, LEAST_SEEDS, MOST_SEEDS = 4, 32_000, 1_000_000
"""Pieces that the unigram trainer begins with, for each piece wanted, at least, and at most.

SentencePiece would begin with a million, whatever the vocabulary, which takes longer and spells
held-out text with no fewer tokens (``tests/bench/data.py``). Lines are not counted as words first
(``input_format="tsv"``): SentencePiece counts words itself before the costly part."""

MEMORY_PER_BYTE, MEMORY_PER_LINE, MEMORY_AT_LEAST = 22, 200, 2**23
"""Bytes of memory that SentencePiece 0.2.3 takes per byte of text, per line, and at least."""


@dataclass(frozen=True)
class Side:
    """Languages that share a vocabulary."""

    languages: frozenset[str]
    setting: str
    """Setting of its number of pieces."""
    size: int


@dataclass
class Sample:
    """Training lines for the vocabulary, drawn while they are read."""

    corpus: Artifact
    quotas: Mapping[str, int]
    """Language → lines to draw."""
    predicted_bytes: int = 0
    """Predicted memory of training."""
    characters: set[str] = field(default_factory=set)
    """Characters of the lines yielded so far, which are normalized."""
    normalize: Callable[[str], str] = str
    """Normalization of the vocabulary: its pieces are of normalized text."""

    def __iter__(self) -> Iterator[str]:
        totals = lines_per_language(self.corpus)
        for code, quota in sorted(self.quotas.items()):
            generator = random.Random(derive_seed("tokenizer sample", SEED, code))
            lines = _lines_of(self.corpus, code)
            for line in draw(lines, total=totals[code], wanted=quota, generator=generator):
                normalized = self.normalize(line)
                self.characters.update(normalized)
                yield normalized


def run(call: StageCall) -> None:
    """Train the vocabulary and write it with a language token for every language."""
    if "base" in call.artifacts:
        extend(call)
        return
    config, corpus = call.recipe.tokenizer, call.artifacts["corpus"]
    among = languages(corpus)
    setting, place = "tokenizer.target_languages", str(corpus.directory)
    own = codes_of_setting(config.target_languages, among, setting=setting, place=place)
    config = config.model_copy(update={"target_languages": tuple(own.values())})
    sides = sides_of(corpus, config) if config.kind != "bytes" else []
    description = TokenizerDescription(
        # Readers treat a character model like any other SentencePiece model.
        kind="sentencepiece" if config.kind == "characters" else config.kind,
        languages=tuple(among),
        language_token_scheme="underscores",
        target_languages=tuple(sorted(config.target_languages)),
        segmenters=segmenter_records(config.segmenters, among),
    )
    with call.new_artifact() as writer:
        samples = [draw_sample(corpus, config=config, among=side.languages) for side in sides]
        is_text = config.kind not in ("byte_bpe", "bytes")
        rule = rule_of(config.normalization) if is_text else b""
        for sample in samples if is_text else ():
            sample.normalize = _normalization(SentencePieceNormalizer(normalizer_spec=rule))
        models = [
            train_sentencepiece(sample, side=side, config=config)
            for side, sample in zip(sides, samples, strict=True)
        ]
        if is_text:
            models = [with_rule(model, rule) for model in models]
        model, target_model = [*models, None, None][:2]
        files = TokenizerFiles(description, model, target_model)
        write_vocabulary(writer, files, samples, config=config)
        size = counted(writer.statistics["pieces"], "piece")
        size += f" and {counted(len(among), 'language token')}"
        if not samples:
            writer.summary.append(f"{size}; bytes need no training, nothing was read")
            return
        writer.summary += [size, *sample_summary(writer.statistics, corpus, among=among)]
        for side, trained in zip(sides, models, strict=True):
            writer.summary += warn_of_characters(trained, side=side, config=config)


def extend(call: StageCall) -> None:
    """Write the base with tokens and pieces of the corpus's languages that it lacks."""
    corpus, base = call.artifacts["corpus"], call.artifacts["base"]
    files = read_tokenizer_files(tokenizer_folder(base))
    added = [code for code in languages(corpus) if code not in files.description.languages]
    refuse_other_base(files, base, corpus=corpus, config=call.recipe.tokenizer, added=added)
    assert files.model is not None
    processor = SentencePieceProcessor(model_proto=with_any_rule(files.model))
    config = call.recipe.tokenizer.model_copy(
        update={"byte_fallback": False, **_kind_of_pieces(processor)}
    )
    side = Side(frozenset(added), "vocabulary_size", config.vocabulary_size)
    with call.new_artifact() as writer:
        sample = draw_sample(corpus, config=config, among=side.languages)
        sample.normalize = _normalization(processor)
        trained = train_sentencepiece(sample, side=side, config=config)
        grown = with_pieces_of(with_languages(files, added), trained)
        write_vocabulary(writer, grown, [sample], config=config)
        more = grown.build().size - files.build().size - len(added)
        writer.summary.append(
            f"added {counted(more, 'piece')} and {counted(len(added), 'language token')} "
            f"({listed(added)}) to {base.directory}"
        )
        writer.summary += sample_summary(writer.statistics, corpus, among=added)
        writer.summary += warn_of_characters(trained, side=side, config=config)


def _normalization(
    normalizer: SentencePieceNormalizer | SentencePieceProcessor,
) -> Callable[[str], str]:
    return lambda line: normalizer.normalize(line).replace(SPACE, " ")


def write_vocabulary(
    writer: ArtifactWriter,
    files: TokenizerFiles,
    samples: Sequence["Sample"],
    *,
    config: TokenizerConfig,
) -> None:
    """Write the files, with statistics of the samples, the memory in bytes and the vocabulary."""
    files.write(writer.directory)
    tokenizer, token_of = files.build(), files.description.language_token
    writer.statistics |= {
        "pieces": tokenizer.size - len(tokenizer.languages),
        "size": tokenizer.size,
        "language_tokens": {
            code: {"token": token_of(code), "id": tokenizer.language_token_id(code)}
            for code in tokenizer.languages
        },
    }
    if samples:
        writer.statistics |= sample_statistics(samples, tokenizer)
        writer.statistics["memory"] = {
            "allowed": config.memory_bytes,
            "predicted": max(sample.predicted_bytes for sample in samples),
        }


def refuse_other_base(
    files: TokenizerFiles,
    base: Artifact,
    *,
    corpus: Artifact,
    config: TokenizerConfig,
    added: Sequence[str],
) -> None:
    """Refuse a base that cannot be extended as the recipe asks."""
    if files.description.kind != "sentencepiece" or files.target_model is not None:
        raise ConfigError(
            f"{base.directory} is not one SentencePiece vocabulary of text, and no other can be "
            "extended. Leave out --base, and add the language in [languages] of an assembly."
        )
    if config.kind != "sentencepiece" or config.target_languages:
        raise ConfigError(
            f"{base.directory} keeps its kind of pieces, and one vocabulary for all languages. "
            "Leave tokenizer.kind and tokenizer.target_languages out of the recipe."
        )
    if not added:
        raise ConfigError(
            f"{base.directory} already has all languages of {corpus.directory} "
            f"({listed(languages(corpus))}). Leave out --base, or name a corpus with a new one."
        )


def _kind_of_pieces(processor: SentencePieceProcessor) -> dict[str, str]:
    """Return the settings that make pieces of the same type as a model's."""
    if has_nbest(processor):
        return {"model_type": "unigram"}
    pieces = map(processor.id_to_piece, text_pieces(processor))
    return {"kind": "characters"} if max(map(len, pieces)) == 1 else {"model_type": "bpe"}


def sides_of(corpus: Artifact, config: TokenizerConfig) -> list[Side]:
    """Return one vocabulary for all languages, or two: the source's, then the target's."""
    present, own = languages(corpus), config.target_languages
    if not own:
        return [Side(frozenset(present), "vocabulary_size", config.vocabulary_size)]
    others = set(present) - set(own)
    if not others:
        raise ConfigError(
            f"tokenizer.target_languages names all languages of {corpus.directory}. Name those "
            "that are translated into and have pieces of their own, or leave it out for one "
            "vocabulary."
        )
    lines = lines_per_language(corpus)
    for side in (others, own):
        if not any(lines[code] for code in side):
            raise DataError(
                f"{corpus.directory} has no training lines in {listed(sorted(side))}, which need "
                "pieces of their own (tokenizer.target_languages splits the languages). Give "
                "it some, or change that setting."
            )
    return [
        Side(frozenset(others), "vocabulary_size", config.vocabulary_size),
        Side(frozenset(own), "target_vocabulary_size", config.target_vocabulary_size),
    ]


def draw_sample(
    corpus: Artifact, *, config: TokenizerConfig, among: frozenset[str] | None = None
) -> Sample:
    """Return the sample that the settings ask for, of all languages or ``among`` some.

    Its lines are read on iteration.

    Raises:
        ConfigError: The settings allow no line.
    """
    every = lines_per_language(corpus)
    line_bytes = bytes_per_line(corpus, every)
    totals = {code: lines for code, lines in every.items() if among is None or code in among}
    most = min(config.sample_lines, sum(totals.values()))
    quotas_of = partial(sample_quotas, totals, sampling_temperature=config.sampling_temperature)
    # Find the largest number of lines that fits.
    fits = bisect_right(
        range(1, most + 1),
        config.memory_bytes,
        key=lambda lines: predicted_memory(quotas_of(sample_lines=lines), line_bytes),
    )
    quotas = quotas_of(sample_lines=fits or config.sample_lines)
    if most and not (fits and any(quotas.values())):
        setting = "memory_bytes" if fits < most else "sample_lines"
        raise ConfigError(
            f"tokenizer.{setting} = {getattr(config, setting):,} has no room for a line of every "
            "language. Raise it."
        )
    predicted = predicted_memory(quotas, line_bytes)
    return Sample(corpus, quotas, predicted_bytes=predicted)


def predicted_memory(quotas: Mapping[str, int], line_bytes: Mapping[str, float]) -> int:
    """Predict the bytes of memory that SentencePiece takes for these lines of these mean sizes."""
    text = sum(quota * line_bytes[code] for code, quota in quotas.items())
    lines = sum(quotas.values())
    return math.ceil(MEMORY_AT_LEAST + lines * MEMORY_PER_LINE + text * MEMORY_PER_BYTE)


def bytes_per_line(corpus: Artifact, totals: Mapping[str, int]) -> dict[str, float]:
    """Return language → mean bytes of a training line, without languages that have none."""
    sizes = dict.fromkeys(totals, 0)
    for pair in line_counts(corpus, "train"):
        for code in totals.keys() & pair.split("-"):
            sizes[code] += corpus.record(text_name("train", pair, code)).size
    return {code: sizes[code] / total for code, total in totals.items() if total}


def sample_quotas(
    totals: Mapping[str, int], *, sampling_temperature: float, sample_lines: int
) -> dict[str, int]:
    """Return language → lines to draw by temperature, at most the lines of the language.

    The lines that a small language lacks are shared among the others in proportion. The sum is at
    most ``sample_lines``; it is lower by rounding, or if there are no more lines.
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
    """Yield exactly ``wanted`` of ``total`` lines in order, each subset equally likely.

    Algorithm S of Knuth, The Art of Computer Programming 2, §3.4.2, which keeps nothing in memory.
    """
    for seen, line in enumerate(lines):
        if not wanted:
            return
        if generator.random() * (total - seen) < wanted:
            wanted -= 1
            yield line


def train_sentencepiece(sample: Sample, *, side: Side, config: TokenizerConfig) -> bytes:
    """Return a serialized SentencePiece model, deterministic for sample and settings."""
    model = io.BytesIO()
    failures: list[BaseException] = []
    tracked = track(sample, label="sample lines", total=sum(sample.quotas.values()))
    lines = remember_failure(tracked, failures)
    if config.kind == "byte_bpe":
        lines = chain([BYTE_LINE], map(write_bytes, lines))  # the first line has every byte
    special_ids: dict[str, Any] = {f"{name}_id": index for name, index in SPECIALS.items()}
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=side.size,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",
            max_sentence_length=MAX_LINE_BYTES,
            **special_ids,
            num_threads=THREADS,
            seed_sentencepiece_size=min(max(SEEDS_PER_PIECE * side.size, LEAST_SEEDS), MOST_SEEDS),
            minloglevel=2,
            **_options_of_kind(config),
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise explain_failure(error, side=side, kind=config.kind) from error
    return model.getvalue()


def warn_of_characters(model: bytes, *, side: Side, config: TokenizerConfig) -> list[str]:
    """Return a warning if most pieces of a vocabulary of subwords are single characters."""
    processor = SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(index) for index in text_pieces(processor)]
    single = sum(len(piece) == 1 for piece in pieces)
    if config.kind != "sentencepiece" or 2 * single <= len(pieces):
        return []
    fits = math.ceil((side.size + 2 * single - len(pieces)) / 1000) * 1000
    other = ""
    if config.character_coverage > COVERAGE:
        bytes_too = "" if config.byte_fallback else "tokenizer.byte_fallback to true and "
        other = f", or {bytes_too}tokenizer.character_coverage to {COVERAGE} or less"
    return [
        f"warning: {single:,} of {len(pieces):,} pieces of text are single characters, so text is "
        f"spelled rather than cut into words. Set tokenizer.{side.setting} to {fits:,} or more, "
        f"with a larger sample (more text or tokenizer.sample_lines) if this allows fewer{other}"
    ]


def _options_of_kind(config: TokenizerConfig) -> dict[str, Any]:
    """Return SentencePiece's options for the kind of pieces."""
    match config.kind:
        case "characters":
            # The sample may have fewer characters than the vocabulary allows.
            kind: dict[str, Any] = {"model_type": "char", "hard_vocab_limit": False}
        case "byte_bpe":
            # Bytes have no script and no digits; spaces stay as they are.
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


def remember_failure(lines: Iterator[str], failures: list[BaseException]) -> Iterator[str]:
    """Yield the lines, and add to ``failures`` the exception that ends them early.

    SentencePiece turns every exception while it reads, stop requests included, into RuntimeError.
    """
    try:
        yield from lines
    except GeneratorExit:
        raise
    except BaseException as error:
        failures.append(error)
        raise


def explain_failure(error: RuntimeError, *, side: Side, kind: str) -> ConfigError | DataError:
    """Translate SentencePiece's failure into an error that says which vocabulary size works."""
    text = str(error)
    where = f"tokenizer.{side.setting} = {side.size} is too"
    if found := re.search(r"set it to a value <= (\d+)", text):
        return ConfigError(
            f"{where} large for the sample, which allows at most {found[1]}. Set that or less, or "
            "draw a larger sample (more text or tokenizer.sample_lines)."
        )
    form = r"smaller than required_chars\. \d+ vs (\d+)|\(vocab_size\) >= \(0\)"
    if found := re.search(form, text):  # the latter of characters with byte_fallback
        what = "characters of the sample" if found[1] else "bytes of byte_fallback"
        least = found[1] or NUM_SPECIALS + 256
        other = "" if kind == "byte_bpe" or not found[1] else ", or a lower character_coverage"
        return ConfigError(
            f"{where} small: the {what} and the specials already need {least}. Set more{other}."
        )
    return DataError(
        f"SentencePiece could not train on the sample ({text.strip()}). Look for empty or "
        "damaged text in the corpus."
    )


def sample_statistics(samples: Sequence[Sample], tokenizer: Tokenizer) -> dict[str, object]:
    """Return lines per language, and the number of sampled characters in the vocabularies."""
    quotas: dict[str, int] = {}
    found = covered = 0
    for sample in samples:
        quotas |= sample.quotas
        # SentencePiece encodes a space as the mark of a word.
        characters = sorted(sample.characters - {" "})
        encoded = tokenizer.encode_batch(characters, language=next(iter(sample.quotas)))
        found += len(characters)
        covered += sum(tokenizer.unk_id not in ids for ids in encoded)
    return {
        "train_lines": lines_per_language(samples[0].corpus),
        "sampled_lines": quotas,
        "characters": {"sample": found, "covered": covered},
    }


def sample_summary(
    statistics: Mapping[str, Any], corpus: Artifact, *, among: Sequence[str]
) -> list[str]:
    """Summarize the sample, the coverage of the vocabulary, and languages without text."""
    sampled, read = statistics["sampled_lines"], statistics["train_lines"]
    characters, memory = statistics["characters"], statistics["memory"]
    allowed, predicted = (f"{memory[name] / 2**20:,.0f} MiB" for name in ("allowed", "predicted"))
    lines = [
        f"sampled {sum(sampled.values()):,} of {counted(sum(read.values()), 'training line')} of "
        f"{counted(len(sampled), 'language')}; the vocabulary has {characters['covered']:,} of "
        f"their {counted(characters['sample'], 'different character')}",
        f"training was to take {predicted} of memory ({allowed} allowed)",
    ]
    if unseen := [code for code in among if not sampled.get(code)]:
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
