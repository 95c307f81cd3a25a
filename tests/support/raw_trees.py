"""Raw text as it comes from outside, and the corpus that an importing stage makes of it."""

import gzip
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.recipe import Recipe
from support.stage_runs import run_stage


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Lay out a folder; names that end in .gz are compressed."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return root


def flores(codes: Iterable[str]) -> dict[str, str]:
    """The files of FLORES-200 in some languages, of two lines each."""
    return {
        f"{split}/{code}.{split}": f"{code} {split}\n" * 2
        for code in codes
        for split in ("dev", "devtest")
    }


def unpack_stored_run(folder: Path) -> Path:
    """Unpack the run that ``tests/whole/test_stored_run.py`` describes; return its folder."""
    with tarfile.open(Path(__file__).parents[1] / "whole" / "stored_run.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


Raw = Path | RawInput | Mapping[str, str | bytes] | None


def run_import(
    name: str, out_dir: Path, raw: Raw, recipe: Recipe | None = None, **more: Any
) -> Artifact:
    """The corpus that an importing stage makes of raw text, by a recipe or by sections of one.

    Files by name are laid out in the folder ``raw`` next to the corpus.
    """
    found = write(out_dir.with_name("raw"), raw) if isinstance(raw, Mapping) else raw
    given = RawInput((found,)) if isinstance(found, Path) else found
    return run_stage(name, out_dir, {}, recipe, raw=given, **more)
