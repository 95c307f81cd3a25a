"""Write HTML pages in place of earlier pages of the same kind, and of nothing else."""

from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.manifest import read_manifest
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError

_START = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="{}">\n'
"""Beginning of every page, by which it is recognized: no other file is replaced by one."""


def refuse_to_replace_another(out: Path, *, generator: str) -> None:
    """Refuse to write into an artifact, or over anything but an earlier page of this generator.

    Raises:
        ArtifactError: ``out`` lies within an artifact, or is a folder, a link or another file.
    """
    for folder in out.resolve().parents:
        if _is_artifact(folder):
            raise ArtifactError(
                f"--out {out} lies within the artifact {folder}, which must stay as it is. Choose "
                "another folder."
            )
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


def _is_artifact(folder: Path) -> bool:
    with suppress(ArtifactError):  # other software has manifests, too
        return read_manifest(folder) is not None
    return False


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
