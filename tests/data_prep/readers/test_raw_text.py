"""Text files: whatever a file holds, its lines are those between newlines, in bounded memory."""

import gzip
import io
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.readers.raw_text import FilesInStep
from pipeline.artifacts import raw_input as raw_bytes
from pipeline.artifacts.raw_input import iterate_raw_lines
from pipeline.errors import DataError
from pipeline.terminal import counted

MEBIBYTE = 2**20


class Dribble(io.RawIOBase):
    """A stream that gives as many bytes at a time as it is told, like a slow file system."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes = data, sizes

    def read(self, size: int = -1) -> bytes:
        step = self.sizes.pop() if self.sizes else len(self.data)
        given, self.data = self.data[: min(step, size)], self.data[min(step, size) :]
        return given


def naive_lines(data: bytes, longest: int) -> list[bytes]:
    lines = data.split(b"\n")
    return [line[:longest] for line in (lines if lines[-1] else lines[:-1])]


BYTES = st.lists(st.sampled_from([b"\n", b"a", b"\r", b"\0", b"\xff", b"ab", b"abcdefgh"])).map(
    b"".join
)


@settings(deadline=None)
@given(BYTES, st.lists(st.integers(1, 9)), st.integers(1, 12), st.integers(1, 9))
def test_lines_are_those_of_a_split_at_newlines_cut_behind_the_limit(
    data: bytes, sizes: list[int], limit: int, block: int
) -> None:
    expected = naive_lines(data, limit + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_bytes, "BLOCK_BYTES", block)
        stream = Dribble(data, sizes)
        assert list(raw_bytes._lines_of(stream, longest=limit + 1, note=len)) == expected


@pytest.mark.parametrize("name", ["text", "text.gz"])
@pytest.mark.parametrize("limit", [3, 2**18 - 1, 2**18, 2**20])
def test_plain_and_gzip_files_have_the_same_lines(tmp_path: Path, name: str, limit: int) -> None:
    data = b"one\n\n" + b"x" * 600_000 + b"\n" + b"y" * (2**18) + b"\nlast"
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = list(iterate_raw_lines(path, max_line_bytes=limit))
    assert found == naive_lines(data, limit + 1)


@pytest.mark.parametrize("ends", [b"eins\rzwei\rdrei\r", b"eins\rzwei\rdrei", b"a\rb\r"])
def test_text_whose_lines_end_by_carriage_returns_only_is_refused(
    tmp_path: Path, ends: bytes
) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(ends))
    with pytest.raises(DataError, match=r"text\.gz ends its lines by carriage returns only\."):
        list(iterate_raw_lines(path, max_line_bytes=9))


@pytest.mark.parametrize("kept", [b"a\rb", b"a\r\r", b"a\rb\rc\n", b"a\r\nb\rc\rd", b"\r\r", b""])
def test_carriage_returns_in_lines_and_before_newlines_stay(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "text").write_bytes(kept)
    assert list(iterate_raw_lines(tmp_path / "text", max_line_bytes=9)) == naive_lines(kept, 9)


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3), (0, 2), (2, 0)])
def test_unequal_counts_are_told_in_full(tmp_path: Path, first: int, second: int) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for path, count in zip(paths, (first, second), strict=True):
        path.write_bytes(b"x\n" * count)
    with pytest.raises(DataError, match=rf"a has {counted(first, 'line')} and .*b has {second}\."):
        list(FilesInStep(tuple(paths)))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder cannot be read"):
        list(iterate_raw_lines(tmp_path / "folder", max_line_bytes=10))


def write_gzip_of_one_character(path: Path, character: bytes, *, size: int) -> None:
    """A gzip file of one line of ``size`` bytes, made in little memory."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    with path.open("wb") as stream:
        for _ in range(size // MEBIBYTE):
            stream.write(compressor.compress(character * MEBIBYTE))
        stream.write(compressor.flush())


PREAMBLE = """
import resource, sys
from pathlib import Path
from data_prep import import_corpus
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.raw_input import iterate_raw_lines
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.recipe import Recipe
from pipeline.registry import STAGES
from pipeline.stage import StageCall

stage, recipe, root = STAGES["import_corpus"], Recipe(name="test"), Path(sys.argv[1])
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = size + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
IMPORT = """
import_corpus.run(
    StageCall(
        stage=stage, recipe=recipe, artifacts={}, raw={"raw": RawInput((root / "raw",))},
        out_dir=root / "out", records={}, config=recipe.sections(stage.sections),
    )
)
print(open_artifact(root / "out", kind="corpus").statistics["counts"])
"""
COUNT_LINES = """
for name in ("one.gz", "many.gz"):
    print(sum(1 for _ in iterate_raw_lines(root / name, max_line_bytes=2**20)))
"""
READ_AT_ONCE = """
import gzip
try:
    gzip.open(path).readline()
except MemoryError:
    print("too little for a whole line")
"""
"""What the tests rely on."""

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/statm").is_file(), reason="reads the size of a process in Linux's /proc"
)


def run_in_little_memory(
    program: str, root: Path, *, spare: int
) -> subprocess.CompletedProcess[str]:
    """Run a program that may have so many bytes beyond what its imports take."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(root), str(spare)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@needs_linux
def test_a_compressed_file_of_one_huge_line_is_imported_in_little_memory(tmp_path: Path) -> None:
    """256 MiB with 128 MiB to spare, of which a digest may take a chunk of 64 MiB."""
    path = tmp_path / "raw" / "de-en" / "train.de.gz"
    path.parent.mkdir(parents=True)
    write_gzip_of_one_character(path, b"\0", size=256 * MEBIBYTE)
    (path.parent / "train.en").write_bytes(b"one line\n")
    program = f"{IMPORT}\npath = {str(path)!r}{READ_AT_ONCE}"
    done = run_in_little_memory(program, tmp_path, spare=128 * MEBIBYTE)
    assert done.returncode == 0, done.stderr
    assert "'lines_too_long': 1" in done.stdout
    assert "too little for a whole line" in done.stdout


@pytest.mark.slow
@needs_linux
def test_lines_of_a_compressed_file_are_read_in_a_few_megabytes(tmp_path: Path) -> None:
    write_gzip_of_one_character(tmp_path / "one.gz", b"a", size=256 * MEBIBYTE)
    write_gzip_of_one_character(tmp_path / "many.gz", b"\n", size=16 * MEBIBYTE)
    done = run_in_little_memory(COUNT_LINES, tmp_path, spare=32 * MEBIBYTE)
    assert done.stdout == f"1\n{16 * MEBIBYTE}\n", done.stderr
