"""Stage make_shards: encode training and validation lines as memory-mapped token ids.

Reads a corpus and a tokenizer. Makes shards. Pairs are spread over worker processes or ranks
(``pair_shards`` is the work on one pair); their number does not change the result.

Finished pairs stay in the run folder of an interrupted stage and are not made again. A pair with
only too long training sentences is listed as ``emptied`` in the statistics.
"""

import sys
from collections import Counter
from concurrent.futures import as_completed
from pathlib import Path

from data_prep.pair_shards import (
    SPLITS,
    FinishedPair,
    PairCounts,
    PairWork,
    Sharding,
    claim_work,
    pair_folder,
    read_finished,
    remove_work,
    shard_pair,
)
from data_prep.settings import ShardsConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    emptied_pairs,
    imported_statistics,
    language_of,
    languages,
    line_counts,
    listed_names,
    pair_counts,
)
from pipeline.artifacts.manifest import OTHER_LANGUAGES
from pipeline.artifacts.places import link_or_copy, run_dir
from pipeline.artifacts.shards import TOKENIZER_FOLDER
from pipeline.artifacts.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import ConfigError, DataError
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, track


def run(call: StageCall) -> None:
    """Encode every pair and copy the tokenizer's files to the ids."""
    corpus, tokenizer_dir = call.artifacts["corpus"], tokenizer_folder(call.artifacts["tokenizer"])
    tokenizer = load_tokenizer(tokenizer_dir)
    check_languages(corpus, tokenizer, tokenizer_dir=tokenizer_dir)
    config, work_dir = call.recipe.shards, run_dir(call.out_dir)
    max_tokens = call.recipe.max_tokens
    segmenters = call.recipe.tokenizer.segmenters
    sharding = Sharding(corpus, tokenizer, max_tokens, segmenters)
    sharding.words.load(languages(corpus))
    with call.new_artifact() as writer:
        jobs = pair_jobs(corpus, work_dir=work_dir)
        claim_work(work_dir, key=call.key)
        finished = make_pairs(sharding, jobs, processes=call.processes, mpi=call.mpi)
        results = [pair.counts for pair in finished]
        check_training_lines(corpus, results, config=config, max_tokens=max_tokens)
        take_files(finished, writer, work_dir=work_dir)
        copy_tokenizer(tokenizer_dir, writer.directory / TOKENIZER_FOLDER)
        writer.statistics |= shard_statistics(corpus, results)
        writer.summary += summary(sharding, results)
        remove_work(work_dir)


def make_pairs(
    sharding: Sharding, jobs: list[PairWork], *, processes: int, mpi: bool
) -> list[FinishedPair]:
    """Return the shards of every pair by name; finished pairs are not made again.

    After a failure no further pair begins.
    """
    known = {job.pair: read_finished(job.out_dir) for job in jobs}
    made = {name: pair for name, pair in known.items() if pair is not None}
    missing = [job for job in jobs if job.pair not in made]
    if processes == 1 and not mpi:
        for job in track(missing, label="pairs"):
            made[job.pair] = shard_pair(sharding, job)
    else:
        with open_pool(processes, mpi=mpi, shared=sharding) as pool:
            futures = {pool.submit(with_shared(shard_pair), job): job.pair for job in missing}
            for future in track(as_completed(futures), label="pairs", total=len(missing)):
                made[futures[future]] = future.result()
    return [made[name] for name in sorted(made)]


def take_files(finished: list[FinishedPair], writer: ArtifactWriter, *, work_dir: Path) -> None:
    """Move the shards of all pairs into the artifact, keeping the digests of linked files."""
    for pair in finished:
        folder = pair_folder(work_dir, pair.counts.pair)
        for name, record in pair.files.items():
            target = writer.path(name)
            if link_or_copy(folder / name, target):
                writer.settled[target] = record


def check_languages(corpus: Artifact, tokenizer: Tokenizer, *, tokenizer_dir: Path) -> None:
    """Refuse a tokenizer that lacks a token for a language of the corpus.

    Raises:
        ConfigError: Names the languages.
    """
    missing = sorted(set(languages(corpus)) - set(tokenizer.languages))
    if missing:
        raise ConfigError(
            f"The tokenizer {tokenizer_dir} has no token for {', '.join(missing)}, which the "
            f"corpus {corpus.directory} has. Train the tokenizer on this corpus."
        )


