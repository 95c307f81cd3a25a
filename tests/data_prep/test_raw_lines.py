"""Raw lines: which are sentences, where others are listed, and sides in other languages."""

import gzip
import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep import raw_lines
from data_prep.raw_lines import (
    SAMPLE_LINES,
    EvenSample,
    LineCounts,
    are_swapped,
    checked_lines,
    code_warning,
    good_lines,
    refuse_damaged,
    script_of_language,
)
from data_prep.readers.raw_text import FilesInStep, source_of
from data_prep.settings import CorpusConfig
from pipeline.errors import DataError
from pipeline.languages import count_scripts


def read(
    tmp_path: Path, sides: tuple[bytes, bytes], *, max_line_bytes: int, limit: int | None = None
) -> tuple[list[list[str]], LineCounts, list[dict[str, object]]]:
    paths = tmp_path / "train.de", tmp_path / "train.en"
    for path, data in zip(paths, sides, strict=True):
        path.write_bytes(data)
    counts, quarantine = LineCounts(), tmp_path / "quarantine.jsonl"
    quarantine.write_bytes(b"")
    sources = [source_of(path, tmp_path) for path in paths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorpusConfig, "max_line_bytes", max_line_bytes)
        lines = checked_lines(FilesInStep(paths), reader="moses")
        good = good_lines(lines, sources, limit=limit, quarantine_path=quarantine, counts=counts)
        found = [*map(list, good)]
    refuse_damaged(sources, counts)
    return found, counts, [json.loads(line) for line in quarantine.open(encoding="utf-8")]


def test_a_line_beyond_the_limit_is_quarantined_with_its_counterpart(tmp_path: Path) -> None:
    sides = b"eins\n" + b"z" * 11 + b"\ndreidreid\n", b"one\ntwo\n" + b"t" * 10 + b"\n"
    found, counts, records = read(tmp_path, sides, max_line_bytes=10)
    assert found == [["eins", "one"], ["dreidreid", "t" * 10]]
    assert records == [{"file": "train.de", "line": 2, "reason": "too_long"}]
    assert (counts.read, counts.kept, counts.quarantined) == (3, 2, 1)
    assert [dict(side) for side in counts.no_text] == [{"too_long": 1}, {}]
    # A character that the limit cuts is not taken for invalid.
    _, _, records = read(tmp_path, ("äöü\n".encode(), b"a\n"), max_line_bytes=4)
    assert records[0]["reason"] == "too_long"


def test_both_sides_of_a_bad_pair_are_listed_and_the_pair_counted_once(tmp_path: Path) -> None:
    _, counts, records = read(tmp_path, (b"\xff\na\n", b"\0\nb\n"), max_line_bytes=10)
    listed = {record["file"]: record["reason"] for record in records}
    assert (len(records), listed) == (2, {"train.de": "invalid_utf8", "train.en": "nul"})
    assert (counts.kept, counts.quarantined) == (1, 1)


def test_files_of_long_lines_are_refused(tmp_path: Path) -> None:
    lines = b"a long line\n" * 20
    with pytest.raises(DataError, match=r"20 of 20 lines .*too_long.*Split them"):
        read(tmp_path, (lines, lines), max_line_bytes=5)


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet="ab \r\v\x85\u2028\0é\u200b\u00ad"), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 40),
)
def test_the_fast_way_and_the_careful_one_agree(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], mark: bool, limit: int
) -> None:
    """Every line looked at carefully gives what the short cut gives."""
    data = ("\ufeff" * mark + "".join(f"{text}\n" for text in texts)).encode()
    directory = tmp_path_factory.mktemp("lines")
    other = b"x\n" * data.count(b"\n")
    fast = read(directory, (data, other), max_line_bytes=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_lines, "checked", raw_lines._repair)
        assert read(directory, (data, other), max_line_bytes=limit) == fast


BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"
needs_bible = pytest.mark.skipif(
    not BIBLE.is_dir(), reason="the Bible corpus is not beside the repository"
)

GERMAN = "Die Kinder spielen heute Nachmittag im Garten hinter dem Haus und lachen."
ENGLISH = "The children are playing in the garden behind the house this afternoon."
DANISH = "Børnene leger i haven bag huset i eftermiddag, og de griner hele tiden."
RUSSIAN = "Дети играют сегодня после обеда в саду за домом и смеются."
CHEROKEE = "ᎾᏍᎩᏃ ᎾᏍᏉ ᎢᎦᏛ ᎤᏂᎪᏓ ᎠᏂᏴᏫ"


def sample_of(first: str, second: str, *, lines: int = 12) -> EvenSample:
    sample = EvenSample()
    for number in range(lines):
        sample.offer([f"{first} {number}"], [f"{second} {number}"])
    return sample


