"""The nearest training neighbour is that of a brute-force search."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import make_corpus

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_hypotheses
from pipeline.errors import ArtifactError
from pipeline.evaluation.nearest_neighbor import NO_NEIGHBOR, nearest_lines, retrieve_all


def trigrams(line: str) -> Counter[str]:
    text = f" {' '.join(line.casefold().split())} "
    return Counter(text[start : start + 3] for start in range(len(text) - 2))


def brute_force_similarities(lines: list[str], query: str) -> list[float]:
    """TF-IDF cosine of the query with every line, from dictionaries."""
    grams = [trigrams(line) for line in lines]
    frequency = Counter(gram for found in grams for gram in found)

    def vector(counts: Counter[str]) -> dict[str, float]:
        weights = {
            gram: (1 + math.log(count)) * (math.log((1 + len(lines)) / (1 + frequency[gram])) + 1)
            for gram, count in counts.items()
        }
        norm = math.sqrt(sum(weight**2 for weight in weights.values()))
        return {gram: weight / norm for gram, weight in weights.items()}

    wanted = vector(trigrams(query))
    return [
        sum(weight * wanted.get(gram, 0.0) for gram, weight in vector(found).items())
        for found in grams
    ]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


texts = st.lists(st.text(alphabet="abcÄß 中文\u2028", max_size=12), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(lines=texts, queries=texts, block_lines=st.integers(1, 5))
def test_the_neighbour_has_the_largest_cosine_of_all_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], queries: list[str], block_lines: int
) -> None:
    path = written(tmp_path_factory.mktemp("lines") / "train.txt", lines)
    found = nearest_lines(path, queries, block_lines=block_lines)
    assert found.tolist() == nearest_lines(path, queries).tolist()
    for query, line in zip(queries, found.tolist(), strict=True):
        similarities = brute_force_similarities(lines, query)
        if line == NO_NEIGHBOR:
            assert max(similarities) == 0
        else:
            assert similarities[line] == pytest.approx(max(similarities))
            assert similarities[line] > 0


def test_equal_lines_are_answered_by_the_first_of_them(tmp_path: Path) -> None:
    generator = random.Random(1)
    words = ["river", "mountain", "house", "winter", "bread", "stone"]
    lines = [" ".join(generator.choices(words, k=5)) for _ in range(40)]
    lines = [*lines, *lines]
    path = written(tmp_path / "train.txt", lines)
    expected = [lines.index(line) for line in lines]
    for block_lines in (7, 1000):
        assert nearest_lines(path, lines, block_lines=block_lines).tolist() == expected


def corpus(tmp_path: Path, *, german: list[str], english: list[str]) -> Artifact:
    tests = {
        "de-en": {"de": ["Guten Abend!", "中文"], "en": ["Good evening!", "Chinese"]},
        "de-fr": {"de": ["Guten Morgen!"], "fr": ["Bonjour !"]},
    }
    train = {"de-en": {"de": german, "en": english}}
    return make_corpus(tmp_path / "corpus", {"train": train, "test": tests})


def retrieved(tmp_path: Path, source: Artifact) -> Artifact:
    return retrieve_all(tmp_path / "translations", source, training=source)


def texts_of(translations: Artifact, source: str, target: str) -> list[str]:
    return [one.text for one in read_hypotheses(translations, Direction(source, target))]


def test_a_test_line_is_answered_with_its_neighbours_translation(tmp_path: Path) -> None:
    made = corpus(
        tmp_path,
        german=["Auf Wiedersehen", "GUTEN  ABEND", "Gute Nacht"],
        english=["Goodbye", "Good evening to you", "Good night"],
    )
    translations = retrieved(tmp_path, made)
    assert texts_of(translations, "de", "en")[0] == "Good evening to you"
    assert texts_of(translations, "en", "de")[0] == "GUTEN  ABEND"


def test_lines_without_a_neighbour_and_zero_shot_lines_are_copied(tmp_path: Path) -> None:
    made = corpus(tmp_path, german=["Auf Wiedersehen"], english=["Goodbye"])
    translations = retrieved(tmp_path, made)
    assert texts_of(translations, "de", "en")[1] == "中文"
    assert texts_of(translations, "de", "fr") == ["Guten Morgen!"]
    assert texts_of(translations, "fr", "de") == ["Bonjour !"]


def test_a_target_side_that_is_too_short_is_refused(tmp_path: Path) -> None:
    made = corpus(tmp_path, german=["Auf Wiedersehen", "Guten Abend"], english=["Goodbye"])
    with pytest.raises(ArtifactError, match="differ in their number of lines"):
        retrieved(tmp_path, made)
