"""Raw inputs: what options may name, and what a manifest says of it."""

from pathlib import Path

import pytest

from pipeline.artifacts.artifact import raw_digest
from pipeline.artifacts.raw_input import HubDataset, RawPaths, raw_input
from pipeline.errors import ArtifactError, ConfigError

COMMIT = "805090dc28bf78897da9641cdf08b61287580df9"


def test_one_path_is_recorded_under_the_name_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a")
    records = raw_input([str(tmp_path)]).records("raw")
    assert {name: (record.path, record.digest) for name, record in records.items()} == {
        "raw": (str(tmp_path), raw_digest(tmp_path))
    }


def test_several_paths_are_recorded_each_with_its_digest_in_their_order(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / name).write_text(name)
    records = raw_input([str(tmp_path / name) for name in "ba"]).records("raw")
    assert [(name, Path(record.path).name) for name, record in records.items()] == [
        ("raw/1", "b"),
        ("raw/2", "a"),
    ]
    assert records["raw/1"].digest == raw_digest(tmp_path / "b")
    with pytest.raises(ArtifactError, match="c does not exist"):
        raw_input([str(tmp_path / name) for name in "ac"]).records("raw")


def test_a_data_set_of_the_hub_is_its_name_and_commit() -> None:
    value = f"hub:Helsinki-NLP/opus-100@{COMMIT}"
    found = raw_input([value])
    assert found == HubDataset("Helsinki-NLP/opus-100", COMMIT)
    assert found.values == (value,)
    assert found.named("raw") == {}
    record = found.records("raw")["raw"]
    assert (record.kind, record.path) == ("raw", value)
    assert record.digest == found.records("raw")["raw"].digest
    assert record.digest != HubDataset("owner/other", COMMIT).records("raw")["raw"].digest


@pytest.mark.parametrize(
    "value",
    [
        "hub:Helsinki-NLP/opus-100",
        "hub:Helsinki-NLP/opus-100@main",
        f"hub:Helsinki-NLP/opus-100@{COMMIT[:12]}",
        f"hub:Helsinki-NLP/opus-100@{COMMIT.upper()}",
        f"hub:Helsinki-NLP/opus-100@{COMMIT}0",
        f"hub:opus-100@{COMMIT}",
        f"hub:a/b/c@{COMMIT}",
        f"hub:a/b@{COMMIT}\n",
        "hub:",
    ],
)
def test_a_data_set_that_is_not_pinned_to_a_commit_is_refused_in_a_sentence(value: str) -> None:
    with pytest.raises(ConfigError, match=r"Write hub:OWNER/NAME@REVISION, where REVISION is the"):
        raw_input([value])


def test_a_data_set_stands_alone_and_a_path_once() -> None:
    with pytest.raises(ConfigError, match="is named with 1 more raw input"):
        raw_input(["folder", f"hub:a/b@{COMMIT}"])
    with pytest.raises(ConfigError, match="folder is named twice"):
        raw_input(["folder", "other", "folder"])


def test_where_one_path_is_wanted_several_or_a_data_set_are_refused() -> None:
    assert RawPaths((Path("a"),)).only_path() == Path("a")
    with pytest.raises(ConfigError, match="a, b are several paths where one is wanted"):
        raw_input(["a", "b"]).only_path()
    with pytest.raises(ConfigError, match="is a data set of the hub where a path is wanted"):
        HubDataset("a/b", COMMIT).only_path()
