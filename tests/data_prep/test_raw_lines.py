"""Raw lines: which are sentences, and where the others are listed."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import raw_lines
from data_prep.raw_lines import LineCounts, checked_lines, good_lines, refuse_damaged
from data_prep.readers.raw_text import FilesInStep, source_of
from pipeline.errors import DataError


def read(
    tmp_path: Path, sides: tuple[bytes, bytes], *, max_line_bytes: int, limit: int | None = None
) -> tuple[list[list[str]], LineCounts, list[dict[str, object]]]:
    paths = tmp_path / "train.de", tmp_path / "train.en"
    for path, data in zip(paths, sides, strict=True):
        path.write_bytes(data)
    counts, quarantine = LineCounts(), tmp_path / "quarantine.jsonl"
    quarantine.write_bytes(b"")
    sources = [source_of(path, tmp_path) for path in paths]
    lines = checked_lines(FilesInStep(paths, max_line_bytes), max_line_bytes=max_line_bytes)
    found = [
        list(line)
        for line in good_lines(
            lines, sources, limit=limit, quarantine_path=quarantine, counts=counts
        )
    ]
    refuse_damaged(sources, counts)
    return found, counts, [json.loads(line) for line in quarantine.open(encoding="utf-8")]


def test_a_line_beyond_the_limit_is_quarantined_with_its_counterpart(tmp_path: Path) -> None:
    sides = b"eins\n" + b"z" * 11 + b"\ndreidreid\n", b"one\ntwo\n" + b"t" * 10 + b"\n"
    found, counts, records = read(tmp_path, sides, max_line_bytes=10)
    assert found == [["eins", "one"], ["dreidreid", "t" * 10]]
    assert records == [{"file": "train.de", "line": 2, "reason": "too_long"}]
    assert (counts.read, counts.kept, counts.quarantined) == (3, 2, 1)
    assert [dict(side) for side in counts.no_text] == [{"too_long": 1}, {}]


def test_a_character_cut_by_the_limit_is_too_long_and_not_invalid(tmp_path: Path) -> None:
    _, counts, records = read(tmp_path, ("äöü\n".encode(), b"a\n"), max_line_bytes=4)
    assert records[0]["reason"] == "too_long"
    assert counts.no_text[0] == {"too_long": 1}


def test_both_sides_of_a_bad_pair_are_listed_and_the_pair_counted_once(tmp_path: Path) -> None:
    _, counts, records = read(tmp_path, (b"\xff\na\n", b"\0\nb\n"), max_line_bytes=10)
    assert [(record["file"], record["reason"]) for record in records] == [
        ("train.de", "invalid_utf8"),
        ("train.en", "nul"),
    ]
    assert (counts.kept, counts.quarantined) == (1, 1)


def test_files_of_long_lines_are_refused(tmp_path: Path) -> None:
    lines = b"a long line\n" * 20
    with pytest.raises(DataError, match=r"20 of 20 lines .*too_long.*Split them"):
        read(tmp_path, (lines, lines), max_line_bytes=5)


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
