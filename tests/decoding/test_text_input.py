"""Tests of pipeline/decoding/text_input.py."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding import text_input
from pipeline.decoding.text_input import IncomingLine, IncomingLines, TextFile, without_line_breaks
from pipeline.errors import DataError


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            continue


def everything(lines: IncomingLines, *, most: int = 256) -> list[IncomingLine]:
    found: list[IncomingLine] = []
    while batch := lines.take(most):
        assert len(batch) <= most
        found += batch
    return found


def read(path: Path, data: bytes, *, most: int = 256, **options: int) -> list[IncomingLine]:
    path.write_bytes(data)
    with path.open("rb") as stream:
        return everything(IncomingLines(stream.fileno(), **options), most=most)


def texts(lines: list[IncomingLine]) -> list[str]:
    return [line.text for line in lines]


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.text(st.sampled_from("aé中\u2028\x85\v ")), max_size=12),
    ends=st.booleans(),
    most=st.integers(1, 5),
)
def test_a_file_s_lines_come_in_order_and_line_feeds_alone_end_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, most: int
) -> None:
    joined = "\n".join(lines) + ("\n" if ends and lines else "")
    found = read(tmp_path_factory.mktemp("lines") / "input", joined.encode(), most=most)
    expected = joined.removesuffix("\n").split("\n") if joined else []
    assert texts(found) == expected
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    assert not any(line.problem for line in found)


@pytest.mark.timeout(60)
def test_a_line_is_given_out_while_its_writer_waits(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = IncomingLines(reader)
    for text in ("eins", "zwei"):
        os.write(writer, f"{text}\n".encode())
        assert texts(lines.take(256)) == [text]  # would wait for ever for a full batch


def test_half_a_line_waits_for_its_other_half_and_keeps_no_whole_one_waiting(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    lines = IncomingLines(reader)
    os.write(writer, b"ganz\nha")
    assert texts(lines.take(256)) == ["ganz"]
    threading.Timer(0.2, lambda: os.write(writer, b"lb\n")).start()
    assert texts(lines.take(256)) == ["halb"]


def test_lines_that_are_there_come_together(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"a\n" * 100)
    lines = IncomingLines(reader)
    assert len(lines.take(64)) == 64
    assert len(lines.take(64)) == 36


def test_a_line_that_is_not_utf_8_has_its_number_and_an_empty_text(tmp_path: Path) -> None:
    found = read(tmp_path / "input", b"gut\nb\xffd\n\ngut\n")
    assert texts(found) == ["gut", "", "", "gut"]
    assert [line.number for line in found if line.problem] == [2]
    assert found[1].problem == "is not UTF-8 (invalid start byte at byte 1)"


def test_a_line_that_is_too_long_is_named_and_the_next_one_is_whole(tmp_path: Path) -> None:
    data = b"a" * 100 + b"\n" + b"b" * 101 + b"\nc\n" + b"d" * 300_000
    found = read(tmp_path / "input", data, max_bytes=100)
    assert texts(found) == ["a" * 100, "", "c", ""]
    assert [line.problem for line in found] == ["", "is longer than 100 bytes"] * 2


def test_memory_is_bounded_where_a_line_has_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0
    kept = IncomingLines._continue

    def watched(self: IncomingLines, piece: bytes) -> None:
        nonlocal largest
        kept(self, piece)
        largest = max(largest, len(self._begun))

    monkeypatch.setattr(IncomingLines, "_continue", watched)
    found = read(tmp_path / "input", b"x" * 3_000_000, max_bytes=100_000)
    assert [line.problem for line in found] == ["is longer than 100,000 bytes"]
    assert 0 < largest <= 100_000


def test_not_all_of_a_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "AHEAD_BYTES", 10_000)
    path = tmp_path / "input"
    path.write_bytes((b"x" * 5_000 + b"\n") * 400)
    with path.open("rb") as stream:
        lines = IncomingLines(stream.fileno())
        assert len(lines.take(256)) < 40
        assert os.lseek(stream.fileno(), 0, os.SEEK_CUR) <= 2 * text_input.READ_BYTES
        assert len(everything(lines)) > 300


def test_a_byte_order_mark_and_carriage_returns_are_dropped(tmp_path: Path) -> None:
    found = read(tmp_path / "input", "\ufeffeins\r\nzw\rei\r\n\ufeffdrei\n".encode())
    assert texts(found) == ["eins", "zw\rei", "\ufeffdrei"]


@pytest.mark.parametrize("ends", ["\ufeffeins\rzwei\rdrei", "a\rb\r"])
def test_lines_that_end_by_carriage_returns_only_are_refused(tmp_path: Path, ends: str) -> None:
    path = tmp_path / "input.txt"
    with pytest.raises(DataError, match=r"^Standard input ends its li"):
        read(path, ends.encode())
    finding = r"^\S*input\.txt ends its lines by carriage returns only\."
    with pytest.raises(DataError, match=finding):
        list(TextFile(path, "input.txt", "text").lines())


@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("kind", ["UTF-16", "UTF-32"])  # the former as Windows saves "Unicode"
def test_wide_encodings_are_refused_by_their_names(tmp_path: Path, kind: str, order: str) -> None:
    path = tmp_path / "input.txt"
    with pytest.raises(DataError, match=rf"^Standard input is {kind}\. .*-f {kind} "):
        read(path, "\ufeffone\r\ntwo\n".encode(f"{kind}-{order}"))
    with pytest.raises(DataError, match=rf"^\S*input\.txt is {kind}\. Convert"):
        list(TextFile(path, "input.txt", "text").lines())


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(DataError, match=r"Standard input cannot be read \(Is a directory\)"):
            IncomingLines(descriptor).take(1)
    finally:
        os.close(descriptor)
    with pytest.raises(DataError, match="cannot be read"):
        IncomingLines(descriptor).take(1)


def test_everything_that_ends_a_line_becomes_a_space() -> None:
    breaks = [chr(i) for i in range(0x3000) if len(f"a{chr(i)}b".splitlines()) > 1]
    assert len(breaks) > 8
    assert without_line_breaks("a" + "a".join(breaks) + "a") == " ".join("a" * (len(breaks) + 1))
