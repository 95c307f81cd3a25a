"""Tables: TSV, Parquet, JSON lines and CSV become pairs, row by row."""

import codecs
import csv
import io
import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_trees import Raw, run_import, write

from data_prep import import_corpus
from data_prep.readers import tables
from data_prep.readers.raw_text import RawFile, Record, SkippedText
from data_prep.readers.tables import Columns, iterate_rows, open_table
from data_prep.settings import CorpusConfig
from pipeline.artifacts import raw_input as raw_bytes
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.spelling import is_blank
from pipeline.errors import ConfigError, DataError

TED = (
    "talk_name\ten\tpt-br\tpt\tfr\tcalv\tzh-cn\tzh-tw\n"
    "a\tone\tum\tum (PT)\tun\tx\t一\t一 (TW)\n"
    "b\ttwo\tdois\t__NULL__\t__NULL__\tx\t__NULL__\t二\n"
    "c\t__NULL__\t__NULL__\ttrês\ttrois\tx\t三\t__NULL__\n"
    "d\tfour\t__NULL__\t__NULL__\t \tx\t\t__NULL__\n"
)


def import_tsv(out_dir: Path, raw: Raw, **settings: object) -> Artifact:
    return run_import("import_corpus", out_dir, raw, corpus={"source": "tsv", **settings})


def import_columns(out_dir: Path, raw: Raw, **settings: object) -> Artifact:
    return import_tsv(out_dir, raw, **{"source": "columns", **settings})


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sides(corpus: Artifact, split: Any = "train") -> list[tuple[str, str]]:
    both = (read_lines(corpus, split, "de-en", code) for code in ("de", "en"))
    return list(zip(*both, strict=True))


def quarantined(corpus: Artifact) -> list[tuple[str, int, str]]:
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    return [(record["file"], record["line"], record["reason"]) for record in listed]


def test_a_pair_named_by_its_file_is_in_two_columns(tmp_path: Path) -> None:
    """A first row of words that are codes is no header of it."""
    files: dict[str, str | bytes] = {
        "train.en-de.tsv": "as\tso\none\teins\ntwo\tzwei\r\n",
        "de-en/newstest2020.tsv.gz": "vier\tfour\n",
    }
    corpus = import_tsv(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert corpus.statistics["pairs"] == {"de-en": {"train": 3, "valid": 0, "test": 1}}
    assert sides(corpus) == [("so", "as"), ("eins", "one"), ("zwei", "two")]


CELLS = (
    *(b"", b"__NULL__", b" ", "\N{NO-BREAK SPACE}".encode(), "\ufeffeins".encode(), b"zw\vei"),
    *("drei\u2028 vier".encode(), b"f\xffnf", b"se\0chs", b"x" * 60, b"sieben\r"),
)
"""Cells that are missing, that need repair, or that are not text."""


def table(draw: random.Random, rows: int) -> bytes:
    """Rows in five languages, some of them malformed, some cells odd or missing."""
    lines = [b"en\tfr\tde\ttalk\tru\tpl"]
    for row in range(rows):
        cells = [f"{code} {row}".encode() for code in ("en", "fr", "de", "talk", "ru", "pl")]
        for place in range(6):
            if draw.random() < 0.08:
                cells[place] = draw.choice(CELLS)
        lines.append(b"\t".join(cells[: 4 if draw.random() < 0.02 else 6]))
    return b"\n".join(lines)


@pytest.mark.parametrize("limit", [None, 0, 1, 40, 90])
def test_one_pass_finds_what_reading_the_table_for_each_pair_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """A list of the same files reads a table for one pair at a time."""
    draw = random.Random(f"{limit}")
    names = {"a.tsv": "train", "b.tsv": "train", "c.test.tsv": "test", "d.tsv": "train"}
    raw = write(tmp_path / "raw", {name: table(draw, 80) for name in names})
    pairs = ["-".join(pair) for pair in combinations(["de", "en", "fr", "pl", "ru"], 2)]
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 50)
    limits = {"max_test_lines": limit} | ({"max_train_lines": limit} if limit else {})
    files = [
        {"split": names[name], "pair": pair, "paths": [name]} for pair in pairs for name in names
    ]
    apart = import_tsv(tmp_path / "apart", raw, source="listed", files=files, **limits)
    for block in (1, 7, 1000):
        monkeypatch.setattr(import_corpus, "BLOCK_RECORDS", block)
        together = import_tsv(tmp_path / f"together-{block}", raw, **limits)
        assert together.manifest.files == apart.manifest.files
        assert together.statistics == apart.statistics
        assert together.manifest.summary == apart.manifest.summary


