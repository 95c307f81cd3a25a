"""Directions stand in the family that the training corpus puts them in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import writing

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.scores import (
    Floats,
    LineCount,
    LineStatistics,
    Score,
    TranslatedLines,
    describe_directions,
    find_pivot,
)


def corpus(
    tmp_path: Path, pairs: dict[str, dict[str, int]], *, emptied: Sequence[str] = ()
) -> Artifact:
    with writing(tmp_path / "corpus", "corpus") as writer:
        writer.statistics |= {"pairs": pairs, "emptied": list(emptied)}
    return open_artifact(tmp_path / "corpus", kind="corpus")


@pytest.mark.parametrize(
    ("pairs", "pivot"),
    [
        ({"de-en", "en-fr", "en-zh"}, "en"),
        ({"de-fr", "fr-zh"}, "fr"),
        ({"de-en", "en-fr", "de-fr"}, None),
        ({"de-en"}, "en"),
        ({"de-fr"}, None),
        (set(), None),
    ],
)
def test_the_pivot_is_the_language_of_every_training_pair(
    pairs: set[str], pivot: str | None
) -> None:
    assert find_pivot(pairs) == pivot


def test_directions_are_sorted_into_families_by_the_training_lines_of_their_pair(
    tmp_path: Path,
) -> None:
    pairs = {
        "de-en": {"train": 9, "test": 2},
        "en-fr": {"train": 3, "test": 2},
        "de-fr": {"train": 0, "test": 1},
        "en-yi": {"train": 5},
    }
    profiles = describe_directions(corpus(tmp_path, pairs), thresholds=(3, 9))
    assert {str(one.direction): (one.family, one.resource, one.test_lines) for one in profiles} == {
        "de-en": ("into_pivot", "high", 2),
        "de-fr": ("zero_shot", None, 1),
        "en-de": ("out_of_pivot", "high", 2),
        "en-fr": ("out_of_pivot", "low", 2),
        "fr-de": ("zero_shot", None, 1),
        "fr-en": ("into_pivot", "low", 2),
    }


def test_a_pair_that_lost_its_training_lines_is_no_zero_shot_pair(tmp_path: Path) -> None:
    both = {"train": 9, "test": 2}
    pairs = {"de-en": both, "de-fr": {"test": 1}, "en-fr": {"train": 0, "test": 1}}
    made = corpus(tmp_path, pairs, emptied=["en-fr"])
    profiles = describe_directions(made, thresholds=(3, 9))
    assert {str(one.direction): one.family for one in profiles} == {
        **{"de-en": "into_pivot", "en-de": "out_of_pivot"},
        **{"de-fr": "zero_shot", "fr-de": "zero_shot", "en-fr": "emptied", "fr-en": "emptied"},
    }
    assert {one.resource for one in profiles if one.family == "emptied"} == {None}


def test_a_direction_trained_on_translations_alone_is_not_zero_shot_and_its_reverse_is(
    tmp_path: Path,
) -> None:
    both = {"train": 9, "test": 2}
    pairs = {"de-en": both, "en-fr": both, "de+back-fr": {"train": 4}, "de-fr": {"test": 2}}
    profiles = describe_directions(corpus(tmp_path, pairs), thresholds=(3, 9))
    families = {str(one.direction): one.family for one in profiles}
    assert families["de-fr"] == "other"
    assert families["fr-de"] == "zero_shot"


def test_families_come_from_the_corpus_that_was_trained_on(tmp_path: Path) -> None:
    for name in ("tests", "training"):
        (tmp_path / name).mkdir()
    tests = corpus(tmp_path / "tests", {"de-en": {"train": 0, "test": 2}, "de-fr": {"test": 2}})
    pairs = {"de-en": {"train": 9}, "en-fr": {"train": 3}, "de-fr": {"test": 7}}
    training = corpus(tmp_path / "training", pairs)
    profiles = describe_directions(tests, thresholds=(3, 9), training=training)
    assert [(str(one.direction), one.family, one.resource, one.test_lines) for one in profiles] == [
        ("de-en", "into_pivot", "high", 2),
        ("de-fr", "zero_shot", None, 2),
        ("en-de", "out_of_pivot", "high", 2),
        ("fr-de", "zero_shot", None, 2),
    ]
    assert {one.family for one in describe_directions(tests, thresholds=(3, 9))} == {"unknown"}


def test_machine_translations_count_apart_for_the_direction_that_they_train(tmp_path: Path) -> None:
    pairs = {
        "de-en": {"train": 9, "test": 2},
        "de-fr": {"test": 1},
        "de+back-en": {"train": 50},
        "de-fr+distilled": {"train": 7},
        "de-fr+back": {"train": 30},
    }
    profiles = describe_directions(corpus(tmp_path, pairs), thresholds=(3, 9))
    assert {str(one.direction): (one.training_lines, one.synthetic_lines) for one in profiles} == {
        **{"de-en": (9, 50), "en-de": (9, 0), "de-fr": (0, 7), "fr-de": (0, 30)}
    }


class OddScore(Score):
    """Returns what a test wants."""

    def __init__(self, statistics: object = None, sums: object = None) -> None:
        self.statistics, self.sums = statistics, sums

    def line_statistics(self, lines: TranslatedLines) -> Any:  # noqa: ARG002 (one signature)
        return self.statistics

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Any:  # noqa: ARG002 (one signature)
        return self.sums


@pytest.mark.parametrize(
    "statistics",
    [
        *(None, np.ones((2, 1)), LineStatistics(np.ones((1, 1)))),
        LineStatistics([[1], [2]]),  # type: ignore[arg-type]
        LineStatistics(np.array([["1"], ["2"]])),
        LineStatistics(np.array([[1.0], [np.nan]])),
    ],
)
def test_a_score_without_statistics_of_every_line_is_named(statistics: object) -> None:
    lines = TranslatedLines(Direction("de", "en"), ["a", "b"], ["a", "b"], [])
    with pytest.raises(ConfigError, match=r"OddScore returned no LineStatistics .* in 2 rows"):
        OddScore(statistics).checked_statistics(lines)


@pytest.mark.parametrize("sums", [None, 3.0, np.ones((1, 2)), np.array([np.nan])])
def test_a_score_that_is_no_number_is_named(sums: object) -> None:
    with pytest.raises(ConfigError, match="of_sums of OddScore returned no finite number"):
        OddScore(sums=sums).of_corpus(np.ones((2, 1)))


@pytest.mark.parametrize("sums", [np.ones(1), np.array([1.0, 2.0, np.inf])])
def test_a_score_that_is_not_a_number_per_draw_is_named(sums: object) -> None:
    """One number for all draws would make every interval a point."""
    with pytest.raises(ConfigError, match="of_sums of OddScore returned no finite number"):
        OddScore(sums=sums).of_draws(np.ones((3, 1)), lines=2)
