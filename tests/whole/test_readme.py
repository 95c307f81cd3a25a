"""The README's commands and links are ones that there are; `test_page_commands` runs them."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.page_commands import without_launcher

from pipeline.cli.stage_options import stage_parser
from pipeline.config import recipe_names
from pipeline.stages import STAGES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TAGS = {"run", "demo", "cluster", "needs-data"}


def blocks() -> list[tuple[str, str]]:
    """(tag, command) for every line of every tagged shell block, comments left out."""
    found = []
    for tag, body in re.findall(r"^```bash ([\w-]+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        lines = [line.split("  #")[0].strip() for line in body.split("\n")]
        found += [(tag, line) for line in lines if line]
    return found


def commands(*tags: str) -> list[str]:
    return [command for tag, command in blocks() if tag in tags]


def test_every_shell_block_has_a_known_tag() -> None:
    opened = re.findall(r"^```(bash.*|sh.*|console.*|shell.*)$", README, re.MULTILINE)
    assert {line.removeprefix("bash ") for line in opened} <= TAGS
    assert {tag for tag, _ in blocks()} == TAGS


STAGE_COMMANDS = [
    command
    for command in commands("demo", "cluster", "needs-data")
    if (without_launcher(command) or [""])[0] in STAGES
]


@pytest.mark.parametrize("command", STAGE_COMMANDS)
def test_the_options_of_stage_commands_exist(command: str) -> None:
    name, *arguments = without_launcher(command)
    options = vars(stage_parser(STAGES[name]).parse_args(arguments))
    if options.get("recipe"):
        named = {part for part in options["recipe"].split("+") if not part.endswith(".toml")}
        assert named <= set(recipe_names())
    given = {word.removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"}
    assert all(options[{"from": "source", "to": "target"}.get(n, n)] is not None for n in given)


def test_every_other_command_is_a_make_target_a_plan_or_a_tool() -> None:
    others = set(commands("demo", "cluster", "needs-data")) - set(STAGE_COMMANDS)
    starts = {" ".join(command.split()[:2]) for command in others}
    assert starts == {
        "make demo",
        "make test",
        "source .venv/bin/activate",
        "mmnmt run",
        "mmnmt status",
        "mmnmt checkpoint",
        "mmnmt export",
        "mmnmt survey",
    }


@pytest.mark.parametrize("command", [c for c in commands("demo") if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "benchmarks")
"""Pages with commands."""
OPENED_ONCE = "[quick start](../README.md#quick-start)"


def test_the_command_is_put_on_the_path_once_and_before_it_is_first_used() -> None:
    assert README.count("source .venv/bin/activate") == 1
    in_order = [command for _, command in blocks()]
    first = next(n for n, command in enumerate(in_order) if "mmnmt" in command.split())
    assert in_order.index("source .venv/bin/activate") < first
    assert "VENV := .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\n## Quick start\n" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_names_the_command_alone_and_links_to_how_it_is_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert ".venv" not in text
    assert OPENED_ONCE in text.split("\n\n")[1]


SOURCES = re.compile(r"runs/demo/(dense|moe_lgr|assembled|translate_dense|translate_moe_lgr)(?!\w)")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_pages_translate_export_and_start_from_the_demos_models_of_the_whole_budget(
    page: Path,
) -> None:
    """The sources that the demo trains for 150 updates do not translate."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if " diff " not in line]
    assert not [line for line in commands if SOURCES.search(line)]


def promises() -> list[tuple[str, list[str]]]:
    """What the README promises, each with the tests that it names."""
    section = README.partition("\n### What holds\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    return [(promise, re.findall("`([^`]+)`", tests)) for promise, tests in rows]


def functions_of(name: str) -> set[str]:
    """Names of the test functions of a module, or of all modules of a folder, of ``tests/``."""
    place = ROOT / "tests" / name
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return {
        node.name
        for file in files
        if file.is_file()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.slow
def test_every_promise_names_tests_that_exist() -> None:
    found = promises()
    assert len(found) > 30
    assert [promise for promise, names in found if not names] == []
    missing = []
    for _, names in found:
        for name in names:
            module, _, function = name.partition("::")
            known = functions_of(module)
            if not known or (function and function not in known):
                missing.append(name)
    assert missing == []


def test_a_promise_of_every_row_or_of_a_papers_size_names_the_very_test() -> None:
    """A module has many tests; such a promise is read as a claim about all of a paper."""
    of_papers = [
        (promise, names)
        for promise, names in promises()
        if re.search(r"(?i)\bevery row\b|\bpapers?'s? (sizes|equations)|Tables? \d", promise)
    ]
    assert of_papers
    assert [promise for promise, names in of_papers if not any("::" in n for n in names)] == []


def test_files_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert len(links) > 10
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing
