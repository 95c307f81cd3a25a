"""Feeds every reader every kind of broken file, in a process of bounded memory.

``python -m support.readers_sweep FOLDER RESULTS.json ONE_IN [READER…]`` writes, per reader, how
many files it was given and what went wrong: anything but success or one sentence that a user can
act on. With ``ONE_IN`` 1 every case runs; with N, about one in N, chosen by a checksum of its name.
"""

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from support.corruptions import foreign, hostile, partial
from support.readable_artifacts import READERS, Reader, Shelf, build_shelf

MEMORY = 3 * 2**30
"""Bytes of address space beyond what the process has when the sweep begins."""
LONGEST_SENTENCE = 1500
LONGEST_LINE = 2**20
SLOW_SECONDS = 20.0
COMPLAINTS = ("Traceback", "panicked", "E0000", "WARNING", "terminate", "rror:")
"""Signs that something printed more than our sentence."""
MISSING, FOLDER = "missing", "a folder"


def reseal(directory: Path) -> None:
    """Make the manifest say of every file what it is now, so that digests hide nothing."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    files = manifest["files"]
    for name in files:
        file = directory / name
        if file.is_file():
            content = file.read_bytes()
            files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.unlink()
    path.write_text(json.dumps(manifest), encoding="utf-8")


def shelf_files(shelf: Shelf) -> dict[str, bytes]:
    """One file of every kind: what a user might put in another's place."""
    chosen: dict[str, Path] = {}
    for path in sorted(shelf.folder.rglob("*")):
        if path.is_file():
            is_named_by_kind = path.suffix in (".json", ".jsonl", ".toml")
            chosen.setdefault(path.name if is_named_by_kind else path.suffix, path)
    return {str(path.relative_to(shelf.folder)): path.read_bytes() for path in chosen.values()}


def targets(reader: Reader, directory: Path) -> list[str]:
    """The files of an artifact that a reader reads."""
    names = [
        path.relative_to(directory).as_posix()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
    return [
        name
        for name in names
        if (name.startswith(reader.files) or name == "manifest.json")
        and not name.startswith(reader.without or ("\0",))
    ]


def cases(
    reader: Reader, name: str, content: bytes, others: dict[str, bytes]
) -> Iterator[tuple[str, bytes]]:
    yield MISSING, b""
    yield FOLDER, b""
    yield from foreign(name, others)
    yield from partial(content)
    for label, other in hostile(name, content, below=reader.manifest):
        if len(other) <= LONGEST_LINE or not is_text(name):
            yield label, other


def is_text(name: str) -> bool:
    """Lines of text of any length are read as what they are."""
    return name.endswith((".txt", ".devtest")) or "/train." in name


def broken_copy(directory: Path, name: str, label: str, content: bytes, *, place: Path) -> Path:
    """The artifact with one file changed; all other files are linked."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(directory, place / "artifact", copy_function=os.link)
    shutil.rmtree(place / "scratch", ignore_errors=True)
    (place / "scratch").mkdir()
    path = place / "artifact" / name
    path.unlink()
    if label == FOLDER:
        path.mkdir()
    elif label != MISSING:
        path.write_bytes(content)
    if name != "manifest.json" and (place / "artifact" / "manifest.json").is_file():
        reseal(place / "artifact")
    return place / "artifact"


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """What C++ and Rust libraries print too goes to a file."""
    kept = os.dup(2)
    with path.open("wb") as stream:
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def outcome(
    reader: Reader, shelf: Shelf, directory: Path, scratch: Path
) -> tuple[str | None, bool]:
    """What is wrong with how a reader took an artifact (None: nothing), and whether it refused."""
    log_path = scratch.with_name("stderr")
    with captured(log_path):
        problem, refused = _outcome(reader, shelf, directory, scratch)
    log = log_path.read_text(errors="replace")
    if problem is None and any(sign in log for sign in COMPLAINTS):
        return f"printed {log[:300]!r}", refused
    return problem, refused


def _outcome(
    reader: Reader, shelf: Shelf, directory: Path, scratch: Path
) -> tuple[str | None, bool]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            reader.read(shelf, directory, scratch)
    except UserError as error:
        said = str(error)
        if "\n" in said or not said.endswith((".", "?")) or len(said) > LONGEST_SENTENCE:
            return f"no sentence: {said[:400]!r}", True
        return None, True
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-3:]
        where = " ← ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)
        return f"{type(error).__name__}: {str(error)[:300]} ({where})", False
    return None, False


def is_sampled(reader: Reader, name: str, label: str, *, one_in: int) -> bool:
    """Whether a case runs: the choice depends on its names alone, so every run makes the same."""
    return zlib.crc32(f"{reader.name}\0{name}\0{label}".encode()) % one_in == 0


def sweep(
    reader: Reader, shelf: Shelf, others: dict[str, bytes], *, place: Path, one_in: int
) -> dict[str, Any]:
    """Give a reader every sampled broken form of every file that it reads."""
    directory = shelf.path(reader.of)
    found: dict[str, Any] = {"cases": 0, "refused": 0, "failures": []}
    assert outcome(reader, shelf, directory, _empty(place / "intact")) == (None, False)
    for name in targets(reader, directory):
        content = (directory / name).read_bytes()
        for label, other in cases(reader, name, content, others):
            if not is_sampled(reader, name, label, one_in=one_in):
                continue
            broken = broken_copy(directory, name, label, other, place=place / "broken")
            began = time.process_time()  # another's work does not count
            problem, refused = outcome(reader, shelf, broken, place / "broken" / "scratch")
            if (took := time.process_time() - began) > SLOW_SECONDS:
                problem = problem or f"took {took:.0f} s"
            found["cases"] += 1
            found["refused"] += refused
            if problem is not None:
                found["failures"].append(f"{name}, {label}: {problem}")
    return found


def _empty(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def main(folder: Path, results: Path, one_in: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        shelf = build_shelf(folder / "shelf")
    others = shelf_files(shelf)
    limit_memory()
    found = {
        reader.name: sweep(reader, shelf, others, place=folder, one_in=one_in)
        for reader in READERS
        if not names or reader.name in names
    }
    results.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
