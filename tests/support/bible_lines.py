"""Test lines of the Bible in 25 languages, where they are at hand."""

import gzip
from pathlib import Path

import pytest

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"


def bible_lines(count: int) -> dict[str, list[str]]:
    """Language code → its first test lines; skips the test where they are missing."""
    if not BIBLE.is_dir():
        pytest.skip(f"{BIBLE} is missing: it holds the Bible's test lines.")
    paths = sorted(BIBLE.glob("en-*/test.*.gz"))
    return {
        code: gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()[:count]
        for path in paths
        if (code := path.name.split(".")[1]) != "en"
    }
