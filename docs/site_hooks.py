"""Fit the pages of the repository into the site: its home page, links, fences, and order.

Pages are written to be read in the repository. Links that leave ``docs`` lead nowhere on a site:
those to the README lead to its page there, those to other files that exist become plain text, and
MkDocs reports the rest.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
TAGGED_FENCE = re.compile(r"^```(\w+) [\w -]+$", re.MULTILINE)
ORDER = ("tutorials", "how-to", "reference", "explanation", "papers")
"""Folders in the order of the navigation; single pages come before them, results last."""


def readme_page(config: MkDocsConfig) -> str:
    """Return where the README stands on the site: it is the home page unless docs has one."""
    return "readme.md" if (Path(config.docs_dir) / "index.md").is_file() else "index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README to the pages."""
    text = README.read_text(encoding="utf-8")
    files.append(File.generated(config, readme_page(config), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrite links that leave ``docs``, and drop the tags that tests read from fences."""
    docs = Path(config.docs_dir)
    uri = page.file.src_uri
    source = README if uri == readme_page(config) else docs / uri

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(source.parent / target))
        if ":" in target or not path.exists():
            return match[0]
        if path == README:
            return f"[{text}]({_relative(readme_page(config), uri)}{anchor})"
        if path.is_file() and path.is_relative_to(docs):
            return f"[{text}]({_relative(path.relative_to(docs).as_posix(), uri)}{anchor})"
        return text

    return LINK.sub(rewritten, TAGGED_FENCE.sub(r"```\1", markdown))


def on_nav(nav: Navigation, **_: object) -> Navigation:
    """Order the folders as a reader needs them."""

    def place(item: Any) -> int:
        if item.is_page:
            return 0
        children: list[Any] = list(item.children)
        while children and not children[0].is_page:
            children = list(children[0].children)
        folder = children[0].file.src_uri.split("/")[0] if children else ""
        return ORDER.index(folder) + 1 if folder in ORDER else len(ORDER) + 1

    nav.items.sort(key=place)
    return nav


def _relative(target: str, page: str) -> str:
    return Path(os.path.relpath(target, Path(page).parent)).as_posix()
