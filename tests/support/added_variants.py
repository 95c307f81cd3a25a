"""Copies of the packages with one more variant.

A variant is new files and replaced texts; whatever else it would need is a fault of the extension
point. The copy is used by processes of its own, with ``PYTHONPATH`` set to it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("data_prep", "pipeline", "ds_configs")

NEXT_COMMAND = "====\n"
COMMANDS = f"""
import json, sys
from pipeline.cli import main
for arguments in json.loads(sys.argv[1]):
    print({NEXT_COMMAND!r}, end="", flush=True)
    assert main(arguments) == 0
"""


@dataclass(frozen=True)
class Variant:
    """What adds a variant: at most one new file, its settings and one choice.

    Attributes:
        files: path → contents of new files.
        edits: path → (text, what replaces it) in files that are there; each text occurs once.
    """

    files: Mapping[str, str]
    edits: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len({*self.files, *self.edits}) <= 3


def copy_with(folder: Path, variants: Sequence[Variant]) -> Path:
    """The packages with all of the variants."""
    for package in PACKAGES:
        # With its compiled loops, which take ten seconds to compile again.
        shutil.copytree(ROOT / package, folder / package)
    for variant in variants:
        for name, contents in variant.files.items():
            assert not (folder / name).exists()
            (folder / name).write_text(contents, encoding="utf-8")
        for name, edits in variant.edits.items():
            text = (folder / name).read_text(encoding="utf-8")
            for old, new in edits:
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def run_in(
    copied: Path, arguments: Sequence[str], *, cwd: Path, check: bool = True, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command of the copied packages."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        check=check,
        timeout=240,
    )


def commands_in(
    copied: Path, *commands: Sequence[str], cwd: Path, stdin: str = "", first: str = ""
) -> list[str]:
    """Run commands of the copied ``mmnmt`` in one process; return what each printed.

    The process runs the code ``first`` before.
    """
    arguments = ["-c", first + COMMANDS, json.dumps(commands)]
    _, *printed = run_in(copied, arguments, cwd=cwd, stdin=stdin).stdout.split(NEXT_COMMAND)
    return printed
