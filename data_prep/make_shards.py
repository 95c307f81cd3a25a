"""make_shards: text into memory-mapped token ids, training and validation lines.

Reads a corpus and a tokenizer, makes shards. Pairs are spread over worker processes, each of which
streams its pair in chunks of bounded size; the result does not depend on their number. A pair whose
training sentences are all too long is left without training data, which the statistics say
(``emptied``).
"""

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    emptied_pairs,
    imported_statistics,
    iterate_lines,
    languages,
    line_counts,
    pair_counts,
    text_name,
)
from pipeline.artifacts.shards import TOKENIZER_FOLDER, ShardWriter
from pipeline.artifacts.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.errors import ConfigError, DataError
from pipeline.stages import StageCall
from pipeline.summary import counted, listed
from pipeline.terminal import track

CHUNK_LINES = 4096
CHUNK_CHARACTERS = 2**22
"""Of both sides; a chunk ends with the line that reaches either number."""

ShardSplit = Literal["train", "valid"]
SPLITS: tuple[ShardSplit, ...] = ("train", "valid")


@dataclass(frozen=True)
class PairJob:
    """All that a worker needs to make the shards of one pair."""

    pair: str
    lines: dict[ShardSplit, int]
    corpus: Artifact
    out_dir: Path
    tokenizer: Tokenizer
    max_tokens: int


@dataclass
class PairCounts:
    """What became of one pair's sentences; both splits count into ``too_long``."""

    pair: str
    kept: dict[ShardSplit, int]
    tokens: dict[str, int]
    """Language → tokens of the training sentences."""
    unknown: dict[str, int]
    """Language → those of them that are unknown."""
    too_long: int = 0
    too_long_sides: dict[str, int] = field(default_factory=dict)
    """Language → sentences of it that are; a sentence pair can count for both."""


def run(call: StageCall) -> None:
    """Encode every pair and put the tokenizer's files beside the ids."""
    corpus, tokenizer_dir = call.artifacts["corpus"], tokenizer_folder(call.artifacts["tokenizer"])
    tokenizer = load_tokenizer(tokenizer_dir)
    check_languages(corpus, tokenizer, tokenizer_dir=tokenizer_dir)
    with call.new_artifact() as writer:
        jobs = pair_jobs(
            corpus,
            tokenizer=tokenizer,
            out_dir=writer.directory,
            max_tokens=call.recipe.shards.max_tokens,
        )
        results = sorted(run_jobs(jobs, processes=call.processes), key=lambda counts: counts.pair)
        check_training_lines(corpus, results)
        copy_tokenizer(tokenizer_dir, writer.directory / TOKENIZER_FOLDER)
        writer.statistics |= shard_statistics(corpus, results)
        writer.summary += summary(corpus, results, max_tokens=call.recipe.shards.max_tokens)


def check_languages(corpus: Artifact, tokenizer: Tokenizer, *, tokenizer_dir: Path) -> None:
    """Raises ConfigError where the tokenizer has no token for a language of the corpus."""
    missing = sorted(set(languages(corpus)) - set(tokenizer.languages))
    if missing:
        raise ConfigError(
            f"The tokenizer {tokenizer_dir} has no token for {', '.join(missing)}, which the "
            f"corpus {corpus.directory} has: train the tokenizer on this corpus."
        )


def check_training_lines(corpus: Artifact, results: list[PairCounts]) -> None:
    """Raises DataError where the corpus has no training lines, or none of them is short enough."""
    if not line_counts(corpus, "train"):
        raise DataError(f"{corpus.directory} has no training lines: import a corpus that has.")
    if not any(counts.kept["train"] for counts in results):
        raise DataError(
            f"No training sentence of {corpus.directory} is within shards.max_tokens: raise it, or "
            "split the lines into sentences."
        )


def pair_jobs(
    corpus: Artifact, *, tokenizer: Tokenizer, out_dir: Path, max_tokens: int
) -> list[PairJob]:
    """One job per pair, the largest first, so that no worker begins with it last."""
    for split in SPLITS:
        corpus.check(corpus.names(f"{split}/"))
    lines = {split: line_counts(corpus, split) for split in SPLITS}
    jobs = [
        PairJob(
            pair=pair,
            lines={split: counts[pair] for split, counts in lines.items() if pair in counts},
            corpus=corpus,
            out_dir=out_dir,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
        )
        for pair in pair_counts(corpus)
    ]
    return sorted(jobs, key=lambda job: (-sum(job.lines.values()), job.pair))


def run_jobs(jobs: list[PairJob], *, processes: int) -> Iterator[PairCounts]:
    """Results in the order in which they are ready; after a failure no pair is begun."""
    if processes == 1:
        yield from map(shard_pair, track(jobs, label="pairs", total=len(jobs)))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(shard_pair, job) for job in jobs]
        try:
            for future in track(as_completed(futures), label="pairs", total=len(jobs)):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def shard_pair(job: PairJob) -> PairCounts:
    """Make the shards of all splits of one pair."""
    codes = job.pair.split("-")
    counts = PairCounts(
        job.pair,
        kept=dict.fromkeys(SPLITS, 0),
        tokens=dict.fromkeys(codes, 0),
        unknown=dict.fromkeys(codes, 0),
        too_long_sides=dict.fromkeys(codes, 0),
    )
    for split in job.lines:
        shard_split(job, split, counts)
    return counts


