"""Every file of an artifact is one that its kind declares."""

import json
import re
import tarfile
from pathlib import Path

from pipeline.artifacts.manifest import FILES, FORMAT_VERSION

STORED_RUN = Path(__file__).resolve().parents[1] / "whole" / "stored_run.tar.gz"


def is_declared(name: str, kind: str) -> bool:
    """Return whether a file matches a pattern of its kind, in which capitals stand for names."""
    patterns = {str(known): files for known, files in FILES.items()}[kind]
    return any(
        re.fullmatch(re.sub(r"\b[A-Z]+\b", "[^/]+", re.escape(pattern)), name)
        for pattern in patterns
    )


def test_every_kind_declares_its_files() -> None:
    assert set(FILES) == set(FORMAT_VERSION)
    assert all(FILES.values())


def test_a_file_that_no_kind_declares_is_found() -> None:
    assert is_declared("train/de-en/de.txt", "corpus")
    assert not is_declared("train/de-en/de.tokens", "corpus")


def test_a_stored_run_holds_only_files_that_their_kinds_declare() -> None:
    kinds = set()
    with tarfile.open(STORED_RUN) as archive:
        for member in archive.getmembers():
            if member.name.endswith("manifest.json"):
                stream = archive.extractfile(member)
                assert stream is not None
                manifest = json.load(stream)
                kinds.add(manifest["kind"])
                names = manifest["files"]
                assert not [n for n in names if not is_declared(n, manifest["kind"])], member.name
    assert len(kinds) >= 9
