"""Data sets of the Hugging Face hub become a corpus: pinned, row by row, no more than wanted."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from support.raw_trees import run_import, write

from data_prep.readers.hub import read_dataset
from data_prep.readers.raw_text import RawLine
from data_prep.settings import CorpusConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, read_manifest
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.errors import EXIT_USER_ERROR, ConfigError, DataError, Interrupted

REVISION = "0123456789abcdef" * 2 + "01234567"
DATASET = HubDataset("owner/pairs", REVISION)
RAW = RawInput(dataset=DATASET)

Row = dict[str, Any]


def rows(first: str, second: str, *texts: tuple[str | None, str | None]) -> list[Row]:
    return [{"translation": {first: one, second: other}} for one, other in texts]


class FakeHub(ModuleType):
    """Stands for the library: configurations of splits of rows, and what was asked of it."""

    def __init__(self, configurations: dict[str, dict[str, list[Row]]]) -> None:
        super().__init__("datasets")
        self.configurations = configurations
        self.opened: list[tuple[str, str]] = []
        self.given = 0
        """Rows so far."""

    def get_dataset_config_names(self, name: str, *, revision: str) -> list[str]:
        assert (name, revision) == (DATASET.name, REVISION)
        return list(self.configurations)

    def get_dataset_split_names(self, name: str, *, config_name: str, revision: str) -> list[str]:
        assert (name, revision) == (DATASET.name, REVISION)
        return list(self.configurations[config_name])

    def load_dataset(
        self, name: str, pair: str, *, split: str, revision: str, streaming: bool
    ) -> Iterator[Row]:
        assert (name, revision, streaming) == (DATASET.name, REVISION, True)
        self.opened.append((pair, split))
        for row in self.configurations[pair][split]:
            self.given += 1
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    library = FakeHub(
        {
            "default": {},
            "en-de": {
                "test": rows("en", "de", ("four", "vier")),
                "train": rows("en", "de", ("one", "eins"), ("two", "zwei"), ("three", "drei")),
                "validation": rows("en", "de", ("five", "fünf")),
                "extra": rows("en", "de", ("six", "sechs")),
            },
            "de-fr": {"test": rows("de", "fr", ("sieben", "sept"))},
        }
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def imported(out_dir: Path, raw: RawInput | None = RAW, **settings: object) -> Artifact:
    return run_import("import_corpus", out_dir, raw, corpus={"source": "hub", **settings})


def test_configurations_become_pairs_and_their_splits_ours(hub: FakeHub, tmp_path: Path) -> None:
    corpus = imported(tmp_path / "corpus")
    assert corpus.statistics["pairs"] == {
        "de-en": {"train": 3, "valid": 1, "test": 1},
        "de-fr": {"train": 0, "valid": 0, "test": 1},
    }
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two", "three"]
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei", "drei"]
    assert corpus.statistics["counts"] == {"folders_ignored": 1, "lines_read": 6}
    assert ("en-de", "extra") not in hub.opened


def test_only_languages_asked_for_are_opened(hub: FakeHub, tmp_path: Path) -> None:
    corpus = imported(tmp_path / "corpus", languages=("de", "fra"))
    assert line_counts(corpus, "test") == {"de-fr": 1}
    assert hub.opened == [("de-fr", "test")]
    with pytest.raises(ConfigError, match="asks for de, el"):
        imported(tmp_path / "again", languages=("de", "el"))


def test_lines_beyond_the_number_wanted_are_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.configurations["en-de"]["train"] *= 100
    corpus = imported(tmp_path / "corpus", languages=("de", "en"), max_train_lines=2)
    assert line_counts(corpus, "train") == {"de-en": 2}
    assert hub.given <= 2 + 1 + 2


def test_rows_that_are_no_line_are_mended_or_quarantined(hub: FakeHub, tmp_path: Path) -> None:
    hub.configurations["en-de"]["train"] = rows(
        "en", "de", ("a\nb", "c"), ("d", "\ud800"), ("e\0", "f"), (None, "g")
    )
    corpus = imported(tmp_path / "corpus", languages=("de", "en"))
    assert read_lines(corpus, "train", "de-en", "en") == ["a b", ""]
    assert read_lines(corpus, "train", "de-en", "de") == ["c", "g"]
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert listed == [
        {"file": "en-de/train.de", "line": 2, "reason": "invalid_utf8"},
        {"file": "en-de/train.en", "line": 3, "reason": "nul"},
    ]


def test_the_manifest_names_the_data_set_and_is_enough(tmp_path: Path, hub: FakeHub) -> None:
    (tmp_path / "recipe.toml").write_text('[corpus]\nsource = "hub"\n')
    out = tmp_path / "corpus"
    command = ["import_corpus", "--recipe", str(tmp_path / "recipe.toml"), "--raw", str(DATASET)]
    assert cli.main([*command, "--out", str(out)]) == 0
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.inputs["raw"].path == f"hub:owner/pairs@{REVISION}"
    hub.configurations.clear()
    assert cli.main([*command, "--out", str(out)]) == 0
    other = [*command[:-1], f"hub:owner/pairs@{'f' * 40}", "--out", str(out)]
    assert cli.main(other) == EXIT_USER_ERROR


def test_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"Run pip install 'mmnmt\[hub\]'\.$"):
        imported(tmp_path / "corpus")


def test_an_error_of_the_library_becomes_one_sentence_and_a_request_to_stop_does_not(
    hub: FakeHub, tmp_path: Path
) -> None:
    errors = [LookupError("no pairs\nTraceback of the server"), Interrupted("stop")]

    def fail(*_: object, **__: object) -> list[str]:
        raise errors.pop(0)

    hub.__dict__["get_dataset_config_names"] = fail
    said = rf"^hub:owner/pairs@{REVISION} cannot be read \(no pairs\)\. "
    with pytest.raises(DataError, match=said):
        imported(tmp_path / "corpus")
    with pytest.raises(Interrupted):
        imported(tmp_path / "corpus")


def test_another_layout_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.configurations["en-de"]["train"][1] = {"text": "two"}
    with pytest.raises(DataError, match="en-de/train has no translation in de and en in row 2"):
        imported(tmp_path / "corpus", languages=("de", "en"))
    hub.configurations = {"default": {"train": [{"text": "one"}]}}
    with pytest.raises(DataError, match="holds no configurations named like de-en"):
        imported(tmp_path / "corpus")
    hub.configurations = {"de-de": {"train": rows("de", "de", ("a", "b"))}}
    with pytest.raises(DataError, match=r"de-de pairs a language with itself\. Leave"):
        imported(tmp_path / "corpus")


@pytest.mark.parametrize("again", ["de-en", "en-de"])
def test_text_that_is_there_twice_is_refused(hub: FakeHub, tmp_path: Path, again: str) -> None:
    split = "dev" if again == "en-de" else "validation"
    hub.configurations.setdefault(again, {})[split] = rows("en", "de", ("a", "b"))
    with pytest.raises(DataError, match="are both valid text of the pair de-en"):
        imported(tmp_path / "corpus")
    assert not hub.opened


def test_raw_text_of_another_source_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data set of the hub was given"):
        imported(tmp_path / "corpus", None)
    with pytest.raises(ConfigError, match=r"Set it to 'hub'"):
        imported(tmp_path / "corpus", source="tree")
    assert not hub.opened


def test_a_folder_of_the_same_name_is_not_read_in_its_place(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "pairs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pairs would be read in place of hub:owner/pairs"):
        imported(tmp_path / "corpus")
    assert not hub.opened


def test_the_library_itself_reads_a_data_set_laid_out_as_opus_100_is(tmp_path: Path) -> None:
    """Of a folder, which it reads as it reads one of the hub."""
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    row = json.dumps(rows("de", "en", ("eins", "one"))[0])
    write(
        tmp_path / "pairs",
        {
            "de-en/train.jsonl": f"{row}\n" * 3,
            "de-en/validation.jsonl": f"{row}\n",
            "README.md": "---\nconfigs:\n- config_name: de-en\n  data_files:\n"
            "  - split: train\n    path: de-en/train.jsonl\n"
            "  - split: validation\n    path: de-en/validation.jsonl\n---\n",
        },
    )
    raw = read_dataset(HubDataset(str(tmp_path / "pairs"), REVISION), CorpusConfig())
    assert [section.split for section in raw.sections] == ["train", "valid"]
    train, valid = (cast("Iterable[RawLine]", section.lines) for section in raw.sections)
    assert [line.number for line in train] == [1, 2, 3]
    assert [line.texts for line in valid] == [(b"eins", b"one")]
