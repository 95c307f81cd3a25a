"""A baseline: translate each test line by its nearest training line.

- Nearest is the largest cosine between TF-IDF vectors of character trigrams of the source sides: it
  needs no tokenizer, works in every script, and finds inflected forms.
- Term weights are (1 + ln count) · idf with idf = ln((1 + N) / (1 + df)) + 1 over the N training
  lines; text is case-folded, its whitespace single, with a space at either end.
- Ties go to the lowest line number. A line that shares no trigram with the training lines, and
  every line of a direction without training lines, is answered with the source line itself: a name
  or a number may be right as it stands, while an unrelated sentence never is.
- Training lines are read in blocks, so that memory does not grow with the corpus.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.corpus import (
    Direction,
    Hypothesis,
    directions,
    hypotheses_name,
    iterate_lines,
    line_counts,
    read_lines,
    text_name,
    write_hypotheses,
)
from pipeline.errors import ArtifactError
from pipeline.terminal import track

NEAREST_NEIGHBOR = "nearest neighbor"
"""Name of the baseline among the systems."""
BLOCK_LINES = 65_536
NO_NEIGHBOR = -1

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def retrieve_all(directory: Path, corpus: Artifact, *, training: Artifact) -> Artifact:
    """Translate all test lines and write them as translations.

    Args:
        directory: of the translations.
        corpus: with the test lines.
        training: with the training lines.
    """
    with new_artifact(
        directory, kind="translations", stage="evaluate", config={}, inputs={}
    ) as writer:
        for direction in track(directions(corpus, "test"), label=NEAREST_NEIGHBOR):
            texts = retrieve(corpus, direction, training=training)
            path = writer.path(hypotheses_name(direction))
            write_hypotheses(path, [Hypothesis(text) for text in texts])
    return open_artifact(directory, kind="translations")


def retrieve(corpus: Artifact, direction: Direction, *, training: Artifact) -> list[str]:
    """Return the target side of every test line's nearest training neighbor in a direction."""
    queries = read_lines(corpus, "test", direction.pair, direction.source)
    if direction.pair not in line_counts(training, "train"):
        return queries
    source_path = training.file(text_name("train", direction.pair, direction.source))
    neighbors = nearest_lines(source_path, queries)
    wanted = {int(line) for line in neighbors if line != NO_NEIGHBOR}
    target_path = training.file(text_name("train", direction.pair, direction.target))
    found = {line: text for line, text in enumerate(iterate_lines(target_path)) if line in wanted}
    if missing := wanted - found.keys():
        raise ArtifactError(
            f"{target_path} has no line {min(missing) + 1} though {source_path} has. "
            "Run the stage that made this corpus again."
        )
    return [
        query if line == NO_NEIGHBOR else found[int(line)]
        for query, line in zip(queries, neighbors, strict=True)
    ]


def nearest_lines(path: Path, queries: list[str], *, block_lines: int = BLOCK_LINES) -> Integers:
    """Find the line, counted from 0, that is most similar to each query.

    Args:
        path: text file, one line each.
        queries: lines to look up.
        block_lines: lines indexed at a time; changes memory, not the result.

    Returns:
        (queries,) line numbers, NO_NEIGHBOR where no line shares a trigram.
    """
    frequencies = DocumentFrequencies()
    for block in _blocks(path, block_lines):
        frequencies.add(count_trigrams(block))
    query_grams = count_trigrams(queries)
    query_ids, known = frequencies.identify(query_grams.keys)
    query_weights = frequencies.weights(query_grams)
    bounds = np.searchsorted(query_grams.lines, np.arange(len(queries) + 1))
    wanted = np.unique(query_ids[known])
    best = np.full(len(queries), NO_NEIGHBOR, dtype=np.int64)
    similarity = np.zeros(len(queries))
    start = 0
    for block in _blocks(path, block_lines):
        index = InvertedIndex.build(count_trigrams(block), frequencies=frequencies, wanted=wanted)
        for query in range(len(queries)):
            own = slice(bounds[query], bounds[query + 1])
            ids, weights = query_ids[own][known[own]], query_weights[own][known[own]]
            scores = index.scores(ids, weights, lines=len(block))
            line = int(scores.argmax())
            if scores[line] > similarity[query]:
                best[query], similarity[query] = start + line, scores[line]
        start += len(block)
    return best


