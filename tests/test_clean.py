"""Clean: each rule drops what it should and nothing else, whatever the number of workers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import clean
from data_prep.clean import fold, median_length_ratio
from pipeline.artifacts import Artifact, new_artifact, open_artifact
from pipeline.config import CleanConfig, Recipe
from pipeline.corpus import Split, read_lines, text_name
from pipeline.errors import DataError
from pipeline.stages import STAGES, StageCall

Texts = dict[Split, list[tuple[str, str]]]
GOOD = [("Haus", "house"), ("Baum", "tree"), ("Straße", "road"), ("Wasser", "water")]


def corpus_of(directory: Path, pairs: dict[str, Texts]) -> Artifact:
    with new_artifact(directory, kind="corpus", stage="test", config={}, inputs={}) as writer:
        for pair, splits in pairs.items():
            for split, lines in splits.items():
                for side, code in enumerate(pair.split("-")):
                    text = "".join(line[side] + "\n" for line in lines)
                    writer.path(text_name(split, pair, code)).write_bytes(text.encode())
        writer.statistics["pairs"] = {
            pair: {split: len(lines) for split, lines in splits.items()}
            for pair, splits in pairs.items()
        }
    return open_artifact(directory, kind="corpus")


def cleaned(corpus: Artifact, *, processes: int = 1, **settings: Any) -> Artifact:
    recipe = Recipe(name="test", clean=CleanConfig(**settings))
    stage = STAGES["clean"]
    out_dir = corpus.directory.with_name(f"clean{processes}")
    clean.run(
        StageCall(
            stage=stage,
            recipe=recipe,
            artifacts={"corpus": corpus},
            raw={},
            out_dir=out_dir,
            records={},
            config=recipe.sections(stage.sections),
            processes=processes,
        )
    )
    return open_artifact(out_dir, kind="corpus")


def train_lines(corpus: Artifact, pair: str) -> list[tuple[str, str]]:
    first, second = pair.split("-")
    return list(
        zip(
            read_lines(corpus, "train", pair, first),
            read_lines(corpus, "train", pair, second),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("empty", ("", "nothing")),
        ("empty", ("nichts", " \u3000\t")),
        ("too_long", ("ä" * 101, "a" * 30)),
        ("control_characters", ("Klin\x07gel", "bell")),
        ("control_characters", ("Zei\rle", "line")),
        ("control_characters", ("Zei\x85le", "line")),
        ("control_characters", ("Zeile", "li\u2028ne")),
        ("copy", ("Hotel", "Hotel ")),
        ("length_ratio", ("Au", "a very long translation")),
        ("length_ratio", ("eine sehr lange Übersetzung", "oh")),
        ("duplicate", ("Baum", "tree")),
        ("held_out_overlap", ("PRÜFUNG eins!", "something else")),
        ("held_out_overlap", ("etwas anderes", "Exam: one.")),
    ],
)
def test_each_rule_drops_its_line_and_keeps_the_others(
    tmp_path: Path, rule: str, line: tuple[str, str]
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": [*GOOD, line], "test": [("Prüfung eins", "exam one")]}},
    )
    result = cleaned(corpus, max_characters=100)
    assert train_lines(result, "de-en") == GOOD
    dropped = result.statistics["dropped"]["de-en"]
    assert {name: number for name, number in dropped.items() if number} == {rule: 1}
    assert result.statistics["pairs"]["de-en"] == {"train": 4, "test": 1}


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("drop_control_characters", ("Klin\x07gel", "bell")),
        ("drop_copies", ("Hotel", "Hotel")),
        ("drop_duplicates", ("Baum", "tree")),
        ("drop_held_out_overlap", ("Prüfung eins", "something else")),
    ],
)
def test_a_rule_that_is_off_drops_nothing(
    tmp_path: Path, setting: str, line: tuple[str, str]
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": [*GOOD, line], "test": [("Prüfung eins", "exam one")]}},
    )
    assert train_lines(cleaned(corpus, **{setting: False}), "de-en") == [*GOOD, line]


def test_tabs_and_long_good_lines_are_kept(tmp_path: Path) -> None:
    lines = [*GOOD, ("ein\tTab", "a\ttab"), ("ä" * 100, "a" * 100)]
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": lines}})
    assert train_lines(cleaned(corpus, max_characters=100), "de-en") == lines


def test_a_dense_script_is_not_taken_for_a_bad_ratio(tmp_path: Path) -> None:
    lines = [(f"sentence number {number} of many", f"第{number}") for number in range(10, 20)]
    corpus = corpus_of(tmp_path / "corpus", {"en-zh": {"train": [*lines, ("three", "三三三三三")]}})
    result = cleaned(corpus)
    assert train_lines(result, "en-zh") == lines
    assert result.statistics["dropped"]["en-zh"]["length_ratio"] == 1


def test_a_line_held_out_in_another_pair_is_dropped_in_its_own_language_only(
    tmp_path: Path,
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {
            "de-en": {"train": [("ein Land", "a land"), ("der Rat", "council")]},
            "de-fr": {"valid": [("Der Rat.", "le conseil")], "train": [("rot", "a land")]},
            "en-fr": {"test": [("other", "un"), ("A LAND", "un pays")], "train": GOOD},
        },
    )
    with pytest.raises(DataError, match=r"Pair de-en .*held_out_overlap: 2"):
        cleaned(corpus)
    pairs = {"de-fr": ["rot"], "en-fr": [line[0] for line in GOOD]}
    corpus = corpus_of(
        tmp_path / "other",
        {
            "de-fr": {"valid": [("Der Rat.", "le conseil")], "train": [("rot", "a land")]},
            "en-fr": {"test": [("A LAND", "un pays")], "train": GOOD},
        },
    )
    result = cleaned(corpus)
    for pair, kept in pairs.items():
        assert [line[0] for line in train_lines(result, pair)] == kept


def test_a_held_out_line_of_punctuation_drops_nothing(tmp_path: Path) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": [*GOOD, ("…?", "...!?")], "test": [("!!!", "???")]}},
    )
    assert len(train_lines(cleaned(corpus), "de-en")) == 5


def test_held_out_text_is_copied_byte_for_byte(tmp_path: Path) -> None:
    odd: Texts = {"train": GOOD, "valid": [("", "x\ry")], "test": [("same", "same"), ("\x85", "")]}
    corpus = corpus_of(tmp_path / "corpus", {"de-en": odd, "de-fr": {"test": [("eins", "un")]}})
    result = cleaned(corpus)
    names = corpus.names("valid/") + corpus.names("test/")
    assert len(names) == 6
    for name in names:
        assert result.manifest.files[name] == corpus.manifest.files[name]
    assert result.statistics["pairs"]["de-fr"] == {"test": 1}


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    pairs: dict[str, Texts] = {
        pair: {"train": GOOD * 2 + [(f"Wort {pair}", f"word {pair}")], "test": [("Haus", "haus")]}
        for pair in ("de-en", "de-fr", "de-nl")
    }
    corpus = corpus_of(tmp_path / "corpus", pairs)
    one, two = cleaned(corpus), cleaned(corpus, processes=2)
    assert one.digest == two.digest
    assert one.statistics == two.statistics
    assert one.statistics["dropped"]["de-en"] == {
        "empty": 0,
        "too_long": 0,
        "control_characters": 0,
        "copy": 0,
        "length_ratio": 0,
        "duplicate": 4,
        "held_out_overlap": 1,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pair_that_vanishes_is_named_with_its_rules(tmp_path: Path, processes: int) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": GOOD}, "de-fr": {"train": [("", "un"), ("oui", "oui")]}},
    )
    with pytest.raises(DataError, match=r"Pair de-fr .*\(empty: 1, copy: 1\)"):
        cleaned(corpus, processes=processes)
    assert not (tmp_path / f"clean{processes}").exists()


def test_a_training_set_of_one_line_is_kept(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": [("ja", "certainly not, no")]}})
    assert train_lines(cleaned(corpus), "de-en") == [("ja", "certainly not, no")]


def test_characters_are_those_of_the_lines_that_are_left(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": [*GOOD, ("x", "")]}})
    characters = cleaned(corpus).statistics["characters"]["de-en"]["train"]
    assert characters == {
        "de": sum(len(line[0]) for line in GOOD),
        "en": sum(len(line[1]) for line in GOOD),
    }


def test_the_median_ratio_is_that_of_lines_with_two_sides() -> None:
    assert median_length_ratio([("ab", "a"), ("abc", "a"), ("aaaaaaaa", "a"), ("", "a")]) == 3.0
    assert median_length_ratio([("", "a")]) == 1.0


@given(st.text(alphabet="abcXYZ019"), st.text(alphabet=" .,!?-–'\"()\t"))
def test_case_spaces_and_punctuation_do_not_tell_lines_apart(word: str, noise: str) -> None:
    assert fold(noise.join([*word, ""])) == word.lower()


def test_full_width_and_decomposed_forms_fold_to_the_usual_ones() -> None:
    assert fold("２０２１ Cafe\u0301 GROSS") == fold("2021 café groß") == "2021cafégross"
