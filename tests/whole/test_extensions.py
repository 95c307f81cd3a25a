"""The core is complete without extensions: they can be deleted, with their names in one list.

``test_architecture`` checks that no module outside an extension, the list aside, needs it.
"""

import shutil
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
NAMES = ("analysis", "byte_front_ends", "language_modules", "tasks")


def test_the_rest_imports_trains_and_translates_without_extensions(tmp_path: Path) -> None:
    unpack_stored_run(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    extensions = copy_with(tmp_path / "copy", []) / "pipeline" / "extensions"
    installed = extensions / "installed.py"
    text = installed.read_text(encoding="utf-8")
    imported = f"from pipeline.extensions import {', '.join(NAMES)}\n"
    for line in (imported, *(f"    {name}.EXTENSION,\n" for name in NAMES)):
        assert text.count(line) == 1
        text = text.replace(line, "")
    installed.write_text(text, encoding="utf-8")
    for name in NAMES:
        shutil.rmtree(extensions / name)
    data = ["--shards", "run/shards", "--mixture", "run/mixture", "--groups", "run/groups"]
    _, answers = commands_in(
        tmp_path / "copy",
        ["pretrain", "--recipe", "tiny.toml", *data, "--out", "new"],
        ["translate", "--checkpoint", "new", "--from", "en", "--to", "de"],
        cwd=tmp_path,
        stdin="one\ntwo\n",
        first=IMPORT_ALL,
    )
    assert len(answers.splitlines()) == 2
