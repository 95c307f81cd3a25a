"""A reader is a slot: text in another form is read by one new file, one setting and one case.

The additions are made to a copy of the packages, which then imports such text.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.raw_trees import write

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import read_lines

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("data_prep", "pipeline", "ds_configs")

TSV = '''"""Tab-separated files, ``train.de-en.tsv``: both sides of a pair on each line."""

from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.section import RawLine, RawText, Section
from data_prep.readers.text_files import iterate_raw_lines, source_of
from pipeline.artifacts.raw_input import RawInput
from pipeline.config import CorpusConfig
from pipeline.errors import ConfigError


def read_tsv(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """All files of a folder."""
    if raw is None:
        raise ConfigError("corpus.source is 'tsv', but no raw folder was given: pass --raw DIR.")
    folder = raw.only_path()
    return RawText([_section(path, folder, config) for path in sorted(folder.glob("*.tsv"))])


def _section(path: Path, folder: Path, config: CorpusConfig) -> Section:
    split, pair, _ = path.name.split(".")
    first, second = pair.split("-")
    return Section(
        split=split,
        languages=(first, second),
        spellings=(first, second),
        sources=(source_of(path, folder), source_of(path, folder)),
        lines=_lines(path, max_line_bytes=config.max_line_bytes),
    )


def _lines(path: Path, *, max_line_bytes: int) -> Iterator[RawLine]:
    lines = iterate_raw_lines(path, max_line_bytes=max_line_bytes)
    for number, line in enumerate(lines, start=1):
        first, _, second = line.partition(b"\\t")
        yield RawLine(number, (first, second))
'''
NEW_FILES = {"data_prep/readers/tsv.py": TSV}
ADDITIONS = {
    "pipeline/config.py": [
        ('source: Literal["tree", "cldr", "hub"]', 'source: Literal["tree", "cldr", "hub", "tsv"]')
    ],
    "data_prep/import_corpus.py": [
        (
            "from data_prep.readers.tree import read_trees\n",
            "from data_prep.readers.tree import read_trees\n"
            "from data_prep.readers.tsv import read_tsv\n",
        ),
        (
            '        case "hub":\n',
            '        case "tsv":\n            return read_tsv(raw, config)\n        case "hub":\n',
        ),
    ],
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the packages that reads tab-separated files."""
    house = tmp_path / "house"
    for package in PACKAGES:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, house / package, ignore=unwanted)
    for name, text in NEW_FILES.items():
        (house / name).write_text(text, encoding="utf-8")
    for name, replacements in ADDITIONS.items():
        text = (house / name).read_text(encoding="utf-8")
        for before, after in replacements:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (house / name).write_text(text, encoding="utf-8")
    return house


def touched(house: Path) -> set[str]:
    """Files of the copy that are new or differ."""
    files = [path for path in house.rglob("*") if path.is_file()]
    names = {path.relative_to(house).as_posix() for path in files}
    return {
        name
        for name in names
        if not (ROOT / name).is_file() or (ROOT / name).read_bytes() != (house / name).read_bytes()
    }


def test_a_reader_is_one_file_one_setting_and_one_case(house: Path, tmp_path: Path) -> None:
    assert touched(house) == {
        "data_prep/readers/tsv.py",
        "pipeline/config.py",
        "data_prep/import_corpus.py",
    }
    raw = write(
        tmp_path / "raw",
        {
            "train.de-en.tsv": b"eins\tone\nzw\xffei\ttwo\ndrei\tthree\n",
            "test.de-en.tsv": "vier\tfour\n",
        },
    )
    recipe, out = tmp_path / "recipe.toml", tmp_path / "corpus"
    recipe.write_text('[corpus]\nsource = "tsv"\nmax_train_lines = 2\n', encoding="utf-8")
    command = [*("-m", "pipeline.cli", "import_corpus", "--recipe", str(recipe))]
    done = subprocess.run(
        [sys.executable, "-B", *command, "--raw", str(raw), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=house,
        env=os.environ | {"PYTHONPATH": str(house)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    corpus = open_artifact(out, kind="corpus")
    assert corpus.statistics["pairs"] == {"de-en": {"train": 2, "valid": 0, "test": 1}}
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "three"]
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert listed == [{"file": "train.de-en.tsv", "line": 2, "reason": "invalid_utf8"}]
