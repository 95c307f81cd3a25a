"""Stage make_shards: encode training and validation lines as memory-mapped token ids.

Reads a corpus and a tokenizer. Makes shards. Pairs are spread over worker processes or ranks;
their number does not change the result. A worker reads both sides of a pair in step, in chunks:
memory does not grow with the number of lines. A back-translated source begins with the tag ``<s>``,
which every vocabulary has and no text encodes to (Caswell and others, Tagged Back-Translation,
2019, arXiv 1906.06442).

Finished pairs stay in the run folder of an interrupted stage, each in a folder in which
``finished.json`` is written last, and are not made again. A pair with only too long training
sentences is listed as ``emptied`` in the statistics.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from data_prep.settings import ShardsConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter, FileRecord, to_json
from pipeline.artifacts.corpus import (
    BACK_TRANSLATED,
    aligned_lines,
    emptied_pairs,
    imported_statistics,
    joined_lines,
    language_of,
    languages,
    line_counts,
    listed_names,
    pair_counts,
    refuse_other_codes,
    text_name,
)
from pipeline.artifacts.manifest import OTHER_LANGUAGES, file_records, run_dir
from pipeline.artifacts.places import link_or_copy
from pipeline.artifacts.run_folders import (
    IDENTITY_FILE,
    NOTE_NAME,
    PAIR_FOLDER,
    announce_removal,
    claim_run_folder,
    remove_files,
    remove_pairs,
)
from pipeline.artifacts.segmenters import Segmenters
from pipeline.artifacts.shards import TOKENIZER_FOLDER, ShardWriter
from pipeline.artifacts.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer, tokenizer_folder
from pipeline.config.documents import unfinished_path
from pipeline.distributed.process import track
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import ConfigError, DataError
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

CHUNK_LINES = 512
"""Lines encoded at a time. SentencePiece is fastest with few: their ids stay in the cache."""
CHUNK_CHARACTERS = 2**22
"""Characters of both sides encoded at a time; a chunk ends with the line that reaches a limit."""

FINISHED_FILE = "finished.json"

ShardSplit = Literal["train", "valid"]
SPLITS: tuple[ShardSplit, ...] = ("train", "valid")


@dataclass(frozen=True)
class Sharding:
    """Input of all jobs, sent to a worker once: corpus and tokenizer."""

    corpus: Artifact
    tokenizer: Tokenizer
    max_tokens: int
    """Longest sentence that is kept, in tokens."""
    segmenters: Mapping[str, str] = field(default_factory=dict)
    """Language → segmenter, as the recipe names them."""

    @cached_property
    def words(self) -> Segmenters:
        """Return the segmenters of the tokenizer's languages."""
        return Segmenters(self.tokenizer, self.segmenters)


@dataclass(frozen=True)
class PairWork:
    """Input of a worker for one pair."""

    pair: str
    splits: tuple[ShardSplit, ...]
    """Splits that the pair has lines of."""
    out_dir: Path
    """Folder of this pair."""


@dataclass
class PairCounts:
    """Counts of a pair's sentences; both splits count into ``too_long``."""

    pair: str
    kept: dict[ShardSplit, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=dict)
    """Language → tokens of the training sentences."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Language → unknown tokens among ``tokens``."""
    too_long: int = 0
    too_long_sides: dict[str, int] = field(default_factory=dict)
    """Language → its too long sentences; a sentence pair can count for both sides."""
    words: dict[str, int] = field(default_factory=dict)
    """Language with a segmenter → words of its training sentences."""

    def __post_init__(self) -> None:
        for code in self.pair.split("-"):
            for counts in (self.tokens, self.unknown, self.too_long_sides):
                counts.setdefault(code, 0)


@dataclass(frozen=True)
class FinishedPair:
    """Contents of ``finished.json``."""

    counts: PairCounts
    files: dict[str, FileRecord]
    """Name within the artifact → digests."""


_FINISHED = TypeAdapter(FinishedPair)


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
        announce_removal(work_dir, key=call.key)
    remove_pairs(work_dir)  # all shards are part of the artifact now
    remove_files(work_dir, [IDENTITY_FILE, NOTE_NAME])


