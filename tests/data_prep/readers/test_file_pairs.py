"""Pairs of files, in trees, with names as for Moses and in lists: pairs, codes, selection."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.raw_trees import Raw, run_import, write

from data_prep.readers.file_pairs import read_trees
from data_prep.readers.raw_text import RawText
from data_prep.settings import CorpusConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.raw_input import RawInput, iterate_blocks, iterate_raw_lines
from pipeline.errors import ConfigError, DataError
from pipeline.languages import Regions


def tree(root: Path, *files: str) -> Path:
    return write(root, {name: f"{name}\n" for name in files})


def pair_files(folder: str, split: str = "train") -> tuple[str, str]:
    first, second = folder.rsplit("/", 1)[-1].split("-")
    return f"{folder}/{split}.{first}", f"{folder}/{split}.{second}"


def found(root: Path, *wanted: str, regions: Regions = "joined") -> RawText:
    config = CorpusConfig(languages=wanted, regions=regions)
    return read_trees(RawInput((root,)), config)


def pairs(root: Path, *wanted: str) -> list[str]:
    return [section.pair for section in found(root, *wanted).sections]


@pytest.mark.parametrize(
    ("folder", "pair"),
    [
        ("en-chr", "chr-en"),
        ("eng_Latn-cop_Copt", "cop-en"),
        ("EN-syr", "en-syr"),
        ("en-zh_Hant_TW", "en-zh"),
        ("es_419-en", "en-es"),
        ("xx-yyy", "xx-yyy"),
        ("zho_Hans-zho_Hant", "zh-zh_Hant"),
        ("srp_Cyrl-srp_Latn", "sr-sr_Latn"),
    ],
)
def test_any_well_formed_code_names_a_pair(tmp_path: Path, folder: str, pair: str) -> None:
    [section] = found(tree(tmp_path, *pair_files(folder))).sections
    assert section.pair == pair
    names = [source.name for source in section.sources]
    assert names == [f"{folder}/train.{spelling}" for spelling in section.spellings]


@pytest.mark.parametrize("folder", ["en-sr-Latn", "en-x-own", "en-pt-BR"])
def test_a_folder_that_is_nearly_named_like_a_pair_is_told_the_form(
    tmp_path: Path, folder: str
) -> None:
    root = tree(tmp_path, f"{folder}/train.en", "ids/train.de")
    said = rf"language pairs \({folder}: a pair is two codes .* as in de-en or en-sr_Latn\)\. Name"
    with pytest.raises(DataError, match=said):
        found(root)


@pytest.mark.parametrize(
    ("pair", "one", "other"), [("en-sr_Latn", "en", "sr-Latn"), ("pt_BR-en", "pt-BR", "en")]
)
def test_endings_may_have_hyphens(tmp_path: Path, pair: str, one: str, other: str) -> None:
    root = tree(tmp_path / "tree", f"{pair}/train.{one}", f"{pair}/train.{other}")
    [section] = found(root).sections
    corpus = imported(tmp_path / "corpus", {f"a.{one}": "x\n", f"a.{other}": "y\n"})
    assert {section.pair: 1} == line_counts(corpus, "train")


@pytest.mark.parametrize("lost", ["de-fr", "de-en/valid.de"])
def test_a_folder_or_file_that_is_a_link_to_nothing_is_told(tmp_path: Path, lost: str) -> None:
    root = tree(tmp_path, *pair_files("de-en"))
    (root / lost).symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=f"{lost} is a link to nothing. Restore its target"):
        found(root)
    (root / lost).unlink()
    os.mkfifo(root / lost)  # nobody writes to it, and a read would wait
    with pytest.raises(DataError, match=f"{lost} is a pipe or a device, .* Copy its content to a"):
        found(root)


def test_two_scripts_of_one_language_are_two_languages(tmp_path: Path) -> None:
    root = tree(
        tmp_path, *pair_files("eng_Latn-zho_Hans"), *pair_files("fra_Latn-zho_Hant", "test")
    )
    assert pairs(root) == ["en-zh", "fr-zh_Hant"]
    assert pairs(root, "fr", "zh_Hant") == ["fr-zh_Hant"]
    assert pairs(root, "eng", "zho_Hans") == ["en-zh"]


def test_one_script_in_many_spellings_is_one_language_without_mention(tmp_path: Path) -> None:
    folders = ("de-en", "deu_Latn-fr", "eng_Latn-zho_Hant", "pt_BR-en")
    root = tree(tmp_path, *(name for folder in folders for name in pair_files(folder)))
    assert pairs(root) == ["de-en", "de-fr", "en-pt", "en-zh"]
    assert pairs(root, "en", "zh") == ["en-zh"]


def test_regions_of_one_language_are_languages_where_they_are_kept_apart(tmp_path: Path) -> None:
    """Whichever way the files of en-pt_BR call their side."""
    root = tree(
        tmp_path,
        *pair_files("en-pt"),
        *("en-pt_BR/train.en", "en-pt_BR/train.pt", "en-pt_BR/test.en", "en-pt_BR/test.pt_br"),
    )
    sections = found(root, "en", "pt-BR", regions="apart").sections
    found_in = [(section.pair, section.split) for section in sections]
    assert found_in == [("en-pt_BR", "train"), ("en-pt_BR", "test")]
    with pytest.raises(DataError, match=r"different text of the pair en-pt\. Join them"):
        found(root)


@pytest.mark.parametrize(
    "odd",
    [
        ("en-fr/train.en",),  # a side missing
        ("en-fr/notes.txt",),  # no text
        ("fr-fra/train.fr",),  # with itself
        ("en-fr/train.en", "en-fr/train.fr", "fr-en/test.en", "fr-en/test.fr"),  # twice
    ],
)
def test_a_folder_that_is_not_selected_stops_nothing(tmp_path: Path, odd: tuple[str, ...]) -> None:
    root = tree(tmp_path, *pair_files("de-en"), *odd)
    with pytest.raises(DataError):
        found(root)
    assert pairs(root, "de", "en") == ["de-en"]


def test_what_was_not_selected_is_counted(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("de-en"), *pair_files("en-fr"), "ids/x.ids")
    counts = found(root, "de", "en").left_out
    assert counts == {"pairs_not_selected": 1, "folders_ignored": 1}
    assert counts.names == {"folders_ignored": ["ids"]}


def test_a_wanted_language_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("chr-en"), *pair_files("de-en"))
    with pytest.raises(ConfigError, match=r"asks for chs, which no pair .*that are there: chr\)"):
        found(root, "chs", "de", "en")
    with pytest.raises(ConfigError, match=r"'cherokee' is the name .*. Write 'chr'"):
        found(root, "cherokee", "en")
    said = r"asks for chr, de, which .* Correct corpus\.languages, or add"
    with pytest.raises(ConfigError, match=said):
        found(root, "chr", "de")


def test_a_raw_path_that_is_no_folder_is_told_the_layout(tmp_path: Path) -> None:
    (tmp_path / "corpus.tar").write_text("x")
    with pytest.raises(DataError, match=r"corpus\.tar is not a folder\. Name a tree with folders"):
        found(tmp_path / "corpus.tar")


def imported(out_dir: Path, raw: Raw, **settings: object) -> Artifact:
    return run_import("import_corpus", out_dir, raw, corpus={"source": "moses", **settings})


def test_pairs_are_known_by_their_names(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        **{"Europarl.de-en.de": "eins\nzwei\n", "Europarl.de-en.en.gz": "one\ntwo\n"},
        **{"Europarl.de-en.ids": "1\n2\n", "README.md": "a\n", "README.txt": "b\n"},
        **{"wiki/GNOME.en-fr.fr": "un\n", "wiki/GNOME.en-fr.en": "one\n"},
        **{"small/train.de": "drei\n", "small/train.en": "three\n"},
        **{"news/newstest2014.en-de.en": "four\n", "news/newstest2014.en-de.de": "vier\n"},
    }
    corpus = imported(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert corpus.statistics["pairs"] == {
        "de-en": {"train": 3, "valid": 0, "test": 1},
        "en-fr": {"train": 1, "valid": 0, "test": 0},
    }
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei", "drei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two", "three"]
    assert read_lines(corpus, "test", "de-en", "de") == ["vier"]
    assert corpus.statistics["counts"]["files_ignored"] == 3


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (("newsdiscussdev2015", "newsdiscusstest2015"), {"train": 0, "valid": 1, "test": 1}),
        (("wmttest2022", "general-test", "generaltest2024"), {"train": 0, "valid": 0, "test": 3}),
        (("latest", "contest", "mytest", "devices"), {"train": 4, "valid": 0, "test": 0}),
    ],
)
def test_the_names_of_held_out_sets_of_wmt_are_known(
    names: Sequence[str], counts: dict[str, int], tmp_path: Path
) -> None:
    files = {f"{name}.de-en.{code}": "x\n" for name in names for code in ("de", "en")}
    assert imported(tmp_path / "corpus", files).statistics["pairs"] == {"de-en": counts}


@pytest.mark.parametrize(
    ("folders", "counts"),
    [
        (("train", "dev", "Test"), {"train": 1, "valid": 1, "test": 1}),
        (("test-drive", "a/devtest"), {"train": 1, "valid": 0, "test": 1}),
        (("test",), {"train": 1, "valid": 0, "test": 0}),
    ],
)
@pytest.mark.parametrize("source", ["moses", "tsv"])
def test_one_of_several_folders_may_be_named_by_its_split(
    folders: Sequence[str], counts: dict[str, int], source: str, tmp_path: Path
) -> None:
    text = {"a.de-en.de": "x\n", "a.de-en.en": "y\n", "a.de-en.tsv": "x\ty\n"}
    paths = tuple(write(tmp_path / "raw" / folder, text) for folder in folders)
    corpus = imported(tmp_path / "corpus", RawInput(paths), source=source)
    assert corpus.statistics["pairs"] == {"de-en": counts}


def test_only_languages_asked_for_are_opened(tmp_path: Path) -> None:
    files = {f"a.{pair}.{side}": "x\n" for pair in ("de-en", "en-fr") for side in pair.split("-")}
    raw = write(tmp_path / "raw", files)
    corpus = imported(tmp_path / "corpus", raw, languages=("eng", "fr"))
    assert set(corpus.statistics["pairs"]) == {"en-fr"}
    assert corpus.statistics["counts"]["pairs_not_selected"] == 1
    with pytest.raises(ConfigError, match="asks for de, fr"):
        imported(tmp_path / "again", raw, languages=("de", "fr"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.de-en.de"], r"a\.de-en\.de has no counterpart in en\. Add a\.de-en\.en"),
        (["a.de-en.de", "a.de-en.de.gz", "a.de-en.en"], "are both a.de-en in de. Remove one"),
        (["train.de", "train.en", "train.fr"], "are more than two files of one name"),
        (["a.de-deu.de", "a.de-deu.deu"], "are both text of de"),
        (["a.txt"], "holds no pairs of files"),
    ],
)
def test_names_that_are_no_pairs_are_told(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        imported(tmp_path / "corpus", dict.fromkeys(names, "x\n"))


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a\.zst needs .* zstandard .*'mmnmt\[zstd\]', or "):
        list(iterate_raw_lines(tmp_path / "a.zst", max_line_bytes=10))


def test_zstandard_files_have_the_lines_of_plain_ones(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    frames = [b"one\ntwo\n" * 50_000, b"three\n", b"x" * 3_000_000]
    path = tmp_path / "a.zst"
    path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, frames)))
    lines = b"".join(frames).split(b"\n")
    assert list(iterate_raw_lines(path, max_line_bytes=2**22)) == lines
    assert b"".join(iterate_blocks(path)) == b"".join(frames)


@pytest.mark.parametrize("fault", ["cut", "junk", "other"])
def test_damaged_zstandard_files_are_told(tmp_path: Path, fault: str) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    whole = zstandard.ZstdCompressor().compress(b"one\ntwo\n" * 50_000)
    path = tmp_path / "a.zst"
    path.write_bytes({"cut": whole[:-3], "junk": whole + b"junk" * 9, "other": b"text\n"}[fault])
    with pytest.raises(DataError, match=r"a\.zst is not a complete Zstandard file \("):
        list(iterate_raw_lines(path, max_line_bytes=100))


MEMORY = (
    '<tmx version="1.4"><body><tu>'
    '<tuv xml:lang="fr-FR"><seg>trois</seg></tuv><tuv xml:lang="en-GB"><seg>three</seg></tuv>'
    '<tuv xml:lang="de-DE"><seg>drei</seg></tuv></tu></body></tmx>'
)


def entry(*paths: str, pair: str = "de-en", split: str = "train") -> dict[str, Any]:
    return {"split": split, "pair": pair, "paths": paths}


def imported_list(out_dir: Path, raw: Path, *files: dict[str, Any], **settings: object) -> Artifact:
    return run_import(
        "import_corpus", out_dir, raw, corpus={"source": "listed", "files": files, **settings}
    )


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
    corpus = imported_list(
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


def test_columns_of_no_listed_table_are_refused(tmp_path: Path, raw: Path) -> None:
    for files in ([entry("a.german.gz", "a.english")], [entry("c.tmx"), entry("c.tmx")]):
        with pytest.raises(ConfigError, match=r"corpus\.files has no table with corpus\.columns"):
            imported_list(tmp_path / "corpus", raw, *files, columns={"de": "source"})


@pytest.mark.parametrize("name", ["e.tsv", "e.csv"])
def test_columns_that_the_recipe_names_are_those_of_every_listed_table(
    tmp_path: Path, raw: Path, name: str
) -> None:
    mark = "\t" if name == "e.tsv" else ","
    rows = (("score", "target", "source"), ("1", "five", "fünf"))
    write(raw, {name: "".join(mark.join(row) + "\n" for row in rows)})
    columns = {"de": "source", "en": "target"}
    corpus = imported_list(tmp_path / "corpus", raw, entry(name), columns=columns)
    assert read_lines(corpus, "train", "de-en", "de") == ["fünf"]
    assert read_lines(corpus, "train", "de-en", "en") == ["five"]


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


@pytest.mark.parametrize(
    ("tags", "listed", "regions", "pairs"),
    [
        (("zh-TW", "zh-CN"), ("en-zho_Hant", "en-zho_Hans"), "joined", {"en-zh", "en-zh_Hant"}),
        (("pt-BR", "pt-PT"), ("en-pt_BR", "en-pt"), "apart", {"en-pt", "en-pt_BR"}),
    ],
)
def test_the_list_says_which_script_a_file_is_in_and_which_region_it_is_from(
    tmp_path: Path, raw: Path, tags: Sequence[str], listed: Any, regions: str, pairs: set[str]
) -> None:
    write(raw, {f"{tag}.tmx": MEMORY.replace("fr-FR", tag) for tag in tags})
    files = [entry(f"{tag}.tmx", pair=pair) for tag, pair in zip(tags, listed, strict=True)]
    corpus = imported_list(tmp_path / "corpus", raw, *files, regions=regions)
    assert set(corpus.statistics["pairs"]) == pairs


def test_only_listed_files_of_languages_asked_for_are_opened(tmp_path: Path, raw: Path) -> None:
    files = entry("a.german.gz", "a.english"), entry("nowhere.tmx", pair="en-fr")
    corpus = imported_list(tmp_path / "corpus", raw, *files, languages=("de", "en"))
    assert corpus.statistics["counts"]["pairs_not_selected"] == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], r"corpus\.files is empty"),
        ([entry("a.english", pair="de")], "names the pair 'de'. Write two codes of ISO 639"),
        ([entry("a.english", pair="en-sr-Latn")], "'en-sr-Latn'. Write .* as in de-en or en-sr_L"),
        ([entry("a.english", pair="de-de")], "names the pair 'de-de'"),
        ([entry("a.english", "b.english")], "b.english, which corpus.files names, is not a file"),
        ([entry("a.english", "loop")], "loop, which corpus.files names, is not a file"),
        ([entry("a.english", "loop/a")], "loop/a, which corpus.files names, is not a file"),
        ([entry("a.english", "a.english")], "a.english for both sides of de-en. Name a file per"),
        ([entry("a.english", "./a.english")], r"names \S+/a\.english for both sides of de-en"),
        ([entry("../raw2/a.tsv")], "lies outside of"),
        ([entry("a.english")], r"but ends in none of \.tmx, \.tsv"),
        ([entry("c.tmx", pair="en-es")], r"c\.tmx has no record with .* both languages of en-es"),
        ([entry("b.tsv", pair="en-fr"), entry("c.tmx", pair="en-zh")], "languages of en-zh"),
        ([entry("unlisted.tmx")], r"unlisted\.tmx, line 1, is not well-formed XML"),
    ],
)
def test_bad_lists_fail(tmp_path: Path, raw: Path, files: list[dict[str, Any]], said: str) -> None:
    (raw / "loop").symlink_to("loop")
    with pytest.raises((ConfigError, DataError), match=said):
        imported_list(tmp_path / "corpus", raw, *files)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path, raw: Path) -> None:
    with pytest.raises(ConfigError, match="is not one folder"):
        imported_list(tmp_path / "corpus", raw / "c.tmx", entry("c.tmx"))
