"""What lies in a folder, for tests that look at what stages leave behind."""

from pathlib import Path


def names_in(directory: Path) -> list[str]:
    """Names in a folder, sorted, without the notes on which files were found to be right."""
    names = (path.name for path in directory.iterdir())
    return sorted(name for name in names if not name.endswith(".verified.jsonl"))
