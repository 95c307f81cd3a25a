"""Import of raw text: the corpus, its defects and summary, in one process and in several."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.raw_trees import Raw, run_import, write

from data_prep import import_corpus
from data_prep.readers.raw_text import (
    LinesOfPair,
    LineSource,
    RawLine,
    RawText,
    Record,
    RecordFile,
    Section,
)
from data_prep.settings import CldrConfig, CorpusConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, read_manifest
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.raw_input import RawInput
from pipeline.errors import EXIT_USER_ERROR, ConfigError, DataError

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"


def imported(out_dir: Path, raw: Raw, **settings: Any) -> Artifact:
    return run_import("import_corpus", out_dir, raw, corpus=settings)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "raw"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "corpus"


Content = str | bytes


def de_en(de: Content, en: Content, split: str = "train") -> dict[str, Content]:
    return {f"de-en/{split}.de": de, f"de-en/{split}.en": en}


def test_plain_and_gzip_files_come_out_as_they_went_in(raw: Path, out: Path) -> None:
    write(raw, {"en-de/train.en": "one\ntwo\n", "en-de/train.de": "eins\nzwei\n", "README.md": ""})
    write(raw, {"en-de/valid.en.gz": "three\n", "en-de/valid.de.gz": "drei"})
    write(raw, {"en-de/test.en": "four\n", "en-de/test.de.gz": "vier\n"})
    corpus = imported(out, raw)
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two"]
    assert read_lines(corpus, "valid", "de-en", "de") == ["drei"]
    assert corpus.file("test/de-en/en.txt").read_bytes() == b"four\n"
    assert corpus.statistics["pairs"] == {"de-en": {"train": 2, "valid": 1, "test": 1}}
    assert corpus.statistics["characters"]["de-en"]["train"] == {"de": 8, "en": 6}


def test_the_names_of_opus_100_and_of_validation_sets_are_understood(raw: Path, out: Path) -> None:
    write(
        raw,
        {
            **{f"supervised/en-fr/opus.en-fr-train.{code}": "one\n" for code in ("en", "fr")},
            **{f"supervised/en-fr/opus.en-fr-dev.{code}": "two\n" for code in ("en", "fr")},
            **{f"zero-shot/de-fr/opus.de-fr-test.{code}": "drei\n" for code in ("de", "fr")},
            **{f"de-en/validation.{code}": "four\n" for code in ("de", "en")},
        },
    )
    corpus = imported(out, raw)
    assert line_counts(corpus, "train") == {"en-fr": 1}
    assert line_counts(corpus, "valid") == {"de-en": 1, "en-fr": 1}
    assert line_counts(corpus, "test") == {"de-fr": 1}


SECTION = Section(
    split="train",
    languages=("de", "en"),
    spellings=("de", "en"),
    sources=(LineSource("a", "a"), LineSource("a", "a")),
    lines=[RawLine(1, (b"eins", b"one"))],
)
FILE = RecordFile(lambda: [Record(1, {"de": b"eins", "en": b"one"})], is_surveyed=True)
RECORDS = RecordFile(cast(Any, (record for record in FILE.records())), is_surveyed=True)
LISTED = replace(FILE, records=cast(Any, []))
BOTH = (("de",), ("en",))


def of_lines(*lines: Any) -> RawText:
    return RawText([replace(SECTION, lines=lines)])


def of_record(record: Any) -> RawText:
    file = replace(FILE, records=lambda: [record])
    return RawText([replace(SECTION, lines=LinesOfPair(file, BOTH))], files=[file])


def having(**fields: Any) -> RawText:
    return RawText([replace(SECTION, **fields)])


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (None, "a NoneType. "),
        ("text", "a str. "),
        (RawText(cast(Any, "text")), "a RawText with sections = 'text'. "),
        (RawText([]), "no Section. Return one for each pair and split"),
        (RawText([cast(Any, None)]), "a NoneType among its sections. "),
        (having(split="devel"), "a Section with split = 'devel'. Return train or valid or test."),
        (having(languages=("de-de", "en")), "a Section with languages = .'de-de', 'en'.. "),
        (having(languages=("de", "de")), r"a Section with languages = \('de', 'de'\)\. "),
        (having(languages=("de", "en", "fr")), "a Section with languages = .'de', 'en', 'fr'.. "),
        (having(spellings=("German", "en")), "a Section with spellings = .'German', 'en'.. "),
        (having(sources=("a", "b")), "a Section with sources = .'a', 'b'.. "),
        (having(lines=None), "a Section with lines = None. "),
        (
            RawText([SECTION], cast(Any, Counter(a=1))),
            "a RawText with left_out = Counter.{'a': 1}.. ",
        ),
        (RawText([SECTION], cast(Any, None)), "a RawText with left_out = None. .* a SkippedText"),
        (
            RawText([SECTION], files=[RECORDS]),
            r"a RawText with files = \[RecordFile\(.* a function",
        ),
        (RawText([SECTION], files=cast(Any, None)), "a RawText with files = None. "),
        (having(lines=LinesOfPair(LISTED, BOTH)), "a Section with lines = LinesOf.* a function"),
        (
            having(lines=LinesOfPair(cast(Any, "a.x"), BOTH)),
            "a Section with .*file='a.x'.*function",
        ),
        (
            having(lines=LinesOfPair(FILE, cast(Any, ("de", "en")))),
            "a Section with lines = LinesOf",
        ),
        (having(lines="eins"), "'e'. .* a RawLine"),
        (of_lines(None), "None. .* a RawLine"),
        (
            of_lines(RawLine(1, (b"eins", b"one")), ("eins", "one")),
            r"\('eins', 'one'\)\. .* a RawLine",
        ),
        (of_lines(RawLine(1, (b"1", b"2", b"3"))), r"RawLine\(number=1, .* a RawLine"),
        (of_lines(RawLine(1, cast(Any, ("eins", "one")))), r"RawLine\(number=1, .* a RawLine"),
        (of_lines(RawLine(cast(Any, "1"), (b"1", b"2"))), r"RawLine\(number='1', .* a RawLine"),
        (of_record(None), "None. .* a Record"),
        (of_record(Record(cast(Any, "1"), {"de": b"1", "en": b"1"})), "Record.line='1'.* a Record"),
        (of_record(Record(1, cast(Any, {"de": "eins", "en": "one"}))), "Record.line=1.* a Record"),
    ],
)
def test_what_another_reader_returns_is_named_with_it(
    made: RawText | None, told: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_corpus, "read_moses", lambda *_: made)
    with pytest.raises(ConfigError, match=f"^The reader 'moses' returned {told}") as raised:
        imported(out, {}, source="moses")
    assert "\n" not in str(raised.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "kept", "left_out"),
    [
        ({}, ["de-en", "de-it", "en-it"], None),
        ({"languages": ["eng", "it"]}, ["en-it"], "left out: 2 pairs of other languages"),
        ({"directions": "pivot", "pivot": "de"}, ["de-en", "de-it"], "left out: 1 pair of other "),
    ],
)
@pytest.mark.parametrize("is_found", [True, False])
def test_only_wanted_pairs_of_another_reader_are_imported(
    settings: dict[str, Any],
    kept: list[str],
    left_out: str | None,
    is_found: bool,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [("de", "en"), ("it", "de"), ("en", "it")]
    sections = [replace(SECTION, languages=pair, spellings=pair) for pair in pairs]
    made = RawText(sections, is_found=is_found)
    monkeypatch.setattr(import_corpus, "read_moses", lambda *_: made)
    corpus = imported(out, {}, source="moses", **settings)
    assert sorted(corpus.statistics["pairs"]) == kept
    assert ("left out:" in str(corpus.manifest.summary)) == bool(left_out)
    assert left_out is None or corpus.manifest.summary[1].startswith(left_out)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"languages": ["en", "it"]}, "corpus.languages asks for en, it, which no pair"),
        ({"directions": "pivot", "pivot": "fr"}, r"No pair that was found \(de-en\) has the pivot"),
    ],
)
def test_languages_that_another_reader_does_not_return_are_refused(
    settings: dict[str, Any], told: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_corpus, "read_moses", lambda *_: RawText([SECTION]))
    with pytest.raises(ConfigError, match=told):
        imported(out, {}, source="moses", **settings)


@pytest.mark.parametrize("code", ["qq", "zh_Hant"])
def test_a_reader_may_return_any_code(
    code: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = having(languages=(code, "en"), spellings=(code, "en"))
    monkeypatch.setattr(import_corpus, "read_moses", lambda *_: made)
    corpus = imported(out, {}, source="moses")
    assert sorted(corpus.statistics["pairs"]) == ["-".join(sorted((code, "en")))]


def test_old_codes_become_the_registry_s(out: Path) -> None:
    corpus = imported(out, {"iw-zh_cn/train.iw": "x\n", "iw-zh_cn/train.zh_cn": "y\n"})
    assert read_lines(corpus, "train", "he-zh", "he") == ["x"]
    assert read_lines(corpus, "train", "he-zh", "zh") == ["y"]


def test_carriage_returns_and_a_byte_order_mark_are_removed_and_counted(out: Path) -> None:
    german = b"\xef\xbb\xbfeins\r\nzw\rei\r\ndrei\r\r\n"
    corpus = imported(out, de_en(german, "one\ntwo\n\ufeffthree\n"))
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zw ei", "drei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two", "\ufeffthree"]
    counts = corpus.statistics["counts"]
    assert (counts["byte_order_marks"], counts["carriage_returns"]) == (1, 3)
    assert counts["lines_with_inner_separator"] == 1


ODD_SEPARATORS = ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("separator", ODD_SEPARATORS)
def test_other_separators_than_the_newline_end_no_line_and_become_spaces(
    out: Path, separator: str
) -> None:
    corpus = imported(out, de_en(f"a{separator}b\nc\n", "1\n2\n"))
    assert read_lines(corpus, "train", "de-en", "de") == ["a b", "c"]
    assert corpus.statistics["counts"]["lines_with_inner_separator"] == 1
    assert "odd separators made spaces in 1 line" in corpus.manifest.summary


def test_what_python_takes_for_the_end_of_a_line_is_exactly_what_becomes_a_space() -> None:
    everything = (chr(point) for point in range(0x110000))
    ends = {character for character in everything if len(f"a{character}b".splitlines()) > 1}
    assert ends == {"\n", *ODD_SEPARATORS}


def test_lines_that_are_no_text_are_quarantined_with_their_counterparts(out: Path) -> None:
    corpus = imported(out, de_en(b"eins\nzw\xffei\ndrei\nvier\n", b"one\ntwo\nth\0ree\nfour\n"))
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "vier"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "four"]
    records = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert records == [
        {"file": "de-en/train.de", "line": 2, "reason": "invalid_utf8"},
        {"file": "de-en/train.en", "line": 3, "reason": "nul"},
    ]
    assert corpus.statistics["counts"]["quarantined"] == 2


GZIP = gzip.compress(b"ein Satz\n" * 500, mtime=0)  # workers of pytest name its cases by its bytes
SENTENCES = "a sentence\n" * 500


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            de_en("süß\n".encode("latin-1") * 50, "sweet\n" * 50),
            r"train\.de: 50 of 50 lines cannot be read as text \(invalid_utf8\). Convert",
        ),
        (de_en("a\nb\nc\n", "a\n"), r"train\.de has 3 lines and .*train\.en has 1"),
        (de_en("a\n" * 9, "a\n" * 8), "has 9 lines"),  # over limit
        (de_en("a\nb\n".encode("utf-16"), "a\nb\n"), r"train\.de is UTF-16\. Convert"),
        (de_en("a\nb\n".encode("utf-32"), "a\nb\n"), r"train\.de is UTF-32\. Convert"),
        (de_en("", "a\n"), "has 0 lines"),
        (de_en("a\n", "a\n") | {"de-en/test.en": "b\n"}, r"test\.en has no counterpart in de"),
        (
            de_en("b\n", "c\n", "valid") | {"de-en/dev.de": "a\n"},
            r"dev\.de and .*valid\.de are both the valid text of de",
        ),
        (
            {"de-en/notes.txt": "a\n", "en-fr/train.en": "a\n", "en-fr/train.fr": "b\n"},
            "de-en holds no text of its pair",
        ),
        (
            {"train.en": "a\n", "train.de": "b\n"},
            r"holds no language pairs\. Name a tree with folders",
        ),
        (  # OPUS-100 as its archive unpacks
            {
                "opus-100-corpus/v1.0/supervised/de-en/opus.de-en-train.de": "a\n",
                "opus-100-corpus/v1.0/zero-shot/de-fr/opus.de-fr-test.de": "b\n",
            },
            r"raw holds no language pairs\. Name \S+raw/opus-100-corpus/v1\.0\.$",
        ),
        (
            {"a/corpus/de-en/train.de": "a\n", "ntrex/test.de": "b\n", "b/de-en/dev.de": "c\n"},
            r"raw holds no language pairs\. Name \S+raw/a/corpus, \S+raw/b\.$",
        ),
        (
            {**de_en("a\n", "a\n"), "en-de/test.de": "a\n", "en-de/test.en": "a\n"},
            r"de-en and .*en-de hold different text of the pair de-en",
        ),
    ],
)
def test_unreadable_trees_are_told(
    raw: Path, out: Path, files: dict[str, str | bytes], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        imported(out, write(raw, files), max_train_lines=5)
    assert not out.exists()


def test_a_reversed_folder_with_the_same_text_is_taken_once(raw: Path, out: Path) -> None:
    text = {"train.de": "a\n", "train.en": "b\n"}
    write(raw, {f"{folder}/{name}": text[name] for folder in ("de-en", "en-de") for name in text})
    corpus = imported(out, raw)
    assert corpus.statistics["counts"]["folders_repeated"] == 1
    assert line_counts(corpus, "train") == {"de-en": 1}
    write(raw, {"en-de/train.de": "c\n"})
    with pytest.raises(DataError, match="hold different text of the pair de-en"):
        imported(out.with_name("again"), raw)


def test_folders_of_two_regions_name_the_setting_that_reads_both(raw: Path, out: Path) -> None:
    text = {"en-pt": "comboio\n", "en-pt_BR": "trem\n"}
    for pair, line in text.items():
        write(raw, {f"{pair}/train.en": "train\n", f"{pair}/train.{pair[3:]}": line})
    said = r"or set corpus\.regions to 'apart' if they are two regions"
    with pytest.raises(DataError, match=said):
        imported(out, raw)
    corpus = imported(out, raw, regions="apart")
    assert line_counts(corpus, "train") == {"en-pt": 1, "en-pt_BR": 1}


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("tree", {"pt_BR-pt_PT/train.pt_BR": "trem\n", "pt_BR-pt_PT/train.pt_PT": "comboio\n"}),
        ("moses", {"train.pt_BR": "trem\n", "train.pt_PT": "comboio\n"}),
        ("tsv", {"train.tsv": "pt-BR\tpt-PT\ntrem\tcomboio\n"}),
        ("columns", {"train.pt_BR-pt_PT.csv": "pt_BR,pt_PT\ntrem,comboio\n"}),
    ],
)
def test_a_pair_of_two_regions_names_the_setting_that_reads_both(
    raw: Path, out: Path, source: str, files: dict[str, str]
) -> None:
    write(raw, files)
    said = r", or set corpus\.regions to 'apart' if they are two regions\."
    with pytest.raises(DataError, match=said):
        imported(out, raw, source=source)
    corpus = imported(out, raw, source=source, regions="apart")
    assert line_counts(corpus, "train") == {"pt_BR-pt_PT": 1}


@pytest.mark.parametrize("packed", [GZIP[:40], GZIP[:-5], b"a\n"])
def test_a_file_that_is_no_complete_gzip_file_is_named(raw: Path, out: Path, packed: bytes) -> None:
    write(raw, {"de-en/train.en": SENTENCES})
    (raw / "de-en" / "train.de.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"train\.de\.gz is not a complete gzip file"):
        imported(out, raw)


def test_a_tree_source_without_a_raw_folder_is_refused(out: Path) -> None:
    with pytest.raises(ConfigError, match="no raw text was given"):
        imported(out, None)


def test_what_is_ignored_of_a_tree_is_named_in_the_summary(raw: Path, out: Path) -> None:
    folders = {f"notes{number}/a.txt": "1\n" for number in range(8)}
    pair = {f"de-en/train.{code}": "a\n" for code in ("de", "en")}
    slips = {"de-en/tset.en": "a\n", "de-en/tset.de": "b\n", "de-en/.hidden": ""}
    write(raw, {**folders, **pair, **slips})
    lines = [line for line in imported(out, raw).manifest.summary if line.startswith("left out")]
    assert lines == [
        "left out: 8 folders not named like a pair (notes0, notes1, notes2, notes3, notes4 and 3 "
        "more); 2 files of another form (de-en/tset.de, de-en/tset.en)"
    ]


def test_limits_keep_the_first_lines_of_each_split(raw: Path, out: Path) -> None:
    names = {f"de-en/{split}.{code}": "1\n2\n3\n" for split in ("train", "test") for code in ["de"]}
    write(raw, names | {name.replace(".de", ".en"): text for name, text in names.items()})
    corpus = imported(out, raw, max_train_lines=2, max_test_lines=1)
    assert read_lines(corpus, "train", "de-en", "de") == ["1", "2"]
    assert read_lines(corpus, "test", "de-en", "en") == ["1"]
    assert corpus.statistics["counts"]["lines_over_limit"] == 3


@pytest.mark.parametrize("code", ["fr", "fra", "fr_Latn"])
def test_languages_without_test_lines_may_be_spelled_in_any_usual_way(
    code: str, raw: Path, out: Path
) -> None:
    names = [f"{pair}/test.{side}" for pair in ("de-en", "en-fr") for side in pair.split("-")]
    write(raw, dict.fromkeys(names, "a\n"))
    corpus = imported(out, raw, untested=[code])
    assert line_counts(corpus, "test") == {"de-en": 1}
    assert "untested" not in "".join(corpus.manifest.summary)
    for absent in (["it"], ["eo", "mlt_Latn"]):
        told = imported(out.with_name("-".join(absent)), raw, untested=[code, *absent])
        assert line_counts(told, "test") == {"de-en": 1}
        assert told.manifest.summary[-1].startswith(f"corpus.untested names {', '.join(absent)},")
    for other, said in (("gr", "names 'gr', .* Choose from de, en, fr"), ("French", "Write 'fr'")):
        with pytest.raises(ConfigError, match=said):
            imported(out.with_name(other), raw, untested=[code, other])


@pytest.mark.parametrize("source", ["tree", "cldr", "hub", "tmx", "moses"])
@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ({"columns": {"de": "a", "en": "b"}}, "columns. Leave that out, or choose tsv, columns"),
        ({"files": [{"pair": "de-en", "paths": ["a.tsv"]}]}, "files. Leave that out, or choose li"),
    ],
)
def test_settings_that_a_source_does_not_read_are_refused(
    source: str, setting: dict[str, object], others: str, raw: Path, out: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"'{source}', but it does not read corpus\.{others}"):
        imported(out, raw, source=source, **setting)


def test_the_summary_says_what_was_read_kept_and_left_out_by_side(
    raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 40)
    german = b"\xef\xbb\xbfeins\r\n\xff\nd\x0brei\n" + b"v" * 41 + b"\n\nsechs\n"
    write(raw, de_en(german, b"one\ntwo\nthree\nf\0ur\nfive\nsix\n"))
    write(raw, de_en("a\n", "b\n", "valid"))
    write(raw, {"en-fr/test.en": "a\n", "en-fr/test.fr": "b\n", "ids/x": ""})
    corpus = imported(out, raw, max_train_lines=3)
    assert corpus.manifest.summary == (
        "read 8 lines of 2 pairs, kept 5 (train 3, valid 1, test 1)",
        "left out: 2 lines and their counterparts into quarantine.jsonl (too_long in de 1, "
        "nul in en 1, invalid_utf8 in de 1); 1 beyond the lines wanted per pair; "
        "1 folder not named like a pair (ids)",
        "odd separators made spaces in 1 line, carriage returns removed from 1 line, "
        "byte order marks removed from 1 line, no text (kept) in 1 line",
        "no test lines: de-en",
    )


def test_what_a_pair_lacks_is_said(raw: Path, out: Path) -> None:
    write(raw, {f"de-en/train.{code}": "a\n" for code in ("de", "en")})
    write(raw, {f"en-fr/{name}": "" for name in ("train.en", "train.fr", "test.en", "test.fr")})
    write(raw, {"en-yi/train.en": "a\n\n", "en-yi/train.yi": "\n  \n"})
    write(raw, {"en-yi/valid.en": "a\n", "en-yi/valid.yi": "b\n"})
    corpus = imported(out, raw)
    assert corpus.manifest.summary[-1] == (
        "no training data left: en-fr; no validation set: de-en; no test lines: de-en, en-yi; "
        "no lines at all: en-fr; only empty lines: en-yi train yi"
    )
    assert corpus.statistics["emptied"] == ["en-fr"]


@pytest.mark.parametrize(
    ("german", "english"), [(b"\n\n\neins\n", b"\xff\n\0\n\xff\none\n"), (b"\n1\n", b"\0\none\n")]
)
def test_an_empty_line_that_goes_with_its_counterpart_is_not_said_to_be_kept(
    german: bytes, english: bytes, out: Path
) -> None:
    corpus = imported(out, de_en(german, english))
    assert line_counts(corpus, "train") == {"de-en": 1}
    assert "lines_without_text" not in corpus.statistics["counts"]
    assert not any(said in "".join(corpus.manifest.summary) for said in ("kept) in", "only empty"))


def test_training_lines_all_in_quarantine_leave_no_zero_shot_pair(raw: Path, out: Path) -> None:
    write(raw, {"de-fr/train.de": b"\xff\n\0\n", "de-fr/train.fr": "un\ndeux\n"})
    pairs = ("de-fr", "fr-nl")
    write(raw, {f"{pair}/test.{code}": "x\n" for pair in pairs for code in pair.split("-")})
    corpus = imported(out, raw)
    assert corpus.statistics["emptied"] == ["de-fr"]
    assert "no training data left: de-fr" in corpus.manifest.summary[-1]
    assert "no pair has training lines" in corpus.manifest.summary[-1]


GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus und lachen."
ENGLISH = "The children are playing in the garden behind the house this afternoon."


def numbered(text: str) -> str:
    return "".join(f"{text} {number}\n" for number in range(20))


def test_exchanged_files_are_refused_with_what_to_do_unless_they_are_accepted(
    raw: Path, out: Path
) -> None:
    write(raw, de_en(numbered(GERMAN), numbered(ENGLISH)))
    write(raw, de_en(numbered(ENGLISH), numbered(GERMAN), "test"))
    said = r"test\.de reads as en and .*test\.en as de\. Exchange the names of the two files, "
    with pytest.raises(DataError, match=said + r"or set corpus\.swapped_sides to 'accept'"):
        imported(out, raw)
    assert not out.exists()
    corpus = imported(out, raw, swapped_sides="accept")
    assert corpus.manifest.summary[-1] == "look at: sides look swapped in de-en test"


def test_codes_that_look_wrong_and_spellings_of_one_are_warned_of(raw: Path, out: Path) -> None:
    russian = numbered("Дети играют сегодня после обеда в саду за домом.")
    write(raw, {"en-de/train.en": numbered(ENGLISH), "en-de/train.de": russian})
    write(
        raw, {"eng_Latn-rux/train.eng_Latn": numbered(ENGLISH), "eng_Latn-rux/train.rux": russian}
    )
    assert imported(out, raw).manifest.summary[-1] == (
        "look at: de has Cyrl text, usual is Latn (meant: be?); rux is the code of no known "
        "language (meant: ru, rue?); several spellings are one language: en (en, eng_Latn)"
    )


def test_the_script_of_an_unknown_language_is_found_in_its_text(raw: Path, out: Path) -> None:
    write(raw, {"en-xyz/train.en": numbered(ENGLISH), "en-xyz/train.xyz": numbered("ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ")})
    assert imported(out, raw).statistics["languages"]["xyz"]["script"] == "Cher"


def test_a_sample_is_taken_of_the_whole_file_and_not_of_its_beginning(raw: Path, out: Path) -> None:
    """A few lines in the wrong order at the beginning make no exchanged file."""
    german, english = numbered(GERMAN), numbered(ENGLISH)
    write(raw, de_en(english + german * 10, german + english * 10))
    assert line_counts(imported(out, raw), "train") == {"de-en": 220}


def two_trees(folder: Path) -> RawInput:
    first: dict[str, str | bytes] = {"de-en/train.de": "a\nb\n", "de-en/train.en": "1\n2\n"}
    first |= {"en-fr/test.en": "3\n", "en-fr/test.fr": "c\n"}
    second: dict[str, str | bytes] = {"eng-deu/train.eng": b"4\n\xff\n5\n"}
    second |= {"eng-deu/train.deu": "d\ne\nf\n"}
    second |= {"eng-deu/test.eng": "6\n", "eng-deu/test.deu": "g\n", "ids/x": ""}
    return RawInput((write(folder / "first", first), write(folder / "second", second)))


def test_what_many_trees_have_of_a_pair_follows_in_their_order(tmp_path: Path, out: Path) -> None:
    trees = two_trees(tmp_path)
    corpus = imported(out, trees)
    assert corpus.statistics["pairs"] == {
        "de-en": {"train": 4, "valid": 0, "test": 1},
        "en-fr": {"train": 0, "valid": 0, "test": 1},
    }
    assert read_lines(corpus, "train", "de-en", "de") == ["a", "b", "d", "f"]
    assert read_lines(corpus, "train", "de-en", "en") == ["1", "2", "4", "5"]
    assert corpus.statistics["characters"]["de-en"]["train"] == {"de": 4, "en": 4}
    assert corpus.statistics["counts"]["folders_ignored"] == 1
    assert "several spellings are one language: de (de, deu), en" in corpus.manifest.summary[-1]
    other = imported(out.with_name("other"), RawInput(trees.paths[::-1]))
    assert read_lines(other, "train", "de-en", "de") == ["d", "f", "a", "b"]
    assert [json.loads(line) for line in corpus.file("quarantine.jsonl").open()] == [
        {"file": "2/eng-deu/train.eng", "line": 2, "reason": "invalid_utf8"}
    ]


@pytest.mark.parametrize(("limit", "kept"), [(1, "a"), (2, "ab"), (3, "abd")])
def test_a_limit_is_for_all_trees(tmp_path: Path, out: Path, limit: int, kept: str) -> None:
    corpus = imported(out, two_trees(tmp_path), max_train_lines=limit)
    assert read_lines(corpus, "train", "de-en", "de") == list(kept)


def test_a_language_or_training_lines_may_be_in_one_tree_only(tmp_path: Path, out: Path) -> None:
    trees = two_trees(tmp_path)
    corpus = imported(out.with_name("fr"), trees, languages=("en", "fr"))
    assert list(corpus.statistics["pairs"]) == ["en-fr"]
    write(trees.paths[1], {"eng-deu/train.eng": "", "eng-deu/train.deu": ""})
    assert imported(out, trees).statistics["emptied"] == []


def test_the_manifest_has_the_path_and_digest_of_every_tree(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = two_trees(tmp_path)
    (tmp_path / "recipe.toml").write_text('[corpus]\nsource = "tree"\n')
    command = ["import_corpus", "--recipe", str(tmp_path / "recipe.toml"), "--out", str(out)]
    assert cli.main([*command, "--raw", *trees.values]) == 0
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.inputs == trees.records("raw")
    assert cli.main([*command, "--raw", *trees.values]) == 0
    assert "already done" in capsys.readouterr().err
    assert cli.main([*command, "--raw", *trees.values[::-1]]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "input raw/1 changed; input raw/2 changed" in said
    within = [*command[:-1], str(trees.paths[1] / "out"), "--raw", *trees.values]
    assert cli.main(within) == EXIT_USER_ERROR
    assert "lies within the input raw/2" in capsys.readouterr().err


CLDR = CldrConfig(
    train_pairs={"de": 30, "ru": 20, "zh": 10},
    zero_shot=("de", "zh"),
    valid_phrases=5,
    test_phrases=7,
)


@pytest.mark.parametrize("directions", ["all", "pivot"])
def test_cldr_phrases_are_english_centric_with_zero_shot_tests(directions: str, out: Path) -> None:
    settings = {"cldr": CLDR, "max_train_lines": 20, "directions": directions}
    corpus = imported(out, None, source="cldr", **settings)
    assert corpus.statistics["pairs"] == {
        "de-en": {"train": 20, "valid": 5, "test": 7},
        "en-ru": {"train": 20, "valid": 5, "test": 7},
        "en-zh": {"train": 10, "valid": 5, "test": 7},
        "de-zh": {"train": 0, "valid": 0, "test": 7},
    }
    german = read_lines(corpus, "test", "de-zh", "de")
    assert german == read_lines(corpus, "test", "de-en", "de")
    assert len(set(german)) == 7


def test_text_given_to_a_source_that_makes_its_own_is_refused(raw: Path, out: Path) -> None:
    raw.mkdir()
    with pytest.raises(ConfigError, match=r"'cldr' makes its own text\. Leave --raw out"):
        imported(out, raw, source="cldr", cldr=CLDR)


@pytest.mark.slow
@pytest.mark.skipif(not BIBLE.is_dir(), reason="the Bible corpus is not beside the repository")
def test_the_bible_corpus_has_its_published_sizes(out: Path) -> None:
    corpus = imported(out, BIBLE, languages=("en", "da", "de", "zh"))
    assert corpus.statistics["pairs"] == {
        "da-en": {"train": 1500, "valid": 500, "test": 1000},
        "de-en": {"train": 28765, "valid": 500, "test": 1000},
        "en-zh": {"train": 28561, "valid": 500, "test": 1000},
        "de-zh": {"train": 0, "valid": 0, "test": 500},
    }
    with gzip.open(BIBLE / "en-da" / "train.da.gz", "rb") as stream:
        assert corpus.file("train/da-en/da.txt").read_bytes() == stream.read()


pytestmark = pytest.mark.slow

GOOD = [f"line {number}" for number in range(300)]
BAD_TREES: dict[str, str | bytes] = {
    "one/de-en/train.de": "\n".join(GOOD).encode() + b"\n\xff broken\n",
    "one/de-en/train.en": "\n".join([*GOOD, "the counterpart"]) + "\n",
    "one/de-en/valid.de": "",
    "one/de-en/valid.en": "",
    "one/fr-zh/train.fr": "\ufeffun\r\ndeux\x85trois\n",
    "one/fr-zh/train.zh": "一\n二\n",
    "two/en-de/train.de": "eins\nzwei\nd\0rei\n",
    "two/en-de/train.en": "one\ntwo\nthree\n",
    "two/en-it/test.en": "four\n",
    "two/en-it/test.it": "quattro\n",
}


def import_in_processes(raw: Path, processes: int, **settings: Any) -> Artifact:
    paths, out = RawInput((raw / "one", raw / "two")), raw.with_name(f"by-{processes}")
    return run_import("import_corpus", out, paths, processes=processes, corpus=settings)


@pytest.mark.parametrize("max_train_lines", [None, 301])
def test_the_number_of_processes_has_no_effect(max_train_lines: int | None, tmp_path: Path) -> None:
    write(tmp_path / "raw", BAD_TREES)
    settings = {"max_train_lines": max_train_lines}
    one, two = (import_in_processes(tmp_path / "raw", count, **settings) for count in (1, 2))
    assert two.manifest.files == one.manifest.files
    assert two.statistics == one.statistics
    assert two.manifest.summary == one.manifest.summary
    assert one.statistics["counts"]["quarantined"] == 1 + (max_train_lines is None)
    assert one.statistics["pairs"]["de-en"]["train"] == (max_train_lines or 302)


def test_a_fault_that_a_worker_finds_is_the_same_sentence(tmp_path: Path) -> None:
    write(tmp_path / "raw", BAD_TREES | {"two/en-it/test.it": "quattro\ncinque\n"})
    said = []
    for processes in (1, 2):
        with pytest.raises(DataError) as refused:
            import_in_processes(tmp_path / "raw", processes)
        assert not (tmp_path / f"by-{processes}").exists()
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "test.en has 1 line and" in said[0]
