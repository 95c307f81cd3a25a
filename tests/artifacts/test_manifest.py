"""Manifests: safe names, declared files, and differences of settings by their path."""

import json
import re
import tarfile
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import writing

from pipeline import cli
from pipeline.artifacts.artifact import ArtifactWriter, open_artifact, read_manifest
from pipeline.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MARKER_NAME,
    describe_name,
    describe_names,
)
from pipeline.config.recipe import (
    Recipe,
    describe_change,
    setting_changes,
    with_defaults,
    without_settings,
)
from pipeline.errors import EXIT_USER_ERROR, ArtifactError

NOT_WITHIN = [
    *("valid/../../loot.txt", "..", "../loot.txt", "/etc/hostname", "a//b", "./a", "a/.", "a/", ""),
    *("a\\..\\b", "a\0b", "a\x1b[2Jb", "x" * 256, MANIFEST_NAME, "Manifest.JSON", MARKER_NAME),
]


def make_corpus(directory: Path) -> Path:
    with writing(directory, "corpus", "clean") as writer:
        for split in ("train", "valid", "test"):
            for code in ("de", "en"):
                writer.path(f"{split}/de-en/{code}.txt").write_text(f"{split} {code} word\n")
        writer.statistics["pairs"] = {"de-en": {"train": 1, "valid": 1, "test": 1}}
    return directory


def rename_in_manifest(directory: Path, old: str, new: str) -> None:
    path = directory / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["files"][new] = manifest["files"].pop(old)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", NOT_WITHIN)
def test_a_manifest_with_a_name_that_is_not_within_is_refused(tmp_path: Path, name: str) -> None:
    directory = make_corpus(tmp_path / "corpus")
    rename_in_manifest(directory, "valid/de-en/de.txt", name)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(directory)
    assert repr(name) in str(caught.value)
    with pytest.raises(ArtifactError):
        open_artifact(directory, kind="corpus")


@pytest.mark.parametrize(
    ("first", "second"), [("a/B", "a/b"), ("straße", "STRASSE"), ("e\u0301", "\u00e9")]
)
def test_two_names_that_are_one_somewhere_are_refused(first: str, second: str) -> None:
    assert describe_names([first, "else"]) is None
    assert describe_names([first, second]) is not None


@given(st.text(alphabet="ab./\\\0\n", max_size=8) | st.text(max_size=6))
def test_a_name_that_is_accepted_leads_nowhere_else(name: str) -> None:
    if describe_name(name) is not None:
        return
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        assert not path.is_absolute()
        assert not {"..", "."} & set(path.parts)
    assert str(PurePosixPath(name)) == name
    assert name not in (MANIFEST_NAME, "")


def test_a_name_that_leads_out_lets_no_stage_write_outside_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_corpus(tmp_path / "deep" / "corpus")
    (tmp_path / "deep" / "loot.txt").write_text("loot")
    rename_in_manifest(directory, "valid/de-en/de.txt", "valid/../../loot.txt")
    (tmp_path / "recipe.toml").touch()
    options = ["--recipe", str(tmp_path / "recipe.toml"), "--corpus", str(directory)]
    assert cli.main(["clean", *options, "--out", str(tmp_path / "out/clean")]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "'valid/../../loot.txt'" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out/**/*.txt"))


@pytest.mark.parametrize("name", [name for name in NOT_WITHIN if name])
def test_a_stage_cannot_write_what_its_manifest_could_not_hold(tmp_path: Path, name: str) -> None:
    writer = ArtifactWriter(tmp_path / "out")
    with pytest.raises(ArtifactError, match="which"):
        writer.path(name)
    assert not list(tmp_path.iterdir())


def test_settings_are_left_out_by_their_path_at_any_depth() -> None:
    tree = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4, "g": {"b": 5}}
    assert without_settings(tree, ["a.b.c", "f", "g.b", "a.x.y", "f.x", "x"]) == {
        "a": {"b": {"d": 2}, "e": 3},
        "g": {},
    }
    assert tree["a"] == {"b": {"c": 1, "d": 2}, "e": 3}, "the settings given stay as they are"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        (
            {"a": {"b": {"c": 1}}, "z": 0},
            {"a": {"b": {"c": 2}}, "z": 1},
            ["a.b.c: 1 → 2", "z: 0 → 1"],
        ),
        ({"c": {}}, {"a": 1, "c": {"f": 1}}, ["a: unset → 1", "c: {} → a table", "c.f: unset → 1"]),
        ({"a": {"b": 1}}, {"a": None}, ["a: a table → None", "a.b: 1 → unset"]),
        ({"a": None}, {"a": {"b": {"c": 1}}}, ["a: None → a table", "a.b.c: unset → 1"]),
        ({"b": 1, "a": [1, 2]}, {"a": [1, 3]}, ["a: [1, 2] → [1, 3]", "b: 1 → unset"]),
    ],
)
def test_differences_of_settings_are_described_by_their_paths(
    old: dict[str, object], new: dict[str, object], expected: list[str]
) -> None:
    assert setting_changes(old, new) == expected
    assert describe_change(old, new) == (expected[0] if expected else None)