def shard_split(job: PairJob, split: ShardSplit, counts: PairCounts) -> None:
    """Encode one split, both sides in step, and add to the pair's counts.

    Raises:
        DataError: the sides differ in their number of lines.
    """
    with ExitStack() as stack:
        writers = {
            code: stack.enter_context(closing(_shard_writer(job, split=split, language=code)))
            for code in job.pair.split("-")
        }
        for chunk in line_pairs(job, split):
            encoded = [job.tokenizer.encode_batch(side) for side in zip(*chunk, strict=True)]
            kept = [
                sentences
                for sentences in zip(*encoded, strict=True)
                if max(map(len, sentences)) <= job.max_tokens
            ]
            counts.too_long += len(chunk) - len(kept)
            counts.kept[split] += len(kept)
            for side, (code, writer) in enumerate(writers.items()):
                counts.too_long_sides[code] += sum(
                    len(ids) > job.max_tokens for ids in encoded[side]
                )
                tokens = writer.append([sentences[side] for sentences in kept])
                if split == "train":
                    counts.tokens[code] += len(tokens)
                    counts.unknown[code] += int(np.count_nonzero(tokens == job.tokenizer.unk_id))


def line_pairs(job: PairJob, split: ShardSplit) -> Iterator[list[tuple[str, str]]]:
    """Chunks of lines that stand beside each other.

    Raises:
        DataError: one side ends before the other.
    """
    first, second = (
        iterate_lines(job.corpus.file(text_name(split, job.pair, code)))
        for code in job.pair.split("-")
    )
    chunk: list[tuple[str, str]] = []
    characters = 0
    try:
        for lines in zip(first, second, strict=True):
            chunk.append(lines)
            characters += len(lines[0]) + len(lines[1])
            if len(chunk) >= CHUNK_LINES or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk
    except ValueError as error:
        raise DataError(
            f"The two sides of {split}/{job.pair} in {job.corpus.directory} differ in their number "
            "of lines: run the stage that made this corpus again."
        ) from error


def shard_statistics(corpus: Artifact, results: list[PairCounts]) -> dict[str, object]:
    """Sentences kept and left out, training tokens, and the share of unknown ones per language."""
    return {
        "pairs": {counts.pair: counts.kept for counts in results},
        "tokens": {counts.pair: counts.tokens for counts in results if counts.kept["train"]},
        "too_long": {counts.pair: counts.too_long for counts in results},
        "too_long_sides": {counts.pair: counts.too_long_sides for counts in results},
        "unknown_share": unknown_shares(results),
        "emptied": sorted(emptied_pairs(corpus) | newly_emptied(corpus, results)),
        "imported": imported_statistics(corpus),
    }


def unknown_shares(results: list[PairCounts]) -> dict[str, float]:
    """Language → share of its training tokens that the vocabulary does not have."""
    tokens, unknown = Counter[str](), Counter[str]()
    for counts in results:
        tokens.update(counts.tokens)
        unknown.update(counts.unknown)
    return {code: unknown[code] / max(tokens[code], 1) for code in sorted(tokens)}


def newly_emptied(corpus: Artifact, results: list[PairCounts]) -> set[str]:
    """Pairs with training lines none of which is short enough."""
    expected = line_counts(corpus, "train")
    return {
        counts.pair for counts in results if counts.pair in expected and not counts.kept["train"]
    }


def summary(corpus: Artifact, results: list[PairCounts], *, max_tokens: int) -> list[str]:
    """Lines read and kept per split, those too long, unknown tokens, pairs without training."""
    read = {split: sum(line_counts(corpus, split).values()) for split in SPLITS}
    kept = {split: sum(counts.kept[split] for counts in results) for split in SPLITS}
    sides, tokens = Counter[str](), Counter[str]()
    for counts in results:
        sides.update(counts.too_long_sides)
        tokens.update(counts.tokens)
    lines = [
        f"read {counted(read['train'], 'training line')} and {read['valid']:,} of validation, kept "
        f"{kept['train']:,} and {kept['valid']:,}: {counted(tokens.total(), 'training token')}"
    ]
    if too_long := sum(counts.too_long for counts in results):
        languages_of = listed(f"{code} {count:,}" for code, count in sides.most_common() if count)
        lines.append(f"left out {too_long:,} of more than {max_tokens:,} tokens ({languages_of})")
    shares = sorted(unknown_shares(results).items(), key=lambda item: (-item[1], item[0]))
    if unknown := [f"{code} {share:.2%}" for code, share in shares if share > 0]:
        lines.append(f"tokens not in the vocabulary: {listed(unknown)}")
    if emptied := sorted(emptied_pairs(corpus) | newly_emptied(corpus, results)):
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _shard_writer(job: PairJob, *, split: ShardSplit, language: str) -> ShardWriter:
    return ShardWriter(
        job.out_dir, split=split, pair=job.pair, language=language, size=job.tokenizer.size
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("make_shards"))
