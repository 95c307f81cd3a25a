"""Stage shortlist: list for every piece of the sources the pieces it is likely translated by.

Reads shards. Makes a shortlist, which ``decoding.shortlist`` names: beam search then considers only
the listed pieces of a sentence (:mod:`pipeline.decoding.listed_outputs`).

The probability t(target piece | source piece) is that of IBM Model 1 (Brown and others, 1993),
without an empty source word: common target pieces are listed for every sentence anyway. It is
learned from the sentences of a pair in which pieces occur for the first times: that covers the
vocabulary with few sentences. Memory does not grow with the corpus.

Legend: P positions of the target, L links (a source and a target position of one sentence), K
listed pieces.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, directions_of, is_synthetic, line_counts
from pipeline.artifacts.settings import ShortlistConfig
from pipeline.artifacts.shards import Shard, Tokens, open_shard
from pipeline.artifacts.shortlist import COMMON, NO_PIECE, SHORTLIST_NAME, direction_name
from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import DataError
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed, track

MAX_SENTENCES = 2**20
"""First sentences of a pair that are looked at."""

MAX_LINKS = 2**24
"""Links from which the probabilities of a pair are learned."""

ITERATIONS = 5
"""Iterations of expectation and maximization."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lists:
    """Listed pieces of a direction, as ``artifacts/shortlist.py`` stores them."""

    direction: Direction
    rows: npt.NDArray[np.int32]
    sentences: int
    """Sentences that the probabilities were learned from."""


def run(call: StageCall) -> None:
    """List the likely translations of every piece in both directions of every pair."""
    shards, config = call.artifacts["shards"], call.recipe.shortlist
    pairs = [
        pair for pair in line_counts(shards, "train") if not any(map(is_synthetic, pair.split("-")))
    ]
    if not pairs:
        raise DataError(
            f"{shards.directory} has no training lines that people wrote. Name other shards."
        )
    with call.new_artifact() as writer:
        fingerprint = load_tokenizer(tokenizer_folder(shards)).fingerprint
        document = {"tokenizer": fingerprint, "translations": config.translations}
        writer.write_json(SHORTLIST_NAME, document)
        counts: dict[str, dict[str, int]] = {}
        with open_pool(call.processes, mpi=call.mpi, shared=(shards, config)) as pool:
            found = pool.map(with_shared(list_pair), pairs)
            for lists in track(found, total=len(pairs), label="shortlist"):
                for one in lists:
                    writer.path(direction_name(one.direction)).write_bytes(one.rows.tobytes())
                    pieces = len({*one.rows[:, 0].tolist()} - {COMMON})
                    counts[str(one.direction)] = {"sentences": one.sentences, "pieces": pieces}
        writer.statistics["directions"] = counts
        writer.summary.append(
            f"up to {counted(config.translations, 'translation')} of a piece listed in "
            f"{counted(len(counts), 'direction')}: {listed(counts)}"
        )


def list_pair(shared: tuple[Artifact, ShortlistConfig], pair: str) -> list[Lists]:
    """List both directions of a pair."""
    shards, config = shared
    sides = {
        code: beginning(open_shard(shards, "train", pair, code), sentences=MAX_SENTENCES)
        for code in pair.split("-")
    }
    chosen = covering_sentences(list(sides.values()), max_links=MAX_LINKS)
    found = []
    for direction in directions_of(pair):
        source, target = sides[direction.source], sides[direction.target]
        rows = likeliest(*translation_probabilities(source, target, chosen), config.translations)
        common = most_frequent(target, config.common)
        found.append(Lists(direction, stored(rows, common, config.translations), len(chosen)))
    return found


def beginning(side: Shard, *, sentences: int) -> Shard:
    """Return the first sentences of a side."""
    offsets = side.offsets[: sentences + 1]
    return Shard(side.tokens[: offsets[-1]], offsets)