def test_settings_that_there_were_not_yet_are_at_their_defaults() -> None:
    sections = ("mixture", "training")
    today = Recipe(name="defaults").sections(sections)
    noted = {"training": {"updates": 10}, "ds_config": {"zero": 1}}
    training = {**today["training"], "updates": 10}
    filled = {"mixture": today["mixture"], "training": training, "ds_config": {"zero": 1}}
    assert with_defaults(noted, sections=sections) == filled
    assert with_defaults(filled, sections=sections) == filled


@pytest.mark.parametrize("section", [{"up_dates": 10}, {"updates": "ten"}, ["updates"], None])
def test_settings_that_cannot_be_read_any_more_stay_as_noted(section: object) -> None:
    found = with_defaults({"training": section}, sections=("mixture", "training"))
    assert found["training"] == section


STORED_RUN = Path(__file__).resolve().parents[1] / "whole" / "stored_run.tar.gz"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "artifacts.md"
FILES = {
    section.partition("\n")[0]: re.findall(r"^\| `([^`]+)` \|", section, re.M)
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]
}
"""Kind → names of its files on the page, in which words in capitals stand for names."""


def is_declared(name: str, kind: str) -> bool:
    return any(
        re.fullmatch(re.sub(r"\b[A-Z]+\b", "[^/]+", re.escape(pattern)), name)
        for pattern in FILES[kind]
    )


def test_a_stored_run_holds_only_files_that_their_kinds_declare_on_the_page() -> None:
    assert set(FILES) == set(FORMAT_VERSION)
    assert all(FILES.values())
    assert is_declared("train/de-en/de.txt", "corpus")
    assert not is_declared("train/de-en/de.tokens", "corpus")
    kinds = set()
    with tarfile.open(STORED_RUN) as archive:
        for member in archive.getmembers():
            if member.name.endswith("manifest.json"):
                stream = archive.extractfile(member)
                assert stream is not None
                manifest = json.load(stream)
                kinds.add(manifest["kind"])
                names = manifest["files"]
                assert not [n for n in names if not is_declared(n, manifest["kind"])], member.name
    assert len(kinds) >= 9


def test_a_removed_setting_counts_where_its_effect_was_another_than_todays() -> None:
    """Manifests of earlier versions note settings that there are no more."""
    today = Recipe(name="defaults").sections(("clean", "training"))
    noted = {
        "clean": {**today["clean"], "drop_near_duplicates": False},
        "training": {**today["training"], "cpu_kernels": "measured"},
    }
    assert with_defaults(noted, sections=("clean", "training")) == today
    noted["clean"]["drop_near_duplicates"] = True
    found = with_defaults(noted, sections=("clean", "training"))
    assert setting_changes(found, today) == ["clean.drop_near_duplicates: True → unset"]


def test_a_result_by_an_earlier_default_is_up_to_date_and_one_by_another_value_is_not() -> None:
    today = {"decoding": {"precision": "auto"}}
    assert setting_changes({"decoding": {"precision": "float32"}}, today) == []
    assert len(setting_changes({"decoding": {"precision": "bfloat16"}}, today)) == 1
    assert len(setting_changes(today, {"decoding": {"precision": "float32"}})) == 1


@pytest.mark.parametrize("wanted", ["nfc", "plain"])
def test_a_vocabulary_of_before_there_was_a_choice_is_up_to_date_by_today(wanted: str) -> None:
    today = Recipe(name="defaults").sections(("tokenizer",))
    today["tokenizer"]["normalization"] = wanted
    old = {"tokenizer": {**today["tokenizer"]}}
    old["tokenizer"].pop("normalization")
    assert setting_changes(with_defaults(old, sections=("tokenizer",)), today) == []
    other = {"nfc": "plain", "plain": "nfc"}[wanted]
    made = {"tokenizer": {**today["tokenizer"], "normalization": other}}
    found = setting_changes(with_defaults(made, sections=("tokenizer",)), today)
    assert found == [f"tokenizer.normalization: {other} → {wanted}"]
