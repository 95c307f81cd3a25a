"""What checking digests costs: beside reading and writing the same bytes, and the second time.

Hashing is timed against reading the same file from memory and from the disk, and against writing
and syncing it; opening an artifact of which nothing is remembered against one that is; two ranks
that hash a share each against one that hashes all, a thread per rank. Ratios are the peer's time by
ours: above 1, hashing is not what one waits for.

    python tests/bench/digests.py [--quick] [--rounds N] [--threads N] [--json FILE]
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Options, Row, compare, interleaved, parse_options, report
from support.process_pool import ProcessPool

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import digests
from pipeline.artifacts.artifact import Artifact, check_together, new_artifact, open_artifact
from pipeline.artifacts.digests import file_record
from pipeline.distributed.world import World

MEBIBYTE = 2**20
CASES = {
    r"hash 512 MiB in memory, against reading": "milliseconds",
    r"hash 512 MiB from disk, against (reading|writing and syncing)": "milliseconds",
    r"open what is remembered, against hashing it": "milliseconds",
    r"two ranks, a share each, against one rank": "milliseconds",
}
READING_TARGET = 0.10
"""Of the speed of copying from memory: there is no disk that fast."""
DISK_TARGET = 0.5
REMEMBERED_TARGET = 50.0
SHARE_TARGET = 1.5


def read(path: Path) -> None:
    """All of a file, into one buffer again and again."""
    buffer = bytearray(digests.READ_BYTES)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def read_from_disk(path: Path) -> None:
    forget_pages(path)
    read(path)


def hash_from_disk(path: Path) -> None:
    forget_pages(path)
    file_record(path)


def forget_pages(path: Path) -> None:
    """Ask the kernel to drop a file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Write and force to disk."""
    with path.open("wb", buffering=0) as stream:
        stream.write(content)
        os.fsync(stream.fileno())


def make_artifact(directory: Path, source: Path) -> Artifact:
    with new_artifact(directory, kind="shards", stage="bench", config={}, inputs={}) as writer:
        shutil.copyfile(source, writer.path("tokens"))
        os.utime(writer.path("tokens"), (0, 0))
    return open_artifact(directory, kind="shards")


def open_unknown(artifact: Artifact) -> None:
    """As a process does that has not checked the file yet."""
    artifacts._INTACT.clear()
    artifact.file("tokens")


def check_share(_: World, directory: Path) -> None:
    artifacts._INTACT.clear()
    with mock.patch.object(digests, "MAX_THREADS", 1):
        check_together(open_artifact(directory, kind="shards"))


def on_ranks(pool: ProcessPool, artifact: Artifact) -> Callable[[], object]:
    def run() -> None:
        pool.run(check_share, artifact.directory)

    return run


def compare_hashing(path: Path, content: bytes, options: Options) -> list[Row]:
    size = f"{len(content) // MEBIBYTE} MiB"
    in_memory = interleaved(
        {"ours": lambda: file_record(path), "reading": lambda: read(path)}, rounds=options.rounds
    )
    from_disk = interleaved(
        {
            "ours": lambda: hash_from_disk(path),
            "reading": lambda: read_from_disk(path),
            "writing and syncing": lambda: write(path.with_name("written"), content),
        },
        rounds=options.rounds,
    )
    return [
        *compare(in_memory, case=f"hash {size} in memory", target=READING_TARGET),
        *compare(from_disk, case=f"hash {size} from disk", target=DISK_TARGET),
    ]


def compare_opening(artifact: Artifact, options: Options) -> list[Row]:
    opened = interleaved(
        {
            "hashing it": lambda: open_unknown(artifact),
            "ours": lambda: artifact.file("tokens"),
        },
        rounds=options.rounds,
    )
    return compare(opened, case="open what is remembered", target=REMEMBERED_TARGET)


def compare_ranks(artifact: Artifact, options: Options) -> list[Row]:
    one, two = ProcessPool(1), ProcessPool(2)
    try:
        seconds = interleaved(
            {"one rank": on_ranks(one, artifact), "ours": on_ranks(two, artifact)},
            rounds=options.rounds,
        )
    finally:
        one.close()
        two.close()
    return compare(seconds, case="two ranks, a share each", target=SHARE_TARGET)


def main() -> None:
    options = parse_options(__doc__ or "")
    digests.MAX_THREADS = options.threads
    size = (8 if options.quick else 512) * MEBIBYTE
    with tempfile.TemporaryDirectory() as folder:
        path, content = Path(folder) / "file", os.urandom(size)
        write(path, content)
        rows = compare_hashing(path, content, options)
        artifact = make_artifact(Path(folder) / "artifact", path)
        rows += compare_opening(artifact, options)
        rows += compare_ranks(artifact, options)
    report(rows, options, shapes=f"files of {size // MEBIBYTE} MiB, chunks of 64")


if __name__ == "__main__":
    main()
