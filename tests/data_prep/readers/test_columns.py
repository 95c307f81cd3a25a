"""Parquet, JSON lines and CSV: columns of text become pairs, row by row."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_trees import run_import, write

from data_prep.readers.raw_files import RawFile
from data_prep.readers.tables import open_columns
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.artifacts.settings import CorpusConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError, DataError

SOURCE_TARGET = {"de": "source", "en": "target"}


def imported(out_dir: Path, raw: Path, **settings: object) -> Artifact:
    config = CorpusConfig.model_validate({"source": "columns", **settings})
    return run_import("import_corpus", out_dir, raw, Recipe(name="test", corpus=config))


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sides(corpus: Artifact, split: Any = "train") -> list[tuple[str, str]]:
    both = (read_lines(corpus, split, "de-en", code) for code in ("de", "en"))
    return list(zip(*both, strict=True))


# ---------------------------------------------------------------- JSON lines and CSV


def test_pairs_are_named_by_file_or_folder_and_columns_by_language(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw",
        {
            "train.en-de.jsonl.gz": json_lines({"en": "one", "de": "eins", "score": 0.5}),
            "de-en/train.json": json_lines({"translation": {"de": "zwei", "en": "two", "fr": "x"}}),
            "de-en/validation.csv": '"en","de"\n"three, or so","drei\n(3)"\n',
            "README.md": "no text",
        },
    )
    corpus = imported(tmp_path / "corpus", raw)
    assert sides(corpus) == [("zwei", "two"), ("eins", "one")]
    assert sides(corpus, "valid") == [("drei (3)", "three, or so")]


def test_a_recipe_names_the_columns_of_files_that_do_not(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw",
        {
            "a.jsonl": json_lines(
                {"source": "eins", "target": "one"},
                {"source": None, "target": "two"},
                {"source": "drei", "target": " "},
                {"source": "vier", "target": "four"},
            ),
            "b.csv": "\ufefftarget,source\nfive,fünf\n",
        },
    )
    corpus = imported(tmp_path / "corpus", raw, columns=SOURCE_TARGET)
    assert sides(corpus) == [("eins", "one"), ("vier", "four"), ("fünf", "five")]
    assert corpus.statistics["counts"]["records_one_sided"] == 2


def test_the_name_of_a_file_goes_before_that_of_its_folder(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw", {"de-en/a.en-fr.jsonl": "", "de-en/b.csv": "", "de-en/c.csv": "de,en"}
    )
    corpus = imported(tmp_path / "corpus", raw)
    assert set(corpus.statistics["pairs"]) == {"de-en", "en-fr"}


def test_rows_that_are_no_pair_of_texts_go_to_the_quarantine(tmp_path: Path) -> None:
    good = json_lines({"de": "eins", "en": "one"})
    bad = ["{", '"text"', '{"de": 1, "en": "x"}', '{"de": "\\ud800", "en": "x"}', "[" * 99_999]
    raw = write(
        tmp_path / "raw",
        {
            "de-en/train.jsonl": good + "\n".join(bad) + "\n" + good,
            "de-en/test.csv": b'de,en\neins,one\nzwei\n"drei"x,three\nvi\xffer,four\nf,"five',
        },
    )
    corpus = imported(tmp_path / "corpus", raw, max_line_bytes=1000)
    assert sides(corpus) == [("eins", "one")] * 2
    assert sides(corpus, "test") == [("eins", "one")]
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert {(record["file"], record["line"], record["reason"]) for record in listed} == {
        *(("de-en/train.jsonl", line, "malformed") for line in (2, 3, 4, 6)),
        ("de-en/train.jsonl", 5, "invalid_utf8"),
        *(("de-en/test.csv", line, "malformed") for line in (3, 4, 6)),
        ("de-en/test.csv", 5, "invalid_utf8"),
    }


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc"))).map(str.strip)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8))
def test_csv_is_read_as_the_standard_library_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerows([("de", "en"), *rows])
    root = tmp_path_factory.mktemp("csv")
    path = write(root, {"train.csv": stream.getvalue()}) / "train.csv"
    table = open_columns(RawFile(path, "train.csv"), "train", CorpusConfig(), pair=("de", "en"))
    expected = [
        {code: side.encode() for code, side in zip(("de", "en"), row, strict=True) if side}
        for row in rows
    ]
    assert [record.texts for record in table.records()] == expected
    assert not any(record.is_malformed for record in table.records())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("de-en/a.jsonl", json_lines({"de": "x", "fr": "y"}), r"no column en \(it has de, fr\)"),
        ("de-en/a.csv", "fr,en\na,b\n", r"has no column de"),
        ("de-en/a.jsonl", "eins\n", "line 1, is not a row of a .jsonl file"),
        ("a.jsonl", json_lines({"de": "x", "en": "y"}), "Nothing says which languages"),
        ("a.de-en.en-fr.jsonl", "", "is named as text of de-en and en-fr"),
    ],
)
def test_files_without_the_columns_are_told(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    raw = write(tmp_path / "raw", {name: content})
    with pytest.raises(DataError, match=said):
        imported(tmp_path / "corpus", raw)


# ---------------------------------------------------------------- Parquet


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    raw = write(tmp_path / "raw", {"de-en/train.parquet": "x"})
    with pytest.raises(ConfigError, match=r"train\.parquet is a Parquet file.*'mmnmt\[parquet\]'"):
        imported(tmp_path / "corpus", raw)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)


def test_a_local_copy_of_opus_100_is_read(tmp_path: Path) -> None:
    rows = [{"translation": {"de": f"eins {n}", "en": f"one {n}"}} for n in range(2500)]
    folder = tmp_path / "raw" / "de-en"
    write_parquet(folder / "train-00000-of-00002.parquet", rows[:2000])
    write_parquet(folder / "train-00001-of-00002.parquet", rows[2000:])
    write_parquet(folder / "validation-00000-of-00001.parquet", rows[:2])
    corpus = imported(tmp_path / "corpus", tmp_path / "raw", max_train_lines=2400)
    assert sides(corpus) == [(f"eins {n}", f"one {n}") for n in range(2400)]
    assert corpus.statistics["pairs"]["de-en"]["valid"] == 2


def test_parquet_with_a_column_per_language_is_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"source": "eins", "target": "one", "n": 1},
        {"source": None, "target": "two", "n": 2},
    ]
    write_parquet(tmp_path / "raw" / "a.parquet", rows)
    corpus = imported(tmp_path / "corpus", tmp_path / "raw", columns=SOURCE_TARGET)
    assert sides(corpus) == [("eins", "one")]


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "de-en" / "train.parquet"
    write_parquet(path, [{"de": "eins", "en": "one"}])
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train\.parquet is not a complete Parquet file \("):
        imported(tmp_path / "corpus", tmp_path / "raw")
