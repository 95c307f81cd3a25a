"""Holders of locks that are no process of this machine."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.artifacts.locks import Owner


def leave(path: Path, owner: Owner, *, generation: int = 1) -> Path:
    """Write what a holder leaves; return the file."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / str(generation)
    file.write_text(json.dumps(asdict(owner)) + f"\nbeat {0:010d}\n")
    return file


def elsewhere(*, attempt: str = "") -> Owner:
    """Return process 1 of a machine ``node7``."""
    machine = {"host": "node7", "machine": "another boot"}
    return replace(Owner.new(), process=1, attempt=attempt, **machine)
