"""Corpora are read line by line and pair by pair, translations as they were written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpora import writing

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, Kind, open_artifact
from pipeline.artifacts.corpus import (
    Direction,
    Hypothesis,
    Split,
    directions,
    emptied_pairs,
    hypotheses_name,
    imported_lines,
    iterate_lines,
    languages,
    line_counts,
    pair_name,
    read_hypotheses,
    read_lines,
    resource_of,
    text_name,
    tiers_of,
    write_hypotheses,
)
from pipeline.errors import ArtifactError

HARD_LINES = ["a\u2028b", "vertical\vtab", "form\ffeed\x85", "carriage\r", "", " spaces ", "日本"]
"""What str.splitlines and universal newlines would take apart, or strip."""


def artifact(tmp_path: Path, kind: Kind, fill: Callable[[ArtifactWriter], None]) -> Artifact:
    with writing(tmp_path / kind, kind) as writer:
        fill(writer)
    return open_artifact(tmp_path / kind, kind=kind)


def corpus(tmp_path: Path, pairs: dict[str, dict[str, int]]) -> Artifact:
    return artifact(tmp_path, "corpus", lambda writer: writer.statistics.update(pairs=pairs))


def test_an_artifact_that_does_not_note_what_was_imported_says_what_it_has(tmp_path: Path) -> None:
    pairs = {"de-en": {"train": 3, "test": 1}, "de-fr": {"test": 1}}
    assert imported_lines(corpus(tmp_path, pairs)) == {"de-en": 3}


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    def fill(writer: ArtifactWriter) -> None:
        text = "".join(f"{line}\n" for line in HARD_LINES)
        writer.path(text_name("test", "de-en", "de")).write_bytes(text.encode())
        writer.statistics["pairs"] = {"de-en": {"test": len(HARD_LINES)}}

    assert read_lines(artifact(tmp_path, "corpus", fill), "test", "de-en", "de") == HARD_LINES


@pytest.mark.parametrize(
    ("text", "lines"), [("", []), ("\n", [""]), ("a\nb", ["a", "b"]), ("a\n\n", ["a", ""])]
)
def test_the_last_line_may_lack_its_newline(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "lines.txt"
    path.write_text(text, encoding="utf-8", newline="\n")
    assert list(iterate_lines(path)) == lines


def test_the_name_of_a_pair_is_alphabetical_and_that_of_a_direction_is_not() -> None:
    assert pair_name("fr", "de") == pair_name("de", "fr") == Direction("fr", "de").pair == "de-fr"
    assert str(Direction("fr", "de")) == "fr-de"


@pytest.mark.parametrize(
    ("split", "names"),
    [("train", ["de-en", "en-de"]), ("valid", []), ("test", ["de-en", "de-fr", "en-de", "fr-de"])],
)
def test_a_pair_has_two_directions_a_split(tmp_path: Path, split: Split, names: list[str]) -> None:
    made = corpus(tmp_path, {"de-fr": {"train": 0, "test": 1}, "de-en": {"train": 9, "test": 2}})
    assert [str(direction) for direction in directions(made, split)] == names


def test_pairs_without_lines_count_for_the_languages_alone(tmp_path: Path) -> None:
    made = corpus(tmp_path, {"en-yi": {"train": 0}, "de-en": {"train": 9, "test": 2}})
    assert line_counts(made, "train") == {"de-en": 9}
    assert languages(made) == ["de", "en", "yi"]


def test_pairs_that_lost_their_training_lines_are_told_where_they_are_noted(tmp_path: Path) -> None:
    pairs = {"de-en": {"train": 0, "test": 1}, "de-fr": {"test": 1}}
    assert emptied_pairs(corpus(tmp_path, pairs)) == set()
    with writing(tmp_path / "new", "corpus") as writer:
        writer.statistics |= {"pairs": pairs, "emptied": ["de-en"]}
    made = open_artifact(tmp_path / "new", kind="corpus")
    assert emptied_pairs(made) == {"de-en"}


@pytest.mark.parametrize(
    ("lines", "group"),
    [(1, "low"), (200, "low"), (201, "medium"), (499, "medium"), (500, "high"), (501, "high")],
)
def test_thresholds_belong_to_the_low_and_the_high_group(lines: int, group: str) -> None:
    assert resource_of(lines, thresholds=(200, 500)) == group


def test_only_pairs_with_training_lines_left_have_a_tier_which_follows_from_those_imported(
    tmp_path: Path,
) -> None:
    """Zero-shot pairs counted as low-resource ones in validation losses, and in no report."""
    pairs = {"de-en": {"train": 3}, "en-fr": {"train": 0, "valid": 1}, "de-fr": {"valid": 1}}
    assert tiers_of(corpus(tmp_path, pairs), thresholds=(3, 9)) == {"de-en": "low"}
    with writing(tmp_path / "cleaned", "corpus") as writer:
        imported = {"de-en": {"train": 9}, "en-fr": {"train": 5}}
        writer.statistics |= {"pairs": pairs, "imported": imported}
    made = open_artifact(tmp_path / "cleaned", kind="corpus")
    assert tiers_of(made, thresholds=(3, 9)) == {"de-en": "high"}


def test_hypotheses_are_read_as_they_were_written(tmp_path: Path) -> None:
    direction = Direction("en", "de")
    written = [Hypothesis(text, score=-0.1 * len(text), truncated=not text) for text in HARD_LINES]

    def fill(writer: ArtifactWriter) -> None:
        write_hypotheses(writer.path(hypotheses_name(direction)), written)

    made = artifact(tmp_path, "translations", fill)
    assert read_hypotheses(made, direction) == written
    write_hypotheses(made.directory / hypotheses_name(direction), written[1:])
    with pytest.raises(ArtifactError, match=r"en-de\.jsonl"):
        read_hypotheses(made, direction)


@pytest.mark.parametrize(
    "statistics",
    [
        *({}, {"pairs": [1]}),
        *(
            {"pairs": {name: {"train": 1}}}
            for name in ("deen", "en-de", "../../x-en", "de-en-fr", "/de-en", "-en", "..-en")
        ),
        *(
            {"pairs": {"de-en": counts}}
            for counts in (1, {"train": -1}, {"train": "5"}, {"train": True})
        ),
    ],
)
def test_statistics_that_do_not_say_which_pairs_there_are_are_refused(
    tmp_path: Path, statistics: dict[str, object]
) -> None:
    made = artifact(tmp_path, "corpus", lambda writer: writer.statistics.update(statistics))
    with pytest.raises(ArtifactError, match=r"under 'pairs' what .*run stage 'test' again"):
        line_counts(made, "train")


def test_a_text_of_another_number_of_lines_than_counted_is_refused(tmp_path: Path) -> None:
    def fill(writer: ArtifactWriter) -> None:
        writer.path(text_name("test", "de-en", "de")).write_text("a\nb\n", encoding="utf-8")
        writer.statistics["pairs"] = {"de-en": {"test": 3}}

    with pytest.raises(ArtifactError, match=r"de\.txt has 2 lines, the statistics of .* say 3"):
        read_lines(artifact(tmp_path, "corpus", fill), "test", "de-en", "de")
