"""make_shards: text into memory-mapped token ids, training and validation lines.

Reads a corpus and a tokenizer, makes shards. Pairs are spread over worker processes, each of which
streams its pair in chunks; the result does not depend on their number.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.artifacts import Artifact
from pipeline.corpus import iterate_lines, languages, line_counts, pair_counts, text_name
from pipeline.errors import ConfigError, DataError
from pipeline.progress import track
from pipeline.shards import TOKENIZER_FOLDER, ShardWriter
from pipeline.stages import StageCall
from pipeline.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder

CHUNK_LINES = 4096

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
        check_training_pairs(corpus, results)
        copy_tokenizer(tokenizer_dir, writer.directory / TOKENIZER_FOLDER)
        writer.statistics |= shard_statistics(results)


def check_languages(corpus: Artifact, tokenizer: Tokenizer, *, tokenizer_dir: Path) -> None:
    """Raises ConfigError where the tokenizer has no token for a language of the corpus."""
    missing = sorted(set(languages(corpus)) - set(tokenizer.languages))
    if missing:
        raise ConfigError(
            f"The tokenizer {tokenizer_dir} has no token for {', '.join(missing)}, which the "
            f"corpus {corpus.directory} has: train the tokenizer on this corpus."
        )


def check_training_pairs(corpus: Artifact, results: list[PairCounts]) -> None:
    """Raises DataError where a pair, or the whole corpus, is left without training sentences."""
    expected = line_counts(corpus, "train")
    if not expected:
        raise DataError(f"{corpus.directory} has no training lines: import a corpus that has.")
    empty = [
        counts.pair for counts in results if counts.pair in expected and not counts.kept["train"]
    ]
    if empty:
        raise DataError(
            f"No training sentence of {', '.join(empty)} in {corpus.directory} is within "
            "shards.max_tokens: raise it, or leave the pair out of the corpus."
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
    pairs = zip(first, second, strict=True)
    try:
        while chunk := list(islice(pairs, CHUNK_LINES)):
            yield chunk
    except ValueError as error:
        raise DataError(
            f"The two sides of {split}/{job.pair} in {job.corpus.directory} differ in their number "
            "of lines: run the stage that made this corpus again."
        ) from error


def shard_statistics(results: list[PairCounts]) -> dict[str, object]:
    """Sentences kept and left out, training tokens, and the share of unknown ones per language."""
    tokens: dict[str, int] = {}
    unknown: dict[str, int] = {}
    for counts in results:
        for code, number in counts.tokens.items():
            tokens[code] = tokens.get(code, 0) + number
            unknown[code] = unknown.get(code, 0) + counts.unknown[code]
    return {
        "pairs": {counts.pair: counts.kept for counts in results},
        "tokens": {counts.pair: counts.tokens for counts in results if counts.kept["train"]},
        "too_long": {counts.pair: counts.too_long for counts in results},
        "unknown_share": {code: unknown[code] / max(tokens[code], 1) for code in sorted(tokens)},
    }


def _shard_writer(job: PairJob, *, split: ShardSplit, language: str) -> ShardWriter:
    return ShardWriter(
        job.out_dir, split=split, pair=job.pair, language=language, size=job.tokenizer.size
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("make_shards"))
