"""Raw text as it comes from outside, and the corpus that an importing stage makes of it."""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep import import_corpus, import_tests
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.raw_input import RawInput, RawPaths
from pipeline.config.recipe import Recipe
from pipeline.registry import STAGES
from pipeline.stage import StageCall

CODE: dict[str, Any] = {"import_corpus": import_corpus, "import_tests": import_tests}


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Lay out a folder; names that end in .gz are compressed."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return root


def run_import(
    name: str, out_dir: Path, raw: Path | RawInput | None, recipe: Recipe, *, processes: int = 1
) -> Artifact:
    """The corpus that an importing stage makes of raw text."""
    stage = STAGES[name]
    given = RawPaths((raw,)) if isinstance(raw, Path) else raw
    call = StageCall(
        stage=stage,
        recipe=recipe,
        artifacts={},
        raw={} if given is None else {"raw": given},
        out_dir=out_dir,
        records={},
        config=recipe.sections(stage.sections),
        processes=processes,
    )
    CODE[name].run(call)
    return open_artifact(out_dir, kind="corpus")
