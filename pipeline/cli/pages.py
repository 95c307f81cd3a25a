"""Write HTML pages in place of earlier pages of the same kind, and of nothing else."""

from pathlib import Path

from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError

_START = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="{}">\n'
"""Beginning of every page, by which it is recognized: no other file is replaced by one."""


def refuse_to_replace_another(out: Path, *, generator: str) -> None:
    """Refuse to write over anything but an earlier page of this generator.

    Raises:
        ArtifactError: ``out`` is a folder, a link or another file.
    """
    if out.is_dir():
        raise ArtifactError(f"--out {out} is a folder. Name a file, as in {generator}.html.")
    if not (out.exists() or out.is_symlink()):
        return
    start = _START.format(generator).encode("ascii")
    try:
        with out.open("rb") as stream:
            is_own = stream.read(len(start)) == start
    except OSError:
        is_own = False
    if out.is_symlink() or not is_own:
        raise ArtifactError(
            f"--out {out} is there already and no page of {generator}. Name another file, or move "
            "it away."
        )


def write_page(out: Path, page: str) -> None:
    """Write a page whole or not at all.

    Raises:
        ArtifactError: The file cannot be written.
    """
    unfinished = unfinished_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(out)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written ({error.strerror}). Name another --out."
        ) from error