def test_a_block_holds_few_long_texts_and_many_short_ones() -> None:
    def sizes(text: bytes, records: int) -> list[int]:
        found = (Record(number, {"de": text}) for number in range(records))
        blocks = import_corpus.blocks_of(found, [("de",)], reader="tsv")
        return [len(block.numbers) for block in blocks]

    assert sizes(b"x" * import_corpus.BLOCK_BYTES, 3) == [1, 1, 1]
    assert sizes(b"x", import_corpus.BLOCK_RECORDS + 5) == [import_corpus.BLOCK_RECORDS, 5]


def test_a_table_of_pairs_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def counted(path: Path, *, max_line_bytes: int) -> Iterator[bytes]:
        opened.append(path)
        return raw_bytes.iterate_raw_lines(path, max_line_bytes=max_line_bytes)

    monkeypatch.setattr(tables, "iterate_raw_lines", counted)
    corpus = import_tsv(tmp_path / "corpus", {"a.tsv": TED})
    assert len(corpus.statistics["pairs"]) > 5
    assert len(opened) == 2, "once for the header, once for the rows"


def test_a_header_says_the_order_of_the_columns_and_which_are_text(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "train.de-en.tsv": "\ufeffscore\tEN\tfr\tde\n0.9\tone\tun\teins\n",
        "more.tsv": "de\tsource\ten\nzwei\tweb\ttwo\n",
    }
    corpus = import_tsv(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert line_counts(corpus, "train") == {"de-en": 2}
    assert sides(corpus) == [("zwei", "two"), ("eins", "one")]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            dict.fromkeys(("a.tsv", "b.tsv"), "EN\tde_DE\tx-foo\t\none\teins\t1\t2\n"),
            "2 columns not named like a language (x-foo, column 4)",
        ),
        (
            {"train.de-en.tsv": "en\tscore\tde\tfr\none\t1\teins\tun\n"},
            "1 column not named like a language (score)",
        ),
    ],
)
def test_columns_not_read_are_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    corpus = import_tsv(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert f"left out: {said}" in corpus.manifest.summary


def brute_force_pairs(
    table: str, columns: dict[str, list[str]]
) -> dict[str, list[tuple[str, str]]]:
    """Pair → lines, by reading the whole table into dicts."""
    rows = list(csv.DictReader(table.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    found: dict[str, list[tuple[str, str]]] = {}
    for one, other in combinations(sorted(columns), 2):
        sides = [
            [
                next((row[name] for name in columns[code] if row[name].strip() not in NULL), None)
                for code in (one, other)
            ]
            for row in rows
        ]
        lines = [(a, b) for a, b in sides if a is not None and b is not None]
        found[f"{one}-{other}"] = lines
    return found


NULL = ("", "__NULL__")
BOTH = {"en": ["en"], "fr": ["fr"]}
JOINED = {**BOTH, "pt": ["pt", "pt-br"], "zh": ["zh-cn"], "zh_Hant": ["zh-tw"]}
APART = {**BOTH, "pt": ["pt"], "pt_BR": ["pt-br"], "zh_CN": ["zh-cn"], "zh_TW": ["zh-tw"]}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("regions", "columns"), [("joined", JOINED), ("apart", APART)])
def test_the_table_of_talks_is_joined_as_by_brute_force(
    tmp_path: Path, split: str, regions: str, columns: dict[str, list[str]]
) -> None:
    raw = write(tmp_path / "raw", {f"all_talks_{split}.tsv": TED})
    corpus = import_tsv(tmp_path / "corpus", raw, directions="zero_shot", regions=regions)
    expected = {
        pair: lines
        for pair, lines in brute_force_pairs(TED, columns).items()
        if split == "test" or "en" in pair.split("-")
    }
    for pair, lines in expected.items():
        first, second = pair.split("-")
        sides = (read_lines(corpus, split, pair, code) for code in (first, second))  # type: ignore[arg-type]
        assert list(zip(*sides, strict=True)) == lines
    assert {pair for pair, counts in corpus.statistics["pairs"].items() if counts[split]} == {
        pair for pair, lines in expected.items() if lines
    }


def test_languages_asked_for_are_the_columns_read(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"all_talks_train.tsv": TED})
    corpus = import_tsv(tmp_path / "corpus", raw, languages=("en", "zho_Hant"))
    assert line_counts(corpus, "train") == {"en-zh_Hant": 2}
    with pytest.raises(ConfigError, match="asks for el"):
        import_tsv(tmp_path / "again", raw, languages=("en", "fr", "el"))


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        *(("zh_TW", ["繁"]), ("zh-CN", ["简"]), ("pa_PK", ["شاہ"]), ("pan-IN", ["ਗੁਰ"])),
        *(("fr-CA", ["char"]), ("fr", ["voiture"]), ("twi", ["twi"]), ("aka_Latn", ["aka"])),
    ],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_language_asked_for_by_region_or_variety_is_the_column_read(
    tmp_path: Path, wanted: str, texts: list[str], is_listed: bool
) -> None:
    table = (
        "en\tzh-cn\tzh_tw\tpa_IN\tpa_PK\tfr\tfr-ca\taka_Latn\ttwi_Latn\n"
        "one\t简\t繁\tਗੁਰ\tشاہ\tvoiture\tchar\taka\ttwi\n"
    )
    settings: dict[str, Any] = {"languages": ["en", wanted]}
    if is_listed:
        pair = f"en-{wanted.replace('-', '_')}"
        entry = {"split": "train", "pair": pair, "paths": ["train.tsv"]}
        settings = {"source": "listed", "files": [entry]}
    corpus = import_tsv(tmp_path / "corpus", {"train.tsv": table}, **settings)
    (pair,) = corpus.statistics["pairs"]
    (code,) = set(pair.split("-")) - {"en"}
    assert read_lines(corpus, "train", pair, code) == texts


