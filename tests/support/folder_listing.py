"""What lies in a folder, for tests that look at what stages leave behind."""

from pathlib import Path


def names_in(directory: Path) -> list[str]:
    """Names in a folder, sorted."""
    return sorted(path.name for path in directory.iterdir())
