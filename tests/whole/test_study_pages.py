"""Every score of a study on the papers' pages stands in a committed report of that study."""

import re
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