def test_a_column_of_a_region_can_be_asked_for_alone(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"all_talks_train.tsv": TED})
    for spelling in ("pt_BR", "pt-br"):
        corpus = import_tsv(tmp_path / spelling, raw, languages=("en", spelling), regions="apart")
        assert line_counts(corpus, "train") == {"en-pt_BR": 2}
        assert read_lines(corpus, "train", "en-pt_BR", "pt_BR") == ["um", "dois"]
    corpus = import_tsv(tmp_path / "pt", raw, languages=("en", "pt"), regions="apart")
    assert read_lines(corpus, "train", "en-pt", "pt") == ["um (PT)"]
    assert corpus.statistics["languages"]["pt"]["spellings"] == ["pt"]


def test_rows_of_other_columns_and_no_text_go_to_the_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 100)
    text = b"eins\tone\nzwei\ndrei\tthree\t0.9\nvi\xffer\tfour\n" + b"a" * 500 + b"\tlong\nx\ty\n"
    corpus = import_tsv(tmp_path / "corpus", {"train.de-en.tsv": text})
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "y"]
    assert [(line, reason) for _, line, reason in quarantined(corpus)] == [
        *((2, "malformed"), (3, "malformed"), (4, "invalid_utf8"), (5, "malformed"))
    ]
    assert corpus.statistics["counts"]["lines_malformed"] == 3
    assert any("malformed in de" in line for line in corpus.manifest.summary)


@pytest.mark.parametrize("name", ["train.tsv", "train.de-en.tsv"])
def test_a_table_with_several_columns_of_one_name_is_refused(name: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {name: "note\ten\tde\tnote\ten\nx\tone\teins\ty\ttwo\n"})
    with pytest.raises(DataError, match=r"tsv has several columns 'en'\. Rename those that"):
        import_tsv(tmp_path / "corpus", raw)
    raw = write(tmp_path / "raw", {name: "note\ten\tde\tnote\nx\tone\teins\ty\n"})
    assert import_tsv(tmp_path / "corpus", raw).statistics["pairs"]["de-en"]["train"] == 1


def test_no_more_is_read_than_rows_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.de-en.tsv"
    path.write_text("eins\tone\n" * 20_000)
    read = 0

    def counted(place: Path, *, max_line_bytes: int) -> Iterator[bytes]:
        nonlocal read
        for line in raw_bytes.iterate_raw_lines(place, max_line_bytes=max_line_bytes):
            read += 1
            yield line

    monkeypatch.setattr("data_prep.readers.tables.iterate_raw_lines", counted)
    table = open_table(RawFile(path, path.name), "train", CorpusConfig(), left_out=SkippedText())
    read = 0
    for number, _ in enumerate(table.records(), start=1):
        assert read == number


SOURCE_TARGET = {"de": "source", "en": "target"}


