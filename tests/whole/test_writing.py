"""The rules of plain technical English that a program can check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for top in ("pipeline", "data_prep", "docs") for path in (ROOT / top).rglob("*.py")]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "results"  # reports keep the words of the version that wrote them
    ),
]
RELATIVE_CLAUSE = re.compile(r"(What|Of|Whose|Which)\b")
"""Openings of a sentence that has no verb of its own."""
ODD_WORDS = {
    r"\b(the|a|its|this|each|every) (verb|room|house|drawer)\b": "stage, command, package, layout",
    r"\b(remedy|remedies)\b": "suggested fix",
    r"\byardsticks?\b": "baseline",
    r"\bbeyond chance\b": "significant at 95 % (paired bootstrap)",
    r"\bthe same whatever\b": "reproducible, deterministic",
}
"""Words that readers of the field do not expect, and the terms to write for them."""


def strings_of_documentation(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those below attributes included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", [])
        for child in body if isinstance(body, list) else []:
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_are_sentences_in_standard_terms(path: Path) -> None:
    found = []
    for line, text in strings_of_documentation(path):
        if RELATIVE_CLAUSE.match(text.strip()):
            found.append(f"{line}: {text.strip()[:60]!r} begins with a relative clause")
        for pattern, instead in ODD_WORDS.items():
            if match := re.search(pattern, text, re.IGNORECASE):
                found.append(f"{line}: {match[0]!r}: write {instead}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_use_standard_terms(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = {
        match[0]: instead
        for pattern, instead in ODD_WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    }
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_says_is_in_a_module_is_there(page: Path) -> None:
    named = re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
    for name, module in named:
        words = set(re.findall(r"\w+", (ROOT / module).read_text(encoding="utf-8")))
        assert set(name.split(".")) <= words, f"{module} has no {name}"
