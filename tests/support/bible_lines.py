"""Lines of the Bible in 25 languages, where they are at hand."""

import gzip
from itertools import islice
from pathlib import Path

import pytest

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"


def bible_lines(count: int, *, split: str = "test", english: bool = False) -> dict[str, list[str]]:
    """Return language code → its first lines of a split; skip the test if the Bible is missing."""
    if not BIBLE.is_dir():
        pytest.skip(f"{BIBLE} is missing: it holds the Bible's lines.")
    paths = {path.name.split(".")[1]: path for path in sorted(BIBLE.glob(f"en-*/{split}.*.gz"))}
    return {
        code: _first_lines(path, count) for code, path in paths.items() if english or code != "en"
    }


def _first_lines(path: Path, count: int) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for line in islice(stream, count)]
