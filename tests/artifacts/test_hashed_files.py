"""Files are hashed as they are written, and are on disk when their record is returned."""

import os
import time
from pathlib import Path

import pytest

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import manifest as digests
from pipeline.artifacts.artifact import FileRecord, new_artifact, open_artifact
from pipeline.artifacts.manifest import file_records, write_hashed
from pipeline.distributed import progress


@pytest.fixture(autouse=True)
def frequent_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SYNC_BYTES", 100)


def pieces_of(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (99, 1), (100,), (101,), (0, 250, 0, 3, 47), (7,) * 60, (1000, 1)]
)
def test_the_record_is_that_of_the_file_read_back(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    pieces = pieces_of(*sizes)
    record = write_hashed(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert record == file_records([tmp_path / "file"])[tmp_path / "file"]


def test_writing_is_little_ahead_of_the_disk_and_every_sync_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def sync_slowly(file: int) -> None:
        time.sleep(0.05)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    before = progress.count()
    write_hashed(tmp_path / "file", pieces_of(130, 5, 290))
    assert len(synced) == progress.count() - before == 4
    assert synced[-1] == 425
    for due, size in zip((100, 235, 335, 425), synced, strict=True):
        assert due <= size <= due + 200


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
    made.check()
