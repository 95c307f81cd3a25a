"""Pairs of files, as Moses takes them, wherever they lie and however they are packed."""

import sys
from pathlib import Path

import pytest
from support.raw_trees import run_import, write

from data_prep.readers.raw_files import iterate_blocks, iterate_raw_lines
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.artifacts.settings import CorpusConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError, DataError


def imported(out_dir: Path, raw: Path, **settings: object) -> Artifact:
    config = CorpusConfig.model_validate({"source": "moses", **settings})
    return run_import("import_corpus", out_dir, raw, Recipe(name="test", corpus=config))


def test_pairs_are_known_by_their_names(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw",
        {
            "Europarl.de-en.de": "eins\nzwei\n",
            "Europarl.de-en.en.gz": "one\ntwo\n",
            "Europarl.de-en.ids": "1\n2\n",
            "wiki/GNOME.en-fr.fr": "un\n",
            "wiki/GNOME.en-fr.en": "one\n",
            "small/train.de": "drei\n",
            "small/train.en": "three\n",
            "news/newstest2014.en-de.en": "four\n",
            "news/newstest2014.en-de.de": "vier\n",
            "README.md": "a\n",
            "README.txt": "b\n",
        },
    )
    corpus = imported(tmp_path / "corpus", raw)
    assert corpus.statistics["pairs"] == {
        "de-en": {"train": 3, "valid": 0, "test": 1},
        "en-fr": {"train": 1, "valid": 0, "test": 0},
    }
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei", "drei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two", "three"]
    assert read_lines(corpus, "test", "de-en", "de") == ["vier"]
    assert corpus.statistics["counts"]["files_ignored"] == 3


def test_only_languages_asked_for_are_opened(tmp_path: Path) -> None:
    files = {f"a.{pair}.{side}": "x\n" for pair in ("de-en", "en-fr") for side in pair.split("-")}
    raw = write(tmp_path / "raw", files)
    corpus = imported(tmp_path / "corpus", raw, languages=("eng", "fr"))
    assert set(corpus.statistics["pairs"]) == {"en-fr"}
    assert corpus.statistics["counts"]["pairs_not_selected"] == 1
    with pytest.raises(ConfigError, match="asks for de, fr"):
        imported(tmp_path / "again", raw, languages=("de", "fr"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.de-en.de"], r"a\.de-en\.de has no counterpart in en\. Add a\.de-en\.en"),
        (["a.de-en.de", "a.de-en.de.gz", "a.de-en.en"], "are one text. Remove one"),
        (["train.de", "train.en", "train.fr"], "are more than two files of one name"),
        (["a.de-deu.de", "a.de-deu.deu"], "are both text of de"),
        (["a.txt"], "holds no pairs of files"),
    ],
)
def test_names_that_are_no_pairs_are_told(tmp_path: Path, names: list[str], said: str) -> None:
    raw = write(tmp_path / "raw", dict.fromkeys(names, "x\n"))
    with pytest.raises(DataError, match=said):
        imported(tmp_path / "corpus", raw)


# ---------------------------------------------------------------- Zstandard


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a\.zst is a Zstandard file.*'mmnmt\[zstd\]', or "):
        list(iterate_raw_lines(tmp_path / "a.zst", max_line_bytes=10))


def test_zstandard_files_have_the_lines_of_plain_ones(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    frames = [b"one\ntwo\n" * 50_000, b"three\n", b"x" * 3_000_000]
    path = tmp_path / "a.zst"
    path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, frames)))
    lines = b"".join(frames).split(b"\n")
    assert list(iterate_raw_lines(path, max_line_bytes=2**22)) == lines
    assert b"".join(iterate_blocks(path)) == b"".join(frames)


@pytest.mark.parametrize("fault", ["cut", "junk", "other"])
def test_damaged_zstandard_files_are_told(tmp_path: Path, fault: str) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    whole = zstandard.ZstdCompressor().compress(b"one\ntwo\n" * 50_000)
    path = tmp_path / "a.zst"
    path.write_bytes({"cut": whole[:-3], "junk": whole + b"junk" * 9, "other": b"text\n"}[fault])
    with pytest.raises(DataError, match=r"a\.zst is not a complete Zstandard file \("):
        list(iterate_raw_lines(path, max_line_bytes=100))
