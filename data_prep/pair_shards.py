"""Make the shards of one pair, in a worker: an interrupted stage can keep them.

A worker reads both sides in step, in chunks: memory does not grow with the number of lines. A
back-translated source begins with the tag ``<s>``, which every vocabulary has and no text encodes
to (Caswell and others, Tagged Back-Translation, 2019, arXiv 1906.06442).

Each pair has a folder in the run folder of the output. ``finished.json`` is written last, when all
other files there are on disk.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from pipeline.artifacts.artifact import Artifact, FileRecord, to_json
from pipeline.artifacts.corpus import BACK_TRANSLATED, aligned_lines, language_of, text_name
from pipeline.artifacts.digests import file_records
from pipeline.artifacts.run_folders import claim_run_folder, remove_files
from pipeline.artifacts.segmenters import Segmenters
from pipeline.artifacts.shards import ShardWriter
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.config.documents import unfinished_path

CHUNK_LINES = 512
"""Lines encoded at a time. SentencePiece is fastest with few: their ids stay in the cache."""
CHUNK_CHARACTERS = 2**22
"""Characters of both sides encoded at a time; a chunk ends with the line that reaches a limit."""

IDENTITY_FILE = "sharding.json"
"""File with the key of the shards that the run folder belongs to."""
FINISHED_FILE = "finished.json"
_PAIR_FOLDER = "pair."

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


def pair_folder(work_dir: Path, pair: str) -> Path:
    """Return the folder in which the shards of a pair are made."""
    return work_dir / f"{_PAIR_FOLDER}{pair}"


def claim_work(work_dir: Path, *, key: str) -> None:
    """Make the run folder, or take over the folder of the same shards; others are emptied first.

    Args:
        work_dir: Run folder.
        key: Key of the shards to make.

    Raises:
        ArtifactError: Another folder is in the way.
    """
    claim_run_folder(work_dir, work="sharding")
    identity, content = work_dir / IDENTITY_FILE, to_json({"key": key})
    if not identity.exists() or identity.read_text(encoding="utf-8") != content:
        _remove_pairs(work_dir)
        identity.write_text(content, encoding="utf-8")


def remove_work(work_dir: Path) -> None:
    """Remove the run folder: its shards are all part of the artifact."""
    _remove_pairs(work_dir)
    remove_files(work_dir, [IDENTITY_FILE])


def _remove_pairs(work_dir: Path) -> None:
    for folder in work_dir.glob(f"{_PAIR_FOLDER}*"):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)


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
    """Encode one split, both sides in step, and add to the pair's counts; return names of files.

    The files are on disk.

    Raises:
        ArtifactError: The sides differ in their number of lines.
    """
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
            if split == "train":
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
    """Yield chunks of both sides' lines, aligned by number.

    Raises:
        ArtifactError: One side ends before the other.
    """
    first: list[str] = []
    second: list[str] = []
    characters = 0
    paths = (corpus.file(text_name(split, pair, code)) for code in pair.split("-"))
    for one, other in aligned_lines(*paths):
        first.append(one)
        second.append(other)
        characters += len(one) + len(other)
        if len(first) >= CHUNK_LINES or characters >= CHUNK_CHARACTERS:
            yield first, second
            first, second, characters = [], [], 0
    if first:
        yield first, second