def make_pairs(
    sharding: Sharding, jobs: list[PairWork], *, processes: int, mpi: bool
) -> list[FinishedPair]:
    """Return the shards of every pair by name; after a failure no further pair begins."""
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
    """Refuse a tokenizer that lacks a language of the corpus, or has another code for it."""
    missing = sorted(set(languages(corpus)) - set(tokenizer.languages))
    if missing:
        raise ConfigError(
            f"The tokenizer {tokenizer_dir} has no token for {', '.join(missing)}, which the "
            f"corpus {corpus.directory} has. Train the tokenizer on this corpus."
        )
    refuse_other_codes(corpus, tokenizer.languages, place=f"the tokenizer {tokenizer_dir}")


def check_training_lines(
    corpus: Artifact, results: list[PairCounts], *, config: ShardsConfig, max_tokens: int
) -> None:
    """Refuse a corpus without training lines that are short enough."""
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
    # A part has no statistic of joined pairs, which would change the digests of earlier parts.
    joined = joined_lines(Artifact(corpus.directory, corpus.whole or corpus.manifest))
    return {
        "pairs": {counts.pair: counts.kept for counts in results},
        "tokens": {counts.pair: counts.tokens for counts in results if counts.kept["train"]},
        "too_long": {counts.pair: counts.too_long for counts in results},
        "too_long_sides": {counts.pair: counts.too_long_sides for counts in results},
        "unknown_share": unknown_shares(results),
        "emptied": all_emptied(corpus, results),
        "imported": imported_statistics(corpus),
        **({"joined": joined} if joined else {}),
        OTHER_LANGUAGES: sorted(listed_names(corpus, OTHER_LANGUAGES)),
    }


def unknown_shares(results: list[PairCounts]) -> dict[str, float]:
    """Return language → share of its training tokens that the vocabulary lacks."""
    tokens, unknown = Counter[str](), Counter[str]()
    for counts in results:
        tokens.update(counts.tokens)
        unknown.update(counts.unknown)
    return {code: unknown[code] / max(tokens[code], 1) for code in sorted(tokens)}


def all_emptied(corpus: Artifact, results: list[PairCounts]) -> list[str]:
    """Return the pairs that lost all training lines, here or before."""
    expected = line_counts(corpus, "train")
    newly = {one.pair for one in results if one.pair in expected and not one.kept["train"]}
    return sorted(emptied_pairs(corpus) | newly)


def summary(sharding: Sharding, results: list[PairCounts]) -> list[str]:
    """Summarize lines read, kept and too long, unknown tokens, emptied pairs, and words."""
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
    if emptied := all_emptied(corpus, results):
        lines.append(f"no training data left: {listed(emptied)}")
    if words:
        segmenters = sharding.tokenizer.segmenters
        names = (
            f"{code} {count:,} by {segmenters[language_of(code)].name}"
            for code, count in sorted(words.items())
        )
        lines.append(f"words of training lines: {listed(names)}")
    return lines


# ---------------------------------------------------------------- one pair, in a worker


def pair_folder(work_dir: Path, pair: str) -> Path:
    """Return the folder in which the shards of a pair are made."""
    return work_dir / f"{PAIR_FOLDER}{pair}"


def claim_work(work_dir: Path, *, key: str) -> None:
    """Make the run folder, or take over the folder of the shards of this key; empty any other."""
    claim_run_folder(work_dir, work="sharding")
    identity, content = work_dir / IDENTITY_FILE, to_json({"key": key})
    if not identity.exists() or identity.read_text(encoding="utf-8") != content:
        remove_pairs(work_dir)
        identity.write_text(content, encoding="utf-8")


def read_finished(folder: Path) -> FinishedPair | None:
    """Return the record of complete shards; None if they are incomplete."""
    try:
        found = _FINISHED.validate_json((folder / FINISHED_FILE).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in found.files}
    except (OSError, ValueError):
        return None
    return found if sizes == {name: entry.size for name, entry in found.files.items()} else None