@given(st.integers(0, 5000))
def test_a_sample_is_spread_evenly_over_all_lines(count: int) -> None:
    sample = EvenSample()
    for number in range(count):
        sample.offer([str(number)], [str(-number)])
    taken = [int(line) for line in sample.side(0)]
    assert taken == list(range(0, count, sample.stride))
    assert len(taken) <= SAMPLE_LINES
    assert len(taken) >= min(count, SAMPLE_LINES // 2)
    assert [int(line) for line in sample.side(1)] == [-number for number in taken]


@given(st.lists(st.integers(0, 700), max_size=12))
@example([127, 1])
def test_a_sample_does_not_depend_on_how_lines_are_offered(counts: list[int]) -> None:
    alone, together = EvenSample(), EvenSample()
    for count in counts:
        lines = [str(number) for number in range(count)]
        together.offer(lines, lines[::-1])
        for line, other in zip(lines, lines[::-1], strict=True):
            alone.offer([line], [other])
    assert together == alone


@pytest.mark.parametrize(
    ("codes", "first", "second"),
    [
        (("de", "en"), GERMAN, ENGLISH),
        (("deu_Latn", "eng_Latn"), GERMAN, ENGLISH),
        (("da", "de"), DANISH, GERMAN),
        (("en", "ru"), ENGLISH, RUSSIAN),
        (("chr", "en"), CHEROKEE, ENGLISH),
    ],
)
def test_exchanged_files_are_recognized(codes: tuple[str, str], first: str, second: str) -> None:
    assert not are_swapped(sample_of(first, second), codes)
    assert are_swapped(sample_of(second, first), codes)


@pytest.mark.parametrize(
    ("codes", "first", "second"),
    [
        (("de", "en"), ENGLISH, ENGLISH),  # copied, not exchanged
        (("de", "en"), DANISH, DANISH),  # a third language
        (("de", "lb"), ENGLISH, GERMAN),  # langdetect knows no Luxembourgish
        (("de", "en"), "word", "Wort"),  # too short to tell
        (("en", "ru"), "word", "слово"),
        (("sr_Cyrl", "sr_Latn"), RUSSIAN, RUSSIAN),
        (("en", "srp_Latn"), ENGLISH, "Deca se igraju u vrtu iza kuće i smeju se."),
    ],
)
def test_what_cannot_be_told_is_in_order(codes: tuple[str, str], first: str, second: str) -> None:
    assert not are_swapped(sample_of(first, second), codes)


def test_a_few_exchanged_lines_do_not_make_an_exchanged_file() -> None:
    sample = sample_of(GERMAN, ENGLISH, lines=30)
    for _ in range(12):
        sample.offer([ENGLISH], [GERMAN])
    assert not are_swapped(sample, ("de", "en"))


@pytest.mark.slow
@needs_bible
def test_no_real_pair_is_taken_for_exchanged_and_each_exchanged_one_is_found() -> None:
    codes = ("cs", "da", "de", "es", "fi", "nl", "pl", "ru", "sv", "zh")
    texts = {}
    for code in codes:
        with gzip.open(BIBLE / f"en-{code}" / f"test.{code}.gz", "rt", encoding="utf-8") as stream:
            texts[code] = stream.read().splitlines()
    for first, second in combinations(codes, 2):
        sample = EvenSample()
        for one, other in zip(texts[first], texts[second], strict=True):
            sample.offer([one], [other])
        assert not are_swapped(sample, (first, second)), (first, second)
        assert are_swapped(sample, (second, first)), (second, first)


def warning(text: str, *spellings: str) -> str | None:
    return code_warning(count_scripts(text * 3), spellings)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        (GERMAN, "de"),
        (CHEROKEE, "chr"),
        (RUSSIAN, "sr"),
        (GERMAN, "srp_Latn"),  # the script it names
        ("short", "ru"),  # too little text
        ("日本語です" * 9, "ja"),
        (CHEROKEE, "xyz"),  # nobody knows it, and nothing near is written so
        ("", "ru"),
    ],
)
def test_a_code_whose_text_is_in_its_script_gives_no_warning(text: str, spelling: str) -> None:
    assert spelling == "xyz" or warning(text, spelling) is None


def test_an_unknown_code_or_one_with_text_of_another_script_asks_what_was_meant() -> None:
    found = warning(RUSSIAN, "rux")
    assert found == "rux is the code of no known language (meant: ru, rue?)"
    assert warning(CHEROKEE, "xyz") == "xyz is the code of no known language"
    found = warning(RUSSIAN, "de")
    assert found is not None
    assert found.startswith("de has Cyrl text, usual is Latn (meant: be")


def test_the_script_is_the_usual_one_where_the_text_has_its_letters_else_that_of_the_text() -> None:
    japanese = Counter({"Hira": 5, "Hani": 4})
    assert script_of_language(japanese, ["jpn_Jpan"]) == "Jpan"
    assert script_of_language(Counter({"Latn": 5}), ["sr"]) == "Latn"
    assert script_of_language(Counter({"Cher": 5}), ["xyz"]) == "Cher"
    assert script_of_language(Counter(), ["ru"]) == "Cyrl"
    assert script_of_language(Counter(), ["xyz"]) is None