def test_pairs_are_named_by_file_or_folder_and_columns_by_language(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "train.en-de.jsonl.gz": json_lines({"en": "one", "de": "eins", "score": 0.5}),
        "de-en/train.json": json_lines({"translation": {"de": "zwei", "en": "two", "fr": "x"}}),
        "de-en/validation.csv": '"en","de"\n"three, or so","drei\n(3)"\n',
        "README.md": "no text",
    }
    corpus = import_columns(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert sides(corpus) == [("zwei", "two"), ("eins", "one")]
    assert sides(corpus, "valid") == [("drei (3)", "three, or so")]


def test_a_recipe_names_the_columns_of_files_that_do_not(tmp_path: Path) -> None:
    pairs = [("eins", "one"), (None, "two"), ("drei", " "), ("vier", "four")]
    rows = json_lines(*({"source": german, "target": english} for german, english in pairs))
    files: dict[str, str | bytes] = {"a.jsonl": rows, "b.csv": "\ufefftarget,source\nfive,fünf\n"}
    corpus = import_columns(tmp_path / "corpus", files, columns=SOURCE_TARGET)
    assert sides(corpus) == [("eins", "one"), ("vier", "four"), ("fünf", "five")]
    assert corpus.statistics["counts"]["records_one_sided"] == 2


@pytest.mark.parametrize(
    "header", ['"de","en"', '"note, with commas","en","de"', "de,en", '\n"de",en', '"de\n",en']
)
def test_a_byte_order_mark_may_stand_before_any_header_of_csv(header: str, tmp_path: Path) -> None:
    row = '"x","one","eins"\n' if "note" in header else '"eins","one"\n'
    corpus = import_columns(tmp_path / "corpus", {"de-en/train.csv": f"\ufeff{header}\n{row}"})
    assert sides(corpus) == [("eins", "one")]


def test_a_recipe_names_the_columns_of_tsv_files(tmp_path: Path) -> None:
    table = "target\tid\tsource\none\t1\teins\ntwo\t2\tzwei\n"
    raw = write(tmp_path / "raw", {"a.tsv": table, "b.de-en.tsv": table})
    corpus = import_columns(tmp_path / "corpus", raw, source="tsv", columns=SOURCE_TARGET)
    assert sides(corpus) == [("eins", "one"), ("zwei", "two")] * 2
    columns = {"de": "source", "en": "goal"}
    with pytest.raises(DataError, match=r"no column goal \(it has target, id, source\)"):
        import_columns(tmp_path / "other", raw, source="tsv", columns=columns)


def test_the_name_of_a_file_goes_before_that_of_its_folder(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw", {"de-en/a.en-fr.jsonl": "", "de-en/b.csv": "", "de-en/c.csv": "de,en"}
    )
    corpus = import_columns(tmp_path / "corpus", raw)
    assert set(corpus.statistics["pairs"]) == {"de-en", "en-fr"}


def test_rows_of_no_pair_are_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json_lines({"de": "eins", "en": "one"})
    bad = ["{", '"text"', '{"de": 1, "en": "x"}', '{"de": "\\ud800", "en": "x"}', "[" * 99_999]
    files: dict[str, str | bytes] = {
        "de-en/train.jsonl": good + "\n".join(bad) + "\n" + good,
        "de-en/test.csv": b'de,en\neins,one\nzwei\n"drei"x,three\nvi\xffer,four\nf,"five',
    }
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 1000)
    corpus = import_columns(tmp_path / "corpus", files)
    assert sides(corpus) == [("eins", "one")] * 2
    assert sides(corpus, "test") == [("eins", "one")]
    assert {*quarantined(corpus)} == {
        *(("de-en/train.jsonl", line, "malformed") for line in (2, 3, 4, 6)),
        ("de-en/train.jsonl", 5, "invalid_utf8"),
        *(("de-en/test.csv", line, "malformed") for line in (3, 4, 6)),
        ("de-en/test.csv", 5, "invalid_utf8"),
    }