def shard_pair(sharding: Sharding, job: PairWork) -> FinishedPair:
    """Make the shards of all splits of one pair."""
    if job.out_dir.exists():
        shutil.rmtree(job.out_dir)
    job.out_dir.mkdir(parents=True)
    counts = PairCounts(job.pair)
    names = [name for split in job.splits for name in shard_split(sharding, job, split, counts)]
    paths = {name: job.out_dir / name for name in sorted(names)}
    records = file_records(list(paths.values()))
    finished = FinishedPair(counts, {name: records[path] for name, path in paths.items()})
    document = unfinished_path(job.out_dir / FINISHED_FILE)
    document.write_bytes(_FINISHED.dump_json(finished))
    document.replace(job.out_dir / FINISHED_FILE)
    return finished


def shard_split(
    sharding: Sharding, job: PairWork, split: ShardSplit, counts: PairCounts
) -> list[str]:
    """Encode one split and add to the pair's counts; return the names of its files, now on disk."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                closing(
                    ShardWriter(
                        job.out_dir,
                        split=split,
                        pair=job.pair,
                        language=code,
                        size=sharding.tokenizer.size,
                        has_begins=language_of(code) in sharding.words,
                    )
                )
            )
            for code in job.pair.split("-")
        ]
        for chunk in line_pairs(sharding.corpus, job.pair, split):
            _add_chunk(sharding, split, chunk, writers=writers, counts=counts)
    return [name for writer in writers for name in writer.names]


def _add_chunk(
    sharding: Sharding,
    split: ShardSplit,
    chunk: tuple[list[str], list[str]],
    *,
    writers: list[ShardWriter],
    counts: PairCounts,
) -> None:
    """Encode lines of both sides and append them."""
    encoded = [
        _encode(sharding, lines, side=code)
        for code, lines in zip(counts.pair.split("-"), chunk, strict=True)
    ]
    lengths = (
        np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
        for sentences in encoded
    )
    too_long = [side > sharding.max_tokens for side in lengths]
    left_out = too_long[0] | too_long[1]
    counts.too_long += int(left_out.sum())
    counts.kept[split] += int(left_out.size - left_out.sum())
    for side, code in enumerate(counts.pair.split("-")):
        counts.too_long_sides[code] += int(too_long[side].sum())
        sentences, lines = encoded[side], chunk[side]
        if left_out.any():
            kept = np.flatnonzero(~left_out)
            sentences, lines = [sentences[i] for i in kept], [lines[i] for i in kept]
        tokens = writers[side].append(sentences)
        if language_of(code) in sharding.words:
            words = writers[side].append_begins(_begins(sharding, lines, side=code))
            if split == "train":  # a white space begins a word for the model, and is none
                words -= sum(len(line) - len("".join(line.split())) for line in lines)
                counts.words[code] = counts.words.get(code, 0) + words
        if split == "train":
            counts.tokens[code] += len(tokens)
            counts.unknown[code] += int(np.count_nonzero(tokens == sharding.tokenizer.unk_id))


def _encode(sharding: Sharding, lines: list[str], *, side: str) -> list[list[int]]:
    tokenizer = sharding.tokenizer
    encoded = tokenizer.encode_batch(lines, language=language_of(side))
    if side.endswith(BACK_TRANSLATED):
        encoded = [[tokenizer.bos_id, *ids] for ids in encoded]
    return encoded


def _begins(sharding: Sharding, lines: list[str], *, side: str) -> list[npt.NDArray[np.bool_]]:
    """Return for each stored token whether it begins a word; a tag begins none."""
    begins = sharding.words.begins(language_of(side), lines)
    if side.endswith(BACK_TRANSLATED):
        begins = [np.insert(of_line, 0, False) for of_line in begins]
    return begins


def line_pairs(
    corpus: Artifact, pair: str, split: ShardSplit
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield chunks of both sides' lines, aligned by number, without white space around them."""
    first: list[str] = []
    second: list[str] = []
    characters = 0
    paths = (corpus.file(text_name(split, pair, code)) for code in pair.split("-"))
    for one, other in aligned_lines(*paths):
        first.append(one.strip())
        second.append(other.strip())
        characters += len(one) + len(other)
        if len(first) >= CHUNK_LINES or characters >= CHUNK_CHARACTERS:
            yield first, second
            first, second, characters = [], [], 0
    if first:
        yield first, second


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("make_shards"))
