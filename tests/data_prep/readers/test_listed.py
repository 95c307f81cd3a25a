"""A list of files in the recipe: each is read by what it is, in the order of the list."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.raw_trees import run_import, write

from data_prep.settings import CorpusConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError, DataError

MEMORY = (
    '<tmx version="1.4"><body><tu>'
    '<tuv xml:lang="fr-FR"><seg>trois</seg></tuv><tuv xml:lang="en-GB"><seg>three</seg></tuv>'
    '<tuv xml:lang="de-DE"><seg>drei</seg></tuv></tu></body></tmx>'
)


def entry(*paths: str, pair: str = "de-en", split: str = "train") -> dict[str, Any]:
    return {"split": split, "pair": pair, "paths": paths}


def imported(out_dir: Path, raw: Path, *files: dict[str, Any], **settings: object) -> Artifact:
    config = CorpusConfig.model_validate({"source": "listed", "files": files, **settings})
    return run_import("import_corpus", out_dir, raw, Recipe(name="test", corpus=config))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write(
        tmp_path / "raw",
        {
            "a.german.gz": "eins\n",
            "a.english": "one\n",
            "b.tsv": "two\tzwei\n",
            "c.tmx": MEMORY,
            "d.jsonl": json.dumps({"en": "four", "de": "vier"}),
            "unlisted.tmx": "no XML",
        },
    )


def test_files_of_all_forms_are_read_in_the_order_of_the_list(tmp_path: Path, raw: Path) -> None:
    corpus = imported(
        tmp_path / "corpus",
        raw,
        entry("d.jsonl"),
        entry("a.german.gz", "a.english"),
        entry("b.tsv", pair="en-de"),
        entry("c.tmx"),
        entry("c.tmx", pair="en-fr", split="test"),
    )
    assert read_lines(corpus, "train", "de-en", "de") == ["vier", "eins", "zwei", "drei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["four", "one", "two", "three"]
    assert read_lines(corpus, "test", "en-fr", "fr") == ["trois"]
    assert set(corpus.statistics["pairs"]) == {"de-en", "en-fr"}


def test_the_list_is_a_table_of_a_recipe(tmp_path: Path, raw: Path) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "corpus"
    recipe.write_text(
        '[corpus]\nsource = "listed"\n[[corpus.files]]\nsplit = "train"\npair = "de-en"\n'
        'paths = ["a.german.gz", "a.english"]\n'
    )
    command = ["import_corpus", "--recipe", str(recipe), "--raw", str(raw), "--out", str(out)]
    assert cli.main(command) == 0
    corpus = open_artifact(out, kind="corpus")
    assert read_lines(corpus, "train", "de-en", "en") == ["one"]


def test_the_list_says_which_script_a_file_is_in(tmp_path: Path, raw: Path) -> None:
    memory = MEMORY.replace("fr-FR", "zh-TW")
    write(raw, {"e.tmx": memory, "f.tmx": memory.replace("zh-TW", "zh-CN")})
    both = entry("e.tmx", pair="en-zho_Hant"), entry("f.tmx", pair="en-zho_Hans")
    corpus = imported(tmp_path / "corpus", raw, *both)
    assert set(corpus.statistics["pairs"]) == {"en-zh", "en-zh_Hant"}


def test_the_list_says_which_region_a_file_is_from(tmp_path: Path, raw: Path) -> None:
    memory = MEMORY.replace("fr-FR", "pt-BR")
    write(raw, {"e.tmx": memory, "f.tmx": memory.replace("pt-BR", "pt-PT")})
    both = entry("e.tmx", pair="en-pt_BR"), entry("f.tmx", pair="en-pt")
    corpus = imported(tmp_path / "corpus", raw, *both, regions="apart")
    assert set(corpus.statistics["pairs"]) == {"en-pt", "en-pt_BR"}


def test_only_languages_asked_for_are_opened(tmp_path: Path, raw: Path) -> None:
    files = entry("a.german.gz", "a.english"), entry("nowhere.tmx", pair="en-fr")
    corpus = imported(tmp_path / "corpus", raw, *files, languages=("de", "en"))
    assert corpus.statistics["counts"]["pairs_not_selected"] == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], r"corpus\.files is empty"),
        ([entry("a.english", pair="de")], "names the pair 'de'. Write two language codes"),
        ([entry("a.english", pair="de-de")], "names the pair 'de-de'"),
        ([entry("a.english", "b.english")], "b.english, which corpus.files names, is not a file"),
        ([entry("../raw2/a.tsv")], "lies outside of"),
        ([entry("a.english")], r"but ends in none of \.tmx, \.tsv"),
        (
            [entry("c.tmx", pair="en-es")],
            r"c\.tmx has no record with .* both languages of en-es",
        ),
        ([entry("b.tsv", pair="en-fr"), entry("c.tmx", pair="en-zh")], "languages of en-zh"),
        ([entry("unlisted.tmx")], r"unlisted\.tmx, line 1, is not well-formed XML"),
    ],
)
def test_lists_that_cannot_be_read_are_told(
    tmp_path: Path, raw: Path, files: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        imported(tmp_path / "corpus", raw, *files)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path, raw: Path) -> None:
    with pytest.raises(ConfigError, match="is not one folder"):
        imported(tmp_path / "corpus", raw / "c.tmx", entry("c.tmx"))
