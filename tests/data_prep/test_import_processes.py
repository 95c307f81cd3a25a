"""Import over worker processes: the corpus of one process, whatever is wrong with its lines."""

from pathlib import Path

import pytest
from support.raw_trees import run_import, write

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.raw_input import RawPaths
from pipeline.artifacts.settings import CorpusConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import DataError

pytestmark = pytest.mark.slow

GOOD = [f"line {number}" for number in range(300)]
TREE: dict[str, str | bytes] = {
    "one/de-en/train.de": "\n".join(GOOD).encode() + b"\n\xff broken\n",
    "one/de-en/train.en": "\n".join([*GOOD, "the counterpart"]) + "\n",
    "one/de-en/valid.de": "",
    "one/de-en/valid.en": "",
    "one/fr-zh/train.fr": "\ufeffun\r\ndeux\x85trois\n",
    "one/fr-zh/train.zh": "一\n二\n",
    "two/en-de/train.de": "eins\nzwei\nd\0rei\n",
    "two/en-de/train.en": "one\ntwo\nthree\n",
    "two/en-it/test.en": "four\n",
    "two/en-it/test.it": "quattro\n",
}


def imported(
    raw: Path, out_dir: Path, *, processes: int, max_train_lines: int | None = None
) -> Artifact:
    config = CorpusConfig(max_train_lines=max_train_lines)
    paths = RawPaths((raw / "one", raw / "two"))
    recipe = Recipe(name="test", corpus=config)
    return run_import("import_corpus", out_dir, paths, recipe, processes=processes)


@pytest.mark.parametrize("max_train_lines", [None, 301])
def test_the_number_of_processes_changes_nothing(
    max_train_lines: int | None, tmp_path: Path
) -> None:
    write(tmp_path / "raw", TREE)
    one, two = (
        imported(
            tmp_path / "raw",
            tmp_path / f"by-{processes}",
            processes=processes,
            max_train_lines=max_train_lines,
        )
        for processes in (1, 2)
    )
    assert two.manifest.files == one.manifest.files
    assert two.statistics == one.statistics
    assert two.manifest.summary == one.manifest.summary
    assert one.statistics["counts"]["quarantined"] == 1 + (max_train_lines is None)
    kept = one.statistics["pairs"]["de-en"]["train"]
    assert kept == (302 if max_train_lines is None else 301)


def test_a_fault_that_a_worker_finds_is_the_same_sentence(tmp_path: Path) -> None:
    write(tmp_path / "raw", TREE | {"two/en-it/test.it": "quattro\ncinque\n"})
    said = []
    for processes in (1, 2):
        with pytest.raises(DataError) as refused:
            imported(tmp_path / "raw", tmp_path / "out", processes=processes)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "test.en has 1 line and" in said[0]
    assert not (tmp_path / "out").exists()
