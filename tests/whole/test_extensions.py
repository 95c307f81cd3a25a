"""The core is complete without extensions: each can be deleted, with its name in one list."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.added_variants import commands_in, copy_with
from support.raw_trees import unpack_stored_run

pytestmark = pytest.mark.slow

IMPORT_ALL = """
import importlib
import os
from pathlib import Path

root = Path(os.environ["PYTHONPATH"])
for package in ("pipeline", "data_prep"):
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] != "__main__":
            importlib.import_module(".".join(part for part in parts if part != "__init__"))
"""
TINY = """
parent = "moe_lgr.toml"
[training]
updates = 2
validate_every = 2
checkpoint_every = 2
[optimizer]
warmup_updates = 1
"""
INSTALLED = "pipeline/extensions/installed.py"


@dataclass(frozen=True)
class Removal:
    """What is deleted of a copy of the packages, and the edits that follow from it.

    Attributes:
        packages: folders and modules.
        edits: text → what replaces it, by file.
    """

    packages: tuple[str, ...]
    edits: dict[str, list[tuple[str, str]]]


def without(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return the edits that take an extension off the list of them."""
    names = ["analysis", "byte_front_ends", "language_modules", "tasks"]
    left = [other for other in names if other != name]
    return {
        INSTALLED: [
            (f"import {', '.join(names)}\n", f"import {', '.join(left)}\n"),
            (f"    {name}.EXTENSION,\n", ""),
        ]
    }


REMOVALS = {
    "analysis": Removal(("pipeline/extensions/analysis",), without("analysis")),
    "tasks": Removal(("pipeline/extensions/tasks",), without("tasks")),
    "language modules": Removal(
        ("pipeline/extensions/language_modules",), without("language_modules")
    ),
    "byte front ends": Removal(
        (
            "pipeline/extensions/byte_front_ends",
            # The scales that a front end of this extension chooses:
            "pipeline/extensions/analysis/analyze_scales.py",
        ),
        without("byte_front_ends"),
    ),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a stored run, whose shards are trained on."""
    folder = tmp_path_factory.mktemp("stored")
    unpack_stored_run(folder)
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", REMOVALS)
def test_the_rest_imports_trains_and_translates_without_an_extension(
    name: str, stored: Path, tmp_path: Path
) -> None:
    removal = REMOVALS[name]
    copy = copy_with(tmp_path / "copy", [])
    for package in removal.packages:
        path = copy / package
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for file, edits in removal.edits.items():
        text = (copy / file).read_text(encoding="utf-8")
        for old, new in edits:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (copy / file).write_text(text, encoding="utf-8")
    out = str(tmp_path / "new")
    given = ["--recipe", "tiny.toml", "--shards", "run/shards", "--mixture", "run/mixture"]
    given += ["--groups", "run/groups", "--out", out]
    languages = ["--from", "en", "--to", "de"]
    _, answers = commands_in(
        copy,
        ["pretrain", *given],
        ["translate", "--checkpoint", out, *languages],
        cwd=stored,
        stdin="one\ntwo\n",
        first=IMPORT_ALL,
    )
    assert len(answers.splitlines()) == 2
