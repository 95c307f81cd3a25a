"""Pairs joined over a pivot: the lines of a brute-force join, cleaned, and never held-out ones."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.corpora import bytes_of, make_corpus, writing
from support.stage_runs import run_stage

from data_prep import pair_rules
from data_prep.pivot_join import PivotedText, write_joined
from data_prep.settings import CleanConfig
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import joined_lines, line_counts, read_lines
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.errors import DataError
from pipeline.evaluation.scores import describe_directions, pivot_of

Lines = list[tuple[str, str]]
JOINED = "joined over en, kept of the lines with equal pivots:"


def brute_force(first: Lines, second: Lines) -> Lines:
    """Of (text, pivot) lines: the k-th with a pivot joins the k-th of the other."""
    left = list(second)
    joined = []
    for text, pivot in first:
        found = next((one for one in left if one[1] == pivot), None)
        if found is not None:
            left.remove(found)
            joined.append((text, found[0]))
    return joined


def pivoted(folder: Path, name: str, lines: Lines) -> PivotedText:
    paths = folder / f"{name}.text", folder / f"{name}.pivot"
    for path, side in zip(paths, zip(*lines, strict=True) if lines else ((), ()), strict=True):
        path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return PivotedText(*paths)


@pytest.mark.parametrize("part", [2**19, 40])
@pytest.mark.parametrize(("lines", "pivots"), [((0, 9), 5), ((60, 90), 8), ((300, 200), 10**6)])
def test_joined_lines_are_those_of_a_brute_force_join(
    lines: tuple[int, int], pivots: int, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_rules, "PART", part)
    generator = random.Random(1)
    drawn = [generator.randrange(pivots) for _ in range(min(lines) // 2)]
    one, other = (
        [
            (f"{name} {number} ä", f"line {pivot}")
            for number, pivot in enumerate(
                generator.sample(drawn, len(drawn))
                + [generator.randrange(pivots) for _ in range(count - len(drawn))]
            )
        ]
        for name, count in zip("ab", lines, strict=True)
    )
    outputs = tmp_path / "de.joined", tmp_path / "fr.joined"
    write_joined(pivoted(tmp_path, "one", one), pivoted(tmp_path, "other", other), outputs)
    found = zip(*(path.read_text(encoding="utf-8").splitlines() for path in outputs), strict=True)
    expected = brute_force(one, other)
    assert list(found) == expected
    assert min(lines) == 0 or len(expected) >= len(drawn)
    assert not list(tmp_path.glob("*.digests"))


TRAIN = {
    "de-en": [
        *[("Haus", "house"), ("Baum", "tree"), ("Straße", "road"), ("Weg", "road")],
        *[("OK", "okay"), ("Prüfung", "exam"), ("Klausur", "exam paper")],
    ],
    "en-fr": [
        *[("tree", "arbre"), ("road", "rue"), ("road", "route"), ("house", "maison")],
        *[("okay", "OK"), ("exam", "examen"), ("exam paper", "copie"), ("water", "eau")],
    ],
    "el-en": [("δέντρο", "tree"), ("νερό", "water")],
}
TEST = {
    "el-en": [("διαγώνισμα", "Exam!")],
    "de-fr": [("Klausur", "devoir")],
    "el-fr": [("νερό", "de l'eau")],
}


def corpus(directory: Path, train: dict[str, Lines] = TRAIN) -> Artifact:
    def sides(pairs: dict[str, Lines]) -> dict[str, dict[str, list[str]]]:
        return {
            pair: dict(zip(pair.split("-"), map(list, zip(*lines, strict=True)), strict=True))
            for pair, lines in pairs.items()
        }

    return make_corpus(directory, {"train": sides(train), "test": sides(TEST)})


def cleaned(
    source: Artifact, out_dir: Path, joined: Sequence[str], *, processes: int = 1, **more: Any
) -> Artifact:
    settings = {"joined_pairs": joined, **more}
    return run_stage("clean", out_dir, {"corpus": source}, processes=processes, clean=settings)


def joined_text(made: Artifact) -> Lines:
    sides = (read_lines(made, "train", "de-fr", code) for code in ("de", "fr"))
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize(("name", "processes"), [("fr-de", 1), ("deu-fra", 1), ("fr_Latn-de", 2)])
def test_a_joined_pair_is_cleaned_without_held_out_lines(
    name: str, processes: int, tmp_path: Path
) -> None:
    made = cleaned(corpus(tmp_path / "raw"), tmp_path / "made", [name], processes=processes)
    # "exam" is a test line of el-en, "Klausur" one of de-fr; "OK" is a copy.
    expected = [("Haus", "maison"), ("Baum", "arbre"), ("Straße", "rue"), ("Weg", "route")]
    assert joined_text(made) == expected
    assert joined_lines(made) == {"de-fr": {"matched": 5}}
    assert made.statistics["dropped"]["de-fr"]["copy"] == 1
    assert line_counts(made, "train")["de-fr"] == 4
    said = made.manifest.summary
    assert said[-1] == f"{JOINED} de-fr 4 of 5; dropped: copy 1"
    read, kept = re.findall(r"read (\d+) .*, kept (\d+);", said[0])[0]
    dropped = [line for line in said if line.startswith("dropped: ")]
    of_pairs = " ".join(re.sub(r"\(.*?\)", "", line) for line in dropped)
    assert sum(map(int, re.findall(r"\d+", of_pairs))) == int(read) - int(kept)
    assert "el-fr" not in line_counts(made, "train")
    assert made.statistics["emptied"] == []
    assert not [name for name in made.names("train/") if not name.endswith(".txt")]
    samples = [json.loads(line) for line in made.file("dropped_samples.jsonl").open()]
    assert ("de-fr", "copy") in {(one["pair"], one["rule"]) for one in samples}


def test_other_pairs_are_those_of_a_corpus_without_joined_pairs(tmp_path: Path) -> None:
    raw = corpus(tmp_path / "raw")
    made, plain = cleaned(raw, tmp_path / "made", ["de-fr"]), cleaned(raw, tmp_path / "plain", ())
    for name in plain.names("train/"):
        assert made.file(name).read_bytes() == plain.file(name).read_bytes(), name
    more = {*made.names("train/")} - {*plain.names("train/")}
    assert more == {"train/de-fr/de.txt", "train/de-fr/fr.txt"}
    assert "joined" not in plain.statistics


def test_a_report_tells_joined_from_zero_shot_directions_and_its_pivot(tmp_path: Path) -> None:
    made = cleaned(corpus(tmp_path / "raw"), tmp_path / "made", ["de-fr"])
    again = cleaned(made, tmp_path / "again", ())
    for training in (made, again):
        profiles = describe_directions(training, thresholds=(3, 9))
        assert {str(one.direction): one.family for one in profiles} == {
            **dict.fromkeys(("de-fr", "fr-de"), "pivot_joined"),
            **{"el-en": "into_pivot", "en-el": "out_of_pivot"},
            **dict.fromkeys(("el-fr", "fr-el"), "zero_shot"),
        }


@pytest.mark.parametrize("splits", [(), ("train", "valid")])
@pytest.mark.parametrize("joined", [["de-fr"], ["de-fr", "el-fr"]])
def test_shards_know_their_joined_pairs_and_so_their_pivot(
    joined: list[str], splits: Sequence[str], tmp_path: Path
) -> None:
    """Curves of validation losses by the sides of the pivot read it there."""
    made = cleaned(corpus(tmp_path / "raw"), tmp_path / "made", joined)
    with writing(tmp_path / "bytes", "tokenizer") as writer:
        TokenizerFiles(bytes_of(("de", "el", "en", "fr"))).write(writer.directory)
    tokenizer = open_artifact(tmp_path / "bytes", kind="tokenizer")
    inputs = {"corpus": made.part(splits), "tokenizer": tokenizer}
    shards = run_stage("make_shards", tmp_path / "shards", inputs)
    assert joined_lines(shards) == joined_lines(made)
    assert sorted(joined_lines(shards)) == joined
    assert pivot_of(shards) == pivot_of(made) == "en"


def test_a_pair_without_equal_pivots_stays_zero_shot(tmp_path: Path) -> None:
    train = {**TRAIN, "en-fr": [("nothing", "rien")]}
    made = cleaned(corpus(tmp_path / "raw", train), tmp_path / "made", ["de-fr"])
    profiles = describe_directions(made, thresholds=(3, 9))
    families = {str(one.direction): one.family for one in profiles}
    assert families["de-fr"] == "zero_shot"
    assert made.statistics["emptied"] == []
    assert joined_lines(made) == {"de-fr": {"matched": 0}}


@pytest.mark.parametrize(
    ("joined", "left"), [(["de-fr"], ["el-fr"]), (["de-fr", "el-fr"], []), ([], ["de-fr", "el-fr"])]
)
def test_a_pair_without_lines_of_its_own_that_is_joined_has_training_data(
    joined: list[str], left: list[str], tmp_path: Path
) -> None:
    """Its files were there and empty when it was imported."""
    raw = corpus(tmp_path / "raw", {**TRAIN, "el-en": [("δέντρο", "tree")]})
    with writing(tmp_path / "emptied", "corpus") as writer:
        for name in raw.names():
            writer.take_over(name, raw)
        writer.statistics |= {**raw.statistics, "emptied": ["de-fr", "el-fr"]}
    source = open_artifact(tmp_path / "emptied", kind="corpus")
    made = cleaned(source, tmp_path / "made", joined)
    assert made.statistics["emptied"] == left
    said = [line for line in made.manifest.summary if line.startswith("no training data left")]
    assert said == [f"no training data left: {', '.join(left)}"] * bool(left)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["de-it"], "names de-it, but .* has no training lines of en-it"),
        (["de-el"], "names de-el, which has training lines of its own"),
        (["de-deu"], "names de-deu, which is no further pair of two languages"),
        (["de-fr", "fra-de"], "names fra-de, which is no further pair of two languages"),
    ],
)
def test_a_pair_that_cannot_be_joined_is_named(pairs: list[str], said: str, tmp_path: Path) -> None:
    raw = corpus(tmp_path / "raw", {**TRAIN, "de-el": [("Baum", "δέντρο")]})
    with pytest.raises(DataError, match=said):
        cleaned(raw, tmp_path / "made", pairs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"joined_pairs": ["de"]}, "no pair of two languages"),
        ({"joined_pairs": ["de-de"]}, "no pair of two languages"),
        ({"joined_pairs": ["de-fr", "fr-de"]}, "names a pair twice"),
        ({"joined_pairs": ["de-fr"], "drop_held_out_overlap": False}, "across a held-out line"),
    ],
)
def test_settings_that_could_join_held_out_lines_or_none_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        CleanConfig(**settings)