@pytest.mark.parametrize(
    ("rows", "kept", "malformed"),
    [
        ('Eins,one\n"Zwei,two\nDrei,three\n', ["Eins", "Drei"], [3]),
        ('"Eins,one\nZwei,two\n"Drei, 3",three\n', ["Zwei", "Drei, 3"], [2]),
        ('Eins,"one\nZwei,"two\n"Drei\n(3)",three\n', ["Drei (3)"], [2, 3]),
        ('"Eins\n(1)",one,more\nZwei,two\n', ["Zwei"], [2, 3]),
        ('"Eins\n(1)"x,one\nZwei,two\n', ["Zwei"], [2, 3]),
    ],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_damaged_record_of_a_csv_file_hides_no_other_lines(
    tmp_path: Path, rows: str, kept: list[str], malformed: list[int], is_listed: bool
) -> None:
    settings: dict[str, object] = {}
    if is_listed:
        entry = {"split": "train", "pair": "de-en", "paths": ["de-en/train.csv"]}
        settings = {"source": "listed", "files": [entry]}
    corpus = import_columns(tmp_path / "corpus", {"de-en/train.csv": f"de,en\n{rows}"}, **settings)
    assert read_lines(corpus, "train", "de-en", "de") == kept
    assert [line for _, line, _ in quarantined(corpus)] == malformed


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl", '{"de": null}\n{"id": 7}\n{"en": "one"}\n{"de": "zwei", "en": "two"}\n'),
        ("train.jsonl", '{"translation": {}}\n{"translation": {"de": "zwei", "en": "two"}}\n'),
        ("train.jsonl", '{"translation": null}\n{"translation": {"de": "zwei", "en": "two"}}\n'),
        ("train.jsonl", '# no row\n{"de": "zwei", "en": "two"}\n'),
        ("train.csv", "en,de\n,\ntwo,zwei\n"),
    ],
)
def test_a_first_row_may_lack_text(tmp_path: Path, name: str, content: str) -> None:
    raw = write(tmp_path / "raw", {f"de-en/{name}": content})
    assert sides(import_columns(tmp_path / "corpus", raw)) == [("zwei", "two")]


@pytest.mark.parametrize(
    ("source", "name", "rows"),
    [
        ("columns", "a.jsonl", ['{"de": "eins", "en": "one"}', '{"de": "zwei", "en": "two"}']),
        ("columns", "a.csv", ["de,en", "eins,one", "zwei,two"]),
        ("tsv", "a.tsv", ["de\ten", "eins\tone", "zwei\ttwo"]),
        ("tsv", "a.tsv", ["eins\tone", "zwei\ttwo"]),
    ],
)
def test_blank_lines_are_no_damage(tmp_path: Path, source: str, name: str, rows: list[str]) -> None:
    blank = "\n\n \u2060\r\n\u200b\ufeff\n\u200e\u00ad\n\u3000\n"
    content = blank + blank.join(rows) + "\n" * 30
    corpus = import_columns(tmp_path / "corpus", {f"de-en/{name}": content}, source=source)
    assert sides(corpus) == [("eins", "one"), ("zwei", "two")]
    assert quarantined(corpus) == []


def test_a_row_of_empty_cells_is_counted_and_no_blank_line(tmp_path: Path) -> None:
    text = "de\ten\n\neins\tone\n\t\n\u3000\n\u200b\t\u00ad\n"
    path = write(tmp_path, {"train.tsv": text}) / "train.tsv"
    columns = Columns({0: "de", 1: "en"}, width=2, has_header=True)
    rows = iterate_rows(RawFile(path, "train.tsv"), columns)
    assert [(row.line, row.texts) for row in rows] == [
        (3, {"de": b"eins", "en": b"one"}),
        (4, {}),
        (6, {}),
    ]


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc"))).map(str.strip)


def test_a_cell_of_a_csv_file_may_be_as_long_as_a_line_of_text(tmp_path: Path) -> None:
    texts = ["a" * 131_073, "b" * 2**20, "c" * (2**20 + 1), "d"]
    rows = "".join(f'{text},one,"{"note " * (text == "d") * 10**5}"\n' for text in texts)
    corpus = import_columns(tmp_path / "corpus", {"de-en/train.csv": f"de,en,notes\n{rows}"})
    assert read_lines(corpus, "train", "de-en", "de") == [*texts[:2], "d"]
    assert quarantined(corpus) == [("de-en/train.csv", 4, "too_long")]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8))
def test_csv_is_read_as_the_standard_library_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerows([("de", "en"), *rows])
    root = tmp_path_factory.mktemp("csv")
    path = write(root, {"train.csv": stream.getvalue()}) / "train.csv"
    file, left_out = RawFile(path, "train.csv"), SkippedText()
    table = open_table(file, "train", CorpusConfig(), left_out=left_out, pair=("de", "en"))
    both = [dict(zip(("de", "en"), row, strict=True)) for row in rows]
    expected = [
        {code: side.encode() for code, side in row.items() if not is_blank(side)} for row in both
    ]
    assert [record.texts for record in table.records()] == expected
    assert not any(record.is_malformed for record in table.records())


