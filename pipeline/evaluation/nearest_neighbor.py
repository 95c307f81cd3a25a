"""A baseline: translate each test line by its nearest training line.

- Nearest is the largest cosine between TF-IDF vectors of character trigrams of the source sides: it
  needs no tokenizer, works in every script, and finds inflected forms.
- Term weights are (1 + ln count) · idf with idf = ln((1 + N) / (1 + df)) + 1 over the N training
  lines; text is case-folded, its whitespace single, with a space at either end.
- Ties go to the lowest line number. A line that shares no trigram with the training lines, and
  every line of a direction without training lines, is answered with the source line itself: a name
  or a number may be right as it stands, while an unrelated sentence never is.
- Training lines are read in blocks: memory does not grow with the corpus.

Legend: G trigrams of the training lines, N trigrams of some lines, P trigrams of a block.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.corpus import (
    Direction,
    Hypothesis,
    aligned_lines,
    directions,
    hypotheses_name,
    iterate_lines,
    line_counts,
    read_lines,
    text_name,
    write_hypotheses,
)
from pipeline.distributed.process import track

NEAREST_NEIGHBOR = "nearest neighbor"  # name of the baseline among the systems
BLOCK_LINES = 65_536
NO_NEIGHBOR = -1
NO_TRIGRAM = np.iinfo(np.int64).max  # last of the sorted trigrams, gives every search a place

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def retrieve_all(directory: Path, corpus: Artifact, *, training: Artifact) -> Artifact:
    """Translate all test lines of a corpus and write them as translations."""
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
    codes = (direction.source, direction.target)
    paths = [training.file(text_name("train", direction.pair, code)) for code in codes]
    neighbors = nearest_lines(paths[0], queries).tolist()
    wanted = {*neighbors}
    lines = enumerate(aligned_lines(*paths))
    found = {line: target for line, (_, target) in lines if line in wanted}
    return [found.get(line, query) for query, line in zip(queries, neighbors, strict=True)]


def nearest_lines(path: Path, queries: list[str], *, block_lines: int = BLOCK_LINES) -> Integers:
    """Find the line, counted from 0, that is most similar to each query: (queries,).

    It is NO_NEIGHBOR if no line shares a trigram. ``block_lines`` changes memory, not the result.
    """
    keys_G, frequency_G, total = _document_frequencies(path, block_lines)

    def weigh(lines: list[str]) -> tuple[Integers, Integers, Floats]:
        """Return line, place among all trigrams (-1: unknown) and weight of every trigram."""
        line_N, key_N, count_N = count_trigrams(lines)
        place_N = np.searchsorted(keys_G, key_N)
        known_N = keys_G[place_N] == key_N
        inverse_N = np.log((1 + total) / (1 + np.where(known_N, frequency_G[place_N], 0))) + 1
        return line_N, np.where(known_N, place_N, -1), (1 + np.log(count_N)) * inverse_N

    query_N, gram_N, weight_N = weigh(queries)
    bounds = np.searchsorted(query_N, np.arange(len(queries) + 1))
    best = np.full(len(queries), NO_NEIGHBOR, dtype=np.int64)
    similarity = np.zeros(len(queries))
    start = 0
    for block in _blocks(path, block_lines):
        line_P, posting_P, share_P = weigh(block)
        share_P /= np.sqrt(np.bincount(line_P, share_P**2, minlength=len(block)))[line_P]
        kept = np.flatnonzero(np.isin(posting_P, gram_N))
        kept = kept[np.argsort(posting_P[kept], kind="stable")]
        line_P, posting_P, share_P = line_P[kept], posting_P[kept], share_P[kept]
        first_N, end_N = (np.searchsorted(posting_P, gram_N, side) for side in ("left", "right"))
        for query in range(len(queries)):
            # The order of addition depends only on the query: equal lines score exactly the same.
            scores = np.zeros(len(block))
            for own in range(bounds[query], bounds[query + 1]):
                postings = slice(first_N[own], end_N[own])
                scores[line_P[postings]] += weight_N[own] * share_P[postings]
            line = int(scores.argmax())
            if scores[line] > similarity[query]:
                best[query], similarity[query] = start + line, scores[line]
        start += len(block)
    return best


def _document_frequencies(path: Path, block_lines: int) -> tuple[Integers, Integers, int]:
    """Return all trigrams, sorted, the number of lines that contain each, and of all lines."""
    keys_G, frequency_G = np.array([NO_TRIGRAM]), np.zeros(1, dtype=np.int64)
    total = 0
    for block in _blocks(path, block_lines):
        _, key_N, _ = count_trigrams(block)
        new, counts = np.unique(key_N, return_counts=True)
        keys_G, places = np.unique(np.concatenate([keys_G, new]), return_inverse=True)
        frequency_G = np.bincount(places, np.concatenate([frequency_G, counts])).astype(np.int64)
        total += len(block)
    return keys_G, frequency_G, total


def count_trigrams(lines: list[str]) -> tuple[Integers, Integers, Integers]:
    """Return line, trigram and count of the distinct character trigrams of every line, in order.

    A trigram is three code points in 21 bits each.
    """
    texts = [f" {' '.join(line.casefold().split())} " for line in lines]
    points = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4").astype(np.int64)
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    whole = owners[: len(points) - 2] == owners[2:]
    packed = (points[:-2] << 42 | points[1:-1] << 21 | points[2:])[whole]
    vocabulary, ids = np.unique(packed, return_inverse=True)
    size = max(len(vocabulary), 1)
    codes, counts = np.unique(owners[:-2][whole] * size + ids, return_counts=True)
    return codes // size, vocabulary[codes % size], counts.astype(np.int64)


def _blocks(path: Path, size: int) -> Iterator[list[str]]:
    lines = iterate_lines(path)
    while block := list(islice(lines, size)):
        yield block