def check_training_lines(
    corpus: Artifact, results: list[PairCounts], *, config: ShardsConfig, max_tokens: int
) -> None:
    """Refuse a corpus without training lines that are short enough.

    Raises:
        DataError: There are none at all, or all are too long.
    """
    if not line_counts(corpus, "train"):
        raise DataError(f"{corpus.directory} has no training lines. Import a corpus that has.")
    if not any(counts.kept["train"] for counts in results):
        follows = "model.max_positions and batches.tokens, which shards.max_tokens follows"
        setting = "shards.max_tokens" if config.max_tokens is not None else follows
        raise DataError(
            f"No training sentence of {corpus.directory} is within {counted(max_tokens, 'token')}, "
            f"the limit by {setting}. Raise it, or split the lines into sentences."
        )


def pair_jobs(corpus: Artifact, *, work_dir: Path) -> list[PairWork]:
    """Return one job per pair, the largest first: no worker begins with it last."""
    for split in SPLITS:
        corpus.check(corpus.names(f"{split}/"))
    lines = {split: line_counts(corpus, split) for split in SPLITS}
    sizes = {pair: sum(of.get(pair, 0) for of in lines.values()) for pair in pair_counts(corpus)}
    return [
        PairWork(
            pair,
            splits=tuple(split for split in SPLITS if pair in lines[split]),
            out_dir=pair_folder(work_dir, pair),
        )
        for pair in sorted(sizes, key=lambda pair: (-sizes[pair], pair))
    ]


def shard_statistics(corpus: Artifact, results: list[PairCounts]) -> dict[str, object]:
    """Return sentences kept and left out, training tokens, and shares of unknown tokens."""
    return {
        "pairs": {counts.pair: counts.kept for counts in results},
        "tokens": {counts.pair: counts.tokens for counts in results if counts.kept["train"]},
        "too_long": {counts.pair: counts.too_long for counts in results},
        "too_long_sides": {counts.pair: counts.too_long_sides for counts in results},
        "unknown_share": unknown_shares(results),
        "emptied": sorted(emptied_pairs(corpus) | newly_emptied(corpus, results)),
        "imported": imported_statistics(corpus),
        OTHER_LANGUAGES: sorted(listed_names(corpus, OTHER_LANGUAGES)),
    }


def unknown_shares(results: list[PairCounts]) -> dict[str, float]:
    """Return language → share of its training tokens that the vocabulary lacks."""
    tokens, unknown = Counter[str](), Counter[str]()
    for counts in results:
        tokens.update(counts.tokens)
        unknown.update(counts.unknown)
    return {code: unknown[code] / max(tokens[code], 1) for code in sorted(tokens)}


def newly_emptied(corpus: Artifact, results: list[PairCounts]) -> set[str]:
    """Return the pairs with training lines of which none is short enough."""
    expected = line_counts(corpus, "train")
    return {
        counts.pair for counts in results if counts.pair in expected and not counts.kept["train"]
    }


def summary(sharding: Sharding, results: list[PairCounts]) -> list[str]:
    """Summarize lines read and kept, too long ones, unknown tokens, emptied pairs, and words."""
    corpus, max_tokens = sharding.corpus, sharding.max_tokens
    read = {split: sum(line_counts(corpus, split).values()) for split in SPLITS}
    kept = {split: sum(counts.kept[split] for counts in results) for split in SPLITS}
    sides, tokens, words = Counter[str](), Counter[str](), Counter[str]()
    for counts in results:
        sides.update(counts.too_long_sides)
        tokens.update(counts.tokens)
        words.update(counts.words)
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
    if words:
        segmenters = sharding.tokenizer.segmenters
        names = (
            f"{code} {count:,} by {segmenters[language_of(code)].name}"
            for code, count in sorted(words.items())
        )
        lines.append(f"words of training lines: {listed(names)}")
    return lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("make_shards"))