QUOTES = "".join(
    ["de,en\n", *(f"{chr(34) * (n % 3 == 0)}Zeile {n},line {n}\n" for n in range(300))]
)
"""A quote in front of every third line."""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("de-en/a.jsonl", json_lines({"de": "x", "fr": "y"}), r"no column en \(it has de, fr\)"),
        ("de-en/a.csv", "fr,en\na,b\n", r"has no column de"),
        ("de-en/a.csv", f"{'9' * 5000}\n1\n", r"has no column de, en \(it has 9{5,200}…\)\. Set"),
        ("de-en/a.jsonl", "eins\n", "line 1, is not a row of a .jsonl file"),
        ("de-en/a.json", '[{"de": "a", "en": "b"}]', "is one JSON array. Write an object per line"),
        ("de-en/a.json", '[\n{"de": "a", "en": "b"}\n]\n', "is one JSON array"),
        ("de-en/a.csv", "de;en\nEins;one\n", "has ';' between its columns. Save it with commas"),
        ("de-en/a.csv", "de;en\nHallo, Welt;Hello, world\n", "has ';' between its columns"),
        ("de-en/a.csv", '"de";"en"\n"Hallo, Welt";"Hello, world"\n', "has ';' between"),
        ("de-en/a.csv", "de\ten\nEins\tone\n", r"has '\\t' between its columns"),
        ("a.jsonl", json_lines({"de": "x", "en": "y"}), "or name the file like train.de-en.jsonl"),
        ("de-en/a.csv", "de,en,de\nEins,one,1\n", "has several columns 'de'. Rename those"),
        ("de-en/a.jsonl", '{"de": "x"}\n'.encode("utf-16"), "UTF-16. Convert it to UTF-8"),
        ("de-en/a.csv", codecs.BOM_UTF16_BE + "de,en\n".encode("utf-16-be"), "is UTF-16"),
        ("a.de-en.en-fr.jsonl", "", "is named as text of de-en and en-fr"),
        ("de-en/a.csv", QUOTES, r"100 of 300 lines cannot be read .* \(malformed\)"),
        ("de-en/a.csv", '"de,en\neins,one\n', r"line 1, is not a row of a \.csv file"),
        (
            "de-en/a.tsv",
            "0.9\teins\tone\n" * 2,
            r"2 of 2 lines .*\(malformed\)\. Correct",
        ),
        ("a.tsv", "eins\tone\n", r"a\.tsv, line 1, names fewer than two languages"),
    ],
)
def test_bad_columns_are_told(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    raw = write(tmp_path / "raw", {name: content})
    with pytest.raises(DataError, match=said):
        import_tsv(tmp_path / "corpus", raw, source="tsv" if ".tsv" in name else "columns")


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"train\.parquet needs the package.*'mmnmt\[parquet\]'"):
        import_columns(tmp_path / "corpus", {"de-en/train.parquet": "x"})


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
    corpus = import_columns(tmp_path / "corpus", tmp_path / "raw", max_train_lines=2400)
    assert sides(corpus) == [(f"eins {n}", f"one {n}") for n in range(2400)]
    assert corpus.statistics["pairs"]["de-en"]["valid"] == 2


def test_parquet_with_two_columns_of_one_language_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write(tmp_path / "raw", {"de-en/train.parquet": ""}) / "de-en/train.parquet"
    texts = [pyarrow.array([text]) for text in ("eins", "one", "two")]
    table = pyarrow.Table.from_arrays(texts, names=["de", "en", "en"])
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    with pytest.raises(DataError, match=r"train\.parquet has several columns 'en'\. Rename"):
        import_columns(tmp_path / "corpus", tmp_path / "raw")


def test_parquet_with_a_column_per_language_is_read(tmp_path: Path) -> None:
    rows: Any = [
        {"source": None, "target": "two", "n": 2},
        {"source": "eins", "target": "one", "n": 1},
    ]
    for name in ("a.parquet", "b.PARQUET", "c.Parquet"):
        write_parquet(tmp_path / "raw" / name, rows)
    corpus = import_columns(tmp_path / "corpus", tmp_path / "raw", columns=SOURCE_TARGET)
    assert sides(corpus) == [("eins", "one")] * 3


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "de-en" / "train.parquet"
    write_parquet(path, [{"de": "eins", "en": "one"}])
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train\.parquet is not a complete Parquet file \("):
        import_columns(tmp_path / "corpus", tmp_path / "raw")