@dataclass(frozen=True)
class TrigramCounts:
    """The distinct trigrams of every line, by line and then key; three arrays of one length."""

    lines: Integers
    keys: Integers
    """Trigrams: three code points in 21 bits each."""
    counts: Integers
    num_lines: int


def count_trigrams(lines: list[str]) -> TrigramCounts:
    """Count the character trigrams of every line."""
    texts = [f" {' '.join(line.casefold().split())} " for line in lines]
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    points = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4").astype(np.int64)
    owners = np.repeat(np.arange(len(texts)), lengths)
    whole = owners[: len(points) - 2] == owners[2:]
    packed = points[:-2] << 42 | points[1:-1] << 21 | points[2:]
    vocabulary, ids = np.unique(packed[whole], return_inverse=True)
    size = max(len(vocabulary), 1)
    codes, counts = np.unique(owners[:-2][whole] * size + ids, return_counts=True)
    return TrigramCounts(
        lines=codes // size,
        keys=vocabulary[codes % size],
        counts=counts.astype(np.int64),
        num_lines=len(lines),
    )


@dataclass
class DocumentFrequencies:
    """The number of training lines that contain each trigram."""

    keys: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Sorted trigrams; the index of a key is its id."""
    counts: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_lines: int = 0

    def add(self, grams: TrigramCounts) -> None:
        """Count another block of lines."""
        keys, counts = np.unique(grams.keys, return_counts=True)
        merged, places = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
        totals = np.zeros(len(merged), dtype=np.int64)
        np.add.at(totals, places, np.concatenate([self.counts, counts]))
        self.keys, self.counts = merged, totals
        self.num_lines += grams.num_lines

    def identify(self, keys: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return the id of every key, and whether the training lines contain it."""
        ids = np.searchsorted(self.keys, keys)
        known = ids < len(self.keys)
        known[known] = self.keys[ids[known]] == keys[known]
        return ids, known

    def weights(self, grams: TrigramCounts) -> Floats:
        """Return the TF-IDF weight of every (line, trigram), before normalization."""
        ids, known = self.identify(grams.keys)
        frequency = np.zeros(len(ids))
        frequency[known] = self.counts[ids[known]]
        inverse = np.log((1 + self.num_lines) / (1 + frequency)) + 1
        weights: Floats = (1 + np.log(grams.counts)) * inverse
        return weights


@dataclass(frozen=True)
class InvertedIndex:
    """Trigram id → the lines of a block that contain it, with their normalized weights."""

    ids: Integers
    """Sorted; the postings of ``ids[i]`` are ``starts[i]`` to ``starts[i + 1]``."""
    starts: Integers
    lines: Integers
    weights: Floats

    @classmethod
    def build(
        cls, grams: TrigramCounts, *, frequencies: DocumentFrequencies, wanted: Integers
    ) -> "InvertedIndex":
        """Index a block of training lines under the trigrams that queries ask for."""
        weights = frequencies.weights(grams)
        norms = np.sqrt(np.bincount(grams.lines, weights**2, minlength=grams.num_lines))
        weights /= norms[grams.lines]
        ids, _ = frequencies.identify(grams.keys)
        kept = np.flatnonzero(np.isin(ids, wanted))
        kept = kept[np.argsort(ids[kept], kind="stable")]
        starts = np.append(np.searchsorted(ids[kept], wanted), len(kept))
        return cls(ids=wanted, starts=starts, lines=grams.lines[kept], weights=weights[kept])

    def scores(self, ids: Integers, weights: Floats, *, lines: int) -> Floats:
        """Return the similarity of every line of the block to a query, up to the query's norm.

        The order of addition depends on the query alone, so that equal lines score exactly the
        same.
        """
        scores = np.zeros(lines)
        for place, weight in zip(np.searchsorted(self.ids, ids), weights, strict=True):
            postings = slice(self.starts[place], self.starts[place + 1])
            scores[self.lines[postings]] += weight * self.weights[postings]
        return scores


def _blocks(path: Path, size: int) -> Iterator[list[str]]:
    lines = iterate_lines(path)
    while block := list(islice(lines, size)):
        yield block
