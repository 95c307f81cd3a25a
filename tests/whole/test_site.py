"""The documentation site builds without a warning, and a link that leads nowhere stops it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="the site needs the extra docs")
pytest.importorskip("material", reason="the site needs the extra docs")
pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_site_builds_with_every_page_and_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert {page for page in pages if not (tmp_path / page.with_suffix(".html")).is_file()} == set()
    assert (tmp_path / "index.html").is_file()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with the site's settings, a README and one page."""
    folder = tmp_path / "repository"
    (folder / "docs" / "how-to").mkdir(parents=True)
    for name in ("mkdocs.yml", "docs/site_hooks.py"):
        shutil.copyfile(ROOT / name, folder / name)
    page = "[a page](docs/how-to/page.md) and [the license](LICENSE)\n"
    (folder / "README.md").write_text(f"# It\n\n## Quick start\n\n{page}", encoding="utf-8")
    (folder / "LICENSE").write_text("Free.\n", encoding="utf-8")
    return folder


def test_links_to_the_readme_lead_to_the_home_page_and_those_to_files_become_text(
    small: Path, tmp_path: Path
) -> None:
    page = "# Page\n\n[start](../../README.md#quick-start), [license](../../LICENSE)\n"
    fence = "\n```bash demo\nmmnmt describe\n```\n"
    (small / "docs" / "how-to" / "page.md").write_text(page + fence, encoding="utf-8")
    done = build(small, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "site" / "how-to" / "page.html").read_text(encoding="utf-8")
    assert '<a href="../index.html#quick-start">start</a>, license' in made
    assert "language-bash" in made or "highlight" in made
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert '<a href="how-to/page.html">a page</a> and the license' in home


def test_links_that_lead_nowhere_are_errors(small: Path, tmp_path: Path) -> None:
    links = ("../../MISSING.md", "missing.md", "../../README.md#no-heading")
    page = "".join(f"[link]({link})\n" for link in links)
    (small / "docs" / "how-to" / "page.md").write_text(f"# Page\n\n{page}")
    done = build(small, tmp_path / "site")
    assert done.returncode != 0
    assert done.stderr.count("how-to/page.md") >= len(links)
    assert all(name in done.stderr for name in ("MISSING.md", "missing.md", "#no-heading"))
