"""The README's commands and links are ones that there are; `test_page_commands` runs them."""

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


def test_files_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing
