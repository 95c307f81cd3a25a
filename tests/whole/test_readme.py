"""Check the README's claims, and the commands and links of all pages.

``test_page_commands`` runs the commands.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page_commands import PAGES, ROOT, Block, blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")
TAGS = ("run", "demo", "cluster", "needs-data")


def commands(*tags: str) -> list[str]:
    """Return the commands of all pages' blocks with one of these tags."""
    return [command for block in blocks() if block.tag in tags for command in block.commands()]


# The README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_every_shell_block_of_the_readme_has_a_known_tag() -> None:
    opened = re.findall(r"^```(bash.*|sh.*|console.*|shell.*)$", README, re.MULTILINE)
    assert opened
    assert {line.removeprefix("bash ") for line in opened} <= set(TAGS)


def test_the_environment_is_activated_once_and_before_the_first_command() -> None:
    assert README.count("source .venv/bin/activate") == 1
    in_order = [line for block in blocks([ROOT / "README.md"]) for line in block.commands()]
    first = next(n for n, command in enumerate(in_order) if "mmnmt" in command.split())
    assert in_order.index("source .venv/bin/activate") < first
    assert "VENV := .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\n## Quick start\n" in README


def results() -> list[tuple[str, list[str], str]]:
    """Return the rows of the README's results: case, numbers, file."""
    section = README.partition("\n## Results\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \| `([\w.-]+\.json)` \|$", section, re.MULTILINE)
    return [(case, numbers.split(" | "), name) for case, numbers, name in rows]


def test_the_readmes_results_are_those_of_the_result_files() -> None:
    found = results()
    assert len(found) >= 4
    for case, numbers, name in found:
        stored = json.loads((ROOT / "tests" / "bench" / "results" / name).read_text("utf-8"))
        for kind, number in zip(("float32", "bfloat16"), numbers, strict=True):
            ratios = {f"{row['ratio']:.2f}" for row in stored["rows"] if kind in row["case"]}
            assert number in ratios, f"{case}, {kind}: {number} is not in {name}"


@pytest.mark.parametrize("goal", ["use a model", "make more data", "add a language"])
def test_the_readme_leads_to_one_page_for_each_use(goal: str) -> None:
    (row,) = re.findall(rf"^\| {goal} \| (.+) \|$", README, re.MULTILINE)
    (page,) = re.findall(r"\]\((docs/[\w/-]+\.md)\)", row)
    if goal == "use a model":
        introduction = (ROOT / page).read_text(encoding="utf-8").partition("\n## ")[0]
        assert all(f"({other}.md)" in introduction for other in ("serve", "import_and_export"))


# Commands of all pages


def test_make_targets_exist() -> None:
    named = {command.split()[-1] for command in commands("demo") if command.startswith("make ")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


TAUGHT = [
    page
    for folder in ("tutorials", "how-to")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if page.name != "first_run.md" and any(map(Block.has_commands, blocks([page])))
]


@pytest.mark.parametrize("page", TAUGHT, ids=lambda page: page.stem)
def test_a_page_names_the_command_alone_and_says_at_the_top_where_it_comes_from(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert ".venv" not in text
    introduction = text.partition("\n## ")[0].partition("```")[0]
    assert re.search(r"\[activated environment\]\([\w/.-]*first_run\.md#install\)", introduction)


SOURCES = re.compile(r"runs/demo/(copied|moe_lgr|assembled)(?!\w)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_translate_export_and_start_from_the_demos_final_models(page: Path) -> None:
    """A model that is only a source of another, or was not trained since, translates worse."""
    lines = [line for block in blocks([page]) for line in block.text.splitlines()]
    assert not [line for line in lines if " diff " not in line and SOURCES.search(line)]


# Links

LINKING = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]


def without_blocks(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield target and anchor of every relative link of a page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs spell them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_relative_links_of_a_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for target, anchor in links(page):
        name = target.relative_to(ROOT).as_posix()
        if not target.exists():
            broken.append(name)
        elif anchor and anchor not in anchors(target):
            broken.append(f"{name}#{anchor}")
    assert not broken


def test_the_readme_and_the_index_lead_to_every_tutorial_and_how_to() -> None:
    index = {target for target, _ in links(ROOT / "docs" / "index.md")}
    for folder in ("tutorials", "how-to"):
        assert set((ROOT / "docs" / folder).glob("*.md")) <= index
    assert ROOT / "docs" / "index.md" in {target for target, _ in links(ROOT / "README.md")}
