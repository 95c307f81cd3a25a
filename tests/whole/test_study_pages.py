"""Every score of a study on the papers' pages stands in a committed report of that study."""

import gzip
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page_commands import ROOT

PAPERS = ROOT / "docs" / "papers"
STUDIES = sorted(page for page in PAPERS.glob("*.md") if "../results/" in page.read_text("utf-8"))
DERIVED = ("FLOP", "parameters")
"""Columns that are computed from a report's, for example as a ratio."""


def linked_reports(page: Path) -> str:
    """Return the text of all reports that a page links to."""
    links = re.findall(r"\]\((\.\./results/[\w.]+)\)", page.read_text("utf-8"))
    assert links
    return "\n".join((page.parent / link).read_text("utf-8") for link in links)


def scores(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each score in a page's tables of systems.

    An interval is one score, as a report writes it: ``(-1.2 to +1.3)``.
    """
    header: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip().replace("−", "-") for cell in line.strip("|").split("|")]
        header = header or cells
        for name, cell in zip(header[1:], cells[1:], strict=True):
            if header[0] == "system" and not any(word in name for word in DERIVED):
                for found in re.findall(r"\([-+]\d+\.\d to [-+]\d+\.\d\)|\d+\.\d+", cell):
                    yield number, found


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_every_score_of_a_study_is_in_a_report_that_its_page_links(page: Path) -> None:
    reports = linked_reports(page)
    found = list(scores(page))
    assert len(found) >= 20
    missing = [
        f"{page.name}:{number}: {score}"
        for number, score in found
        if not re.search(rf"(?<![\d.]){re.escape(score)}(?!\d)", reports)
    ]
    assert not missing


def test_the_script_of_the_page_cuts_pairs_to_short_verses(tmp_path: Path) -> None:
    page = (PAPERS / "mmnmt.md").read_text("utf-8")
    (script,) = re.findall(r"```python\n(import gzip.*?)```", page, re.DOTALL)
    (tmp_path / "cut.py").write_text(script, encoding="utf-8")
    english = ["In the beginning.", "x" * 100, "x" * 101, "Let there be light."]
    german = ["Am Anfang.", "y" * 300, "Kurz.", "Es werde Licht.\u2028"]
    pairs = {
        "en-de/train": (english, german),
        "en-de/test": (english[:1], german[:1]),
        "zero-shot/de-fr/test": (["a" * 110, "a", "é" * 110], ["b" * 110, "b" * 111, "ü" * 110]),
    }
    for place, sides in pairs.items():
        folder, split = (tmp_path / "pairs" / place).parent, place.rpartition("/")[2]
        folder.mkdir(parents=True, exist_ok=True)
        for code, lines in zip(folder.name.split("-"), sides, strict=True):
            text = "".join(f"{line}\n" for line in lines).encode()
            (folder / f"{split}.{code}.gz").write_bytes(gzip.compress(text))
    command = [sys.executable, "cut.py", "pairs", "verses"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    cut = {
        path.relative_to(tmp_path / "verses").as_posix(): gzip.decompress(path.read_bytes())
        .decode()
        .split("\n")[:-1]
        for path in tmp_path.glob("verses/**/*.gz")
    }
    assert cut == {
        "en-de/train.en.gz": [english[0], english[1], english[3]],
        "en-de/train.de.gz": [german[0], german[1], german[3]],
        "en-de/test.en.gz": english[:1],
        "en-de/test.de.gz": german[:1],
        "zero-shot/de-fr/test.de.gz": ["a" * 110, "é" * 110],
        "zero-shot/de-fr/test.fr.gz": ["b" * 110, "ü" * 110],
    }
