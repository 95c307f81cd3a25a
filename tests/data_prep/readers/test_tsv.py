"""Tab-separated tables: pairs in two columns, and a column for each of many languages."""

import csv
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from support.raw_trees import run_import, write

from data_prep.readers import raw_files
from data_prep.readers.raw_files import RawFile
from data_prep.readers.tables import open_table
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.settings import CorpusConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError, DataError

TED = (
    "talk_name\ten\tpt-br\tpt\tfr\tcalv\tzh-cn\tzh-tw\n"
    "a\tone\tum\tum (PT)\tun\tx\t一\t一 (TW)\n"
    "b\ttwo\tdois\t__NULL__\t__NULL__\tx\t__NULL__\t二\n"
    "c\t__NULL__\t__NULL__\ttrês\ttrois\tx\t三\t__NULL__\n"
    "d\tfour\t__NULL__\t__NULL__\t \tx\t\t__NULL__\n"
)


def imported(out_dir: Path, raw: Path, **settings: object) -> Artifact:
    config = CorpusConfig.model_validate({"source": "tsv", **settings})
    return run_import("import_corpus", out_dir, raw, Recipe(name="test", corpus=config))


def test_a_pair_named_by_its_file_is_in_two_columns(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw",
        {
            "train.en-de.tsv": "one\teins\ntwo\tzwei\r\n",
            "de-en/newstest2020.tsv.gz": "vier\tfour\n",
        },
    )
    corpus = imported(tmp_path / "corpus", raw)
    assert corpus.statistics["pairs"] == {"de-en": {"train": 2, "valid": 0, "test": 1}}
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two"]


def test_a_header_says_the_order_of_the_columns_and_which_are_text(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw",
        {
            "train.de-en.tsv": "\ufeffscore\tEN\tfr\tde\n0.9\tone\tun\teins\n",
            "more.tsv": "de\tsource\ten\nzwei\tweb\ttwo\n",
        },
    )
    corpus = imported(tmp_path / "corpus", raw)
    assert line_counts(corpus, "train") == {"de-en": 2}
    assert read_lines(corpus, "train", "de-en", "de") == ["zwei", "eins"]
    assert read_lines(corpus, "train", "de-en", "en") == ["two", "one"]


def test_a_first_row_of_words_that_are_codes_is_no_header_of_a_named_pair(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.de-en.tsv": "so\tas\nja\tyes\n"})
    corpus = imported(tmp_path / "corpus", raw)
    assert read_lines(corpus, "train", "de-en", "en") == ["as", "yes"]


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


JOINED = {
    "en": ["en"],
    "pt": ["pt", "pt-br"],
    "fr": ["fr"],
    "zh": ["zh-cn"],
    "zh_Hant": ["zh-tw"],
}
APART = {
    "en": ["en"],
    "pt": ["pt"],
    "pt_BR": ["pt-br"],
    "fr": ["fr"],
    "zh_CN": ["zh-cn"],
    "zh_TW": ["zh-tw"],
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("regions", "columns"), [("joined", JOINED), ("apart", APART)])
def test_the_table_of_talks_is_joined_as_by_brute_force(
    tmp_path: Path, split: str, regions: str, columns: dict[str, list[str]]
) -> None:
    raw = write(tmp_path / "raw", {f"all_talks_{split}.tsv": TED})
    corpus = imported(tmp_path / "corpus", raw, directions="zero_shot", regions=regions)
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
    corpus = imported(tmp_path / "corpus", raw, languages=("en", "zho_Hant"))
    assert line_counts(corpus, "train") == {"en-zh_Hant": 2}
    with pytest.raises(ConfigError, match="asks for el"):
        imported(tmp_path / "again", raw, languages=("en", "fr", "el"))


def test_a_column_of_a_region_can_be_asked_for_alone(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"all_talks_train.tsv": TED})
    for spelling in ("pt_BR", "pt-br"):
        corpus = imported(tmp_path / spelling, raw, languages=("en", spelling), regions="apart")
        assert line_counts(corpus, "train") == {"en-pt_BR": 2}
        assert read_lines(corpus, "train", "en-pt_BR", "pt_BR") == ["um", "dois"]
    corpus = imported(tmp_path / "pt", raw, languages=("en", "pt"), regions="apart")
    assert read_lines(corpus, "train", "en-pt", "pt") == ["um (PT)"]
    assert corpus.statistics["languages"]["pt"]["spellings"] == ["pt"]


def test_rows_of_other_columns_and_no_text_go_to_the_quarantine(tmp_path: Path) -> None:
    text = b"eins\tone\nzwei\ndrei\tthree\t0.9\nvi\xffer\tfour\n" + b"a" * 500 + b"\tlong\nx\ty\n"
    raw = write(tmp_path / "raw", {"train.de-en.tsv": text})
    corpus = imported(tmp_path / "corpus", raw, max_line_bytes=100)
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "y"]
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert [(record["line"], record["reason"]) for record in listed] == [
        (2, "malformed"),
        (3, "malformed"),
        (4, "invalid_utf8"),
        (5, "malformed"),
    ]
    assert corpus.statistics["counts"]["lines_malformed"] == 3
    assert any("malformed in de" in line for line in corpus.manifest.summary)


def test_a_table_of_other_columns_throughout_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.de-en.tsv": "0.9\teins\tone\n" * 2})
    with pytest.raises(DataError, match=r"2 of 2 lines .*\(malformed\)\. Correct their columns"):
        imported(tmp_path / "corpus", raw)


def test_a_table_that_says_nowhere_which_languages_it_has_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.tsv": "eins\tone\n"})
    with pytest.raises(DataError, match=r"train\.tsv, line 1, names fewer than two languages"):
        imported(tmp_path / "corpus", raw)


def test_no_more_is_read_than_the_rows_given_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.de-en.tsv"
    path.write_text("eins\tone\n" * 20_000)
    read = 0

    def counted(place: Path, *, max_line_bytes: int) -> Iterator[bytes]:
        nonlocal read
        for line in raw_files.iterate_raw_lines(place, max_line_bytes=max_line_bytes):
            read += 1
            yield line

    monkeypatch.setattr("data_prep.readers.tables.iterate_raw_lines", counted)
    table = open_table(RawFile(path, path.name), "train", CorpusConfig())
    read = 0
    for given, _ in enumerate(table.records(), start=1):
        assert read == given
