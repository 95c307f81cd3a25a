"""Check that every promise of docs/explanation/guarantees.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")


def promises() -> list[tuple[str, list[str]]]:
    """Return every promise of the page with the tests that its row names."""
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    return [
        (promise, re.findall("`([^`]+)`", tests)) for promise, tests in rows if tests != "tests"
    ]


@cache
def functions_of(name: str) -> set[str]:
    """Return the test functions of a module, or of all modules of a folder, of ``tests/``."""
    place = ROOT / "tests" / name
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return {
        node.name
        for file in files
        if file.is_file()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_promise_names_tests_that_exist() -> None:
    found = promises()
    assert len(found) > 60
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


def test_every_fault_names_the_very_tests() -> None:
    faults = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    named = {fault: re.findall("`([^`]+)`", tests) for fault, _, tests in faults[1:]}
    assert len(named) == 34
    assert [f for f, names in named.items() if not names or not all("::" in n for n in names)] == []
