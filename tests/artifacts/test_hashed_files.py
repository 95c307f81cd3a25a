"""Files are hashed as they are written: by what is on disk, and it is on disk when that is said."""

import os
import time
from pathlib import Path

import pytest

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import digests
from pipeline.artifacts.artifact import FileRecord, new_artifact, open_artifact
from pipeline.artifacts.digests import chunks_of, file_record, write_hashed
from pipeline.distributed import progress

CHUNK = 100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", CHUNK)


def pieces_of(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (99, 1), (100,), (101,), (0, 250, 0, 3, 47), (7,) * 60, (1000, 1)]
)
def test_the_record_is_that_of_the_file_read_back(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    pieces = pieces_of(*sizes)
    record = write_hashed(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert record == file_record(tmp_path / "file")


def test_chunks_hold_all_bytes_in_order_and_are_full_but_the_last() -> None:
    pieces = pieces_of(30, 0, 230, 1, 64)
    chunks = list(chunks_of(pieces))
    assert b"".join(part for chunk in chunks for part in chunk) == b"".join(pieces)
    assert [sum(part.nbytes for part in chunk) for chunk in chunks] == [100, 100, 100, 25]


def test_writing_is_at_most_a_chunk_ahead_of_the_disk_and_every_chunk_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def sync_slowly(file: int) -> None:
        time.sleep(0.05)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    before = progress.count()
    write_hashed(tmp_path / "file", pieces_of(130, 5, 290))
    assert len(synced) == progress.count() - before == 5
    assert synced[-1] == 425
    for number, size in enumerate(synced, start=1):
        assert min(100 * number, 425) <= size <= 100 * (number + 1)


@pytest.mark.parametrize(("folder", "number"), [("nowhere", 2), ("", 5)])
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, number: int
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="/file") as found:
        write_hashed(tmp_path / folder / "file", pieces_of(1000))
    assert found.value.errno == number


def test_an_artifact_takes_the_records_over_and_reads_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def file_records(paths: list[Path]) -> dict[Path, FileRecord]:
        read.extend(path.name for path in paths)
        return digests.file_records(paths)

    monkeypatch.setattr(artifacts, "file_records", file_records)
    with new_artifact(
        tmp_path / "made", kind="checkpoint", stage="x", config={}, inputs={}
    ) as writer:
        path = writer.path("weights")
        writer.settled[path] = write_hashed(path, pieces_of(250))
        writer.path("notes").write_text("notes")
    assert read == ["notes"]
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    assert len(made.manifest.files["weights"].chunks) == 3
    made.check()