def covering_sentences(sides: Sequence[Shard], *, max_links: int) -> Integers:
    """Return sentences whose links fit a limit, ascending; at least one if any has links.

    Those in which a piece of either side occurs for the first time come first, then those with a
    second occurrence, and so on.
    """
    lengths = [np.diff(side.offsets) for side in sides]
    links = lengths[0] * lengths[1]
    first = np.full(len(links), np.iinfo(np.int64).max)
    for side, length in zip(sides, lengths, strict=True):
        occurrence = occurrences(side.tokens)
        full = np.flatnonzero(length)
        if len(full):
            earliest = np.minimum.reduceat(occurrence, side.offsets[:-1][full])
            first[full] = np.minimum(first[full], earliest)
    order = np.lexsort((np.arange(len(links)), first))
    order = order[links[order] > 0]
    fitting = int(np.searchsorted(np.cumsum(links[order]), max_links, side="right"))
    return np.sort(order[: max(fitting, 1)])


def occurrences(tokens: Tokens) -> Integers:
    """Return how often each token has occurred before."""
    order = np.argsort(tokens, kind="stable")
    ordered = tokens[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] + 1))
    counts = np.diff(begins, append=len(ordered))
    found = np.empty(len(tokens), np.int64)
    found[order] = np.arange(len(ordered)) - np.repeat(begins, counts)
    return found


def translation_probabilities(
    source: Shard, target: Shard, chosen: Integers
) -> tuple[Integers, Integers, Floats]:
    """Learn IBM Model 1 from sentences; return source pieces, target pieces and probabilities.

    Entries are sorted by source and target piece; those of a source piece sum to 1.
    """
    size = 1 + max(int(side.tokens.max(initial=0)) for side in (source, target))
    source_lengths = np.diff(source.offsets)[chosen]
    target_lengths = np.diff(target.offsets)[chosen]
    links_P = np.repeat(source_lengths, target_lengths)
    begin_P = np.cumsum(links_P) - links_P
    target_P = target.tokens[spans(target.offsets[chosen], target_lengths)].astype(np.int64)
    from_L = spans(np.repeat(source.offsets[chosen], target_lengths), links_P)
    key_L = source.tokens[from_L].astype(np.int64) * size + np.repeat(target_P, links_P)
    del from_L
    keys, entry_L = np.unique(key_L, return_inverse=True)
    del key_L
    entry_L = entry_L.astype(np.int32)
    of_source = keys // size
    probability = np.ones(len(keys))
    for _ in range(ITERATIONS):
        share_L = probability[entry_L]
        share_L /= np.repeat(np.add.reduceat(share_L, begin_P), links_P)
        expected = np.bincount(entry_L, share_L, minlength=len(keys))
        probability = expected / np.bincount(of_source, expected)[of_source]
    return of_source, keys % size, probability


def spans(begins: Integers, lengths: Integers) -> Integers:
    """Return begin, begin + 1, … of every span, one span behind the other."""
    before = np.cumsum(lengths) - lengths
    found: Integers = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return found


def likeliest(
    sources: Integers, targets: Integers, probability: Floats, count: int
) -> dict[int, Integers]:
    """Return source piece → its likeliest target pieces, likeliest first."""
    order = np.lexsort((targets, -probability, sources))
    pieces, begins, counts = np.unique(sources, return_index=True, return_counts=True)
    ends = begins + np.minimum(counts, count)
    ordered = targets[order]
    found = zip(pieces.tolist(), begins, ends, strict=True)
    return {piece: ordered[begin:end] for piece, begin, end in found}


def most_frequent(side: Shard, count: int) -> Integers:
    """Return the most frequent pieces of a side, most frequent first."""
    frequency = np.bincount(side.tokens)
    order: Integers = np.argsort(-frequency, kind="stable")
    return order[: min(count, int(np.count_nonzero(frequency)))]


def stored(lists: dict[int, Integers], common: Integers, width: int) -> npt.NDArray[np.int32]:
    """Return the lists in rows of 1 + ``width`` numbers, as ``artifacts/shortlist.py`` says."""
    wholes = -(-len(common) // width)
    rows = np.full((wholes + len(lists), 1 + width), NO_PIECE, "<i4")
    rows[:wholes, 0] = COMMON
    for row in range(wholes):
        part = common[row * width : (row + 1) * width]
        rows[row, 1 : 1 + len(part)] = part
    for row, (piece, of) in enumerate(lists.items(), start=wholes):
        rows[row, 0] = piece
        rows[row, 1 : 1 + len(of)] = of
    return rows


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("shortlist"))
