"""Files are hashed as they are written: by what is on disk, and it is on disk when that is said."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import digests, places
from pipeline.artifacts.artifact import FileRecord, new_artifact, open_artifact
from pipeline.artifacts.digests import HashedFiles, chunks_of, file_record
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
def test_the_digests_are_those_of_the_file_read_back(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    pieces = pieces_of(*sizes)
    with HashedFiles() as files:
        files.write(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert files.records == {tmp_path / "file": file_record(tmp_path / "file")}


def test_chunks_hold_all_bytes_in_order_and_are_full_but_the_last() -> None:
    pieces = pieces_of(30, 0, 230, 1, 64)
    chunks = list(chunks_of(pieces))
    assert b"".join(part for chunk in chunks for part in chunk) == b"".join(pieces)
    assert [sum(part.nbytes for part in chunk) for chunk in chunks] == [100, 100, 100, 25]


def test_every_file_is_on_disk_when_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}

    def note(path: Path) -> None:
        synced[path.name] = path.stat().st_size
        places.sync(path)

    monkeypatch.setattr(digests, "sync", note)
    with HashedFiles() as files:
        for index in range(3):
            files.write(tmp_path / f"{index}", pieces_of(130 * index, 5))
    assert synced == {"0": 5, "1": 135, "2": 265}


def test_files_are_written_while_others_go_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_written = threading.Event()

    def sync(_: Path) -> None:
        assert are_written.wait(20)

    monkeypatch.setattr(digests, "sync", sync)
    with HashedFiles() as files:
        for index in range(3):
            files.write(tmp_path / f"{index}", pieces_of(250))
        are_written.set()
    assert len(files.records) == 3


def test_writing_waits_for_a_slow_disk_whose_every_sync_is_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sync takes as long as the writer may, who would be done with all of it."""
    is_done, syncs = threading.Event(), 0

    def pieces() -> Iterator[memoryview]:
        for _ in range(20):
            yield memoryview(os.urandom(CHUNK))
        is_done.set()

    def sync(_: Path) -> None:
        nonlocal syncs
        if not syncs:
            assert not is_done.wait(0.5)
        syncs += 1

    monkeypatch.setattr(digests, "sync", sync)
    before = progress.count()
    with HashedFiles() as files:
        files.write(tmp_path / "file", pieces())
    assert syncs >= 20 // (digests.MOST_UNSYNCED + 1)
    assert progress.count() - before == 20 + syncs


def fail(_: Path) -> None:
    raise OSError(5, "Input/output error")


def test_what_cannot_be_forced_to_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "sync", fail)
    with pytest.raises(OSError, match="Input/output error"), HashedFiles() as files:
        files.write(tmp_path / "file", pieces_of(10))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/file"), HashedFiles() as files:
        files.write(tmp_path / "nowhere" / "file", pieces_of(1000))
    assert files.records == {}


@pytest.mark.parametrize("ask", [artifacts.Artifact.verify, lambda made: made.file("weights")])
def test_an_artifact_takes_the_digests_over_and_reads_no_such_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[artifacts.Artifact], object],
) -> None:
    read: list[str] = []

    def file_records(paths: list[Path]) -> dict[Path, FileRecord]:
        read.extend(path.name for path in paths)
        return digests.file_records(paths)

    monkeypatch.setattr(artifacts, "file_records", file_records)
    with new_artifact(
        tmp_path / "made", kind="checkpoint", stage="x", config={}, inputs={}
    ) as writer:
        with HashedFiles() as files:
            files.write(writer.path("weights"), pieces_of(250))
        writer.settled |= files.records
        writer.path("notes").write_text("notes")
    assert read == ["notes"]
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    assert len(made.manifest.files["weights"].chunks) == 3
    ask(made)
