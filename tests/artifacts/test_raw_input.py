"""Raw inputs: what options may name, and what a manifest says of it."""

import errno
import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from support.raw_trees import write

from pipeline.artifacts.artifact import raw_digest
from pipeline.artifacts.raw_input import (
    HubDataset,
    RawInput,
    iterate_raw_lines,
    named_files,
    raw_input,
    table_rows,
)
from pipeline.errors import ArtifactError, ConfigError, DataError

COMMIT = "805090dc28bf78897da9641cdf08b61287580df9"


def test_one_path_is_recorded_under_the_name_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a")
    records = raw_input([str(tmp_path)]).records("raw")
    assert records.keys() == {"raw"}
    assert (records["raw"].path, records["raw"].digest) == (str(tmp_path), raw_digest(tmp_path))


def test_several_paths_are_recorded_each_with_its_digest_in_their_order(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / name).write_text(name)
    records = raw_input([str(tmp_path / name) for name in "ba"]).records("raw")
    found = {name: Path(record.path).name for name, record in records.items()}
    assert list(found.items()) == [("raw/1", "b"), ("raw/2", "a")]
    assert records["raw/1"].digest == raw_digest(tmp_path / "b")
    with pytest.raises(ArtifactError, match="c does not exist"):
        raw_input([str(tmp_path / name) for name in "ac"]).records("raw")


def test_folders_that_are_linked_in_are_read_and_links_to_nothing_told(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "raw", tmp_path / "elsewhere"
    names = ("raw/.cache/c.txt", "raw/own.txt", "raw/de-en/de.txt", "elsewhere/deep/b.txt")
    write(tmp_path, dict.fromkeys(names, "text"))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "visible").symlink_to(folder / ".cache")
    (elsewhere / "loop").symlink_to(folder)
    (folder / ".#own.txt").symlink_to("user@host.1")  # an editor's lock is hidden, and a link
    (folder / "current").symlink_to("de-en")  # by its own name, although the link's is before it
    found = [name for name, _ in named_files([folder])]
    assert found == ["de-en/de.txt", "linked/deep/b.txt", "own.txt", "visible/c.txt"]
    (folder / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"lost\.txt is a link to nothing\. Restore its target"):
        named_files([folder])
    (folder / "lost.txt").unlink()
    os.mkfifo(folder / "a.txt")  # nobody writes to it, and a read would wait
    for path in (folder, folder / "a.txt"):
        with pytest.raises(DataError, match=r"a\.txt is a pipe or a device, .* Copy its content"):
            named_files([path])


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.EACCES, "Make it readable"), (errno.ENOENT, "Restore it")]
)
def test_a_folder_that_cannot_be_listed_is_named_and_not_left_out_unless_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    write(tmp_path, dict.fromkeys((".trash/b.txt", "deep/a.txt"), "text"))
    scan = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == lost:
            raise OSError(number, os.strerror(number), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    lost = ".trash"
    assert [name for name, _ in named_files([tmp_path])] == ["deep/a.txt"]
    assert raw_digest(tmp_path)
    lost = "deep"
    with pytest.raises(ArtifactError, match=rf"deep cannot be read \(.*\)\. {fix}\."):
        named_files([tmp_path])


def test_a_data_set_of_the_hub_is_its_name_and_commit() -> None:
    value = f"hub:Helsinki-NLP/opus-100@{COMMIT}"
    found = raw_input([value])
    assert found == RawInput(dataset=HubDataset("Helsinki-NLP/opus-100", COMMIT))
    assert found.values == (value,)
    assert found.named("raw") == {}
    record = found.records("raw")["raw"]
    assert (record.kind, record.path) == ("raw", value)
    assert record.digest == found.records("raw")["raw"].digest
    other = RawInput(dataset=HubDataset("owner/other", COMMIT))
    assert record.digest != other.records("raw")["raw"].digest


@pytest.mark.parametrize(
    "value",
    [
        *("hub:Helsinki-NLP/opus-100", "hub:Helsinki-NLP/opus-100@main", "hub:"),
        *(f"hub:a/b@{name}" for name in (COMMIT[:12], COMMIT.upper(), f"{COMMIT}0", f"{COMMIT}\n")),
        *(f"hub:{name}@{COMMIT}" for name in ("opus-100", "a/b/c")),
    ],
)
def test_a_data_set_that_is_not_pinned_to_a_commit_is_refused_in_a_sentence(value: str) -> None:
    with pytest.raises(ConfigError, match=r"Write hub:OWNER/NAME@REVISION, where REVISION is the"):
        raw_input([value])


def test_a_data_set_stands_alone_and_a_path_once() -> None:
    with pytest.raises(ConfigError, match="is named with 1 more raw input"):
        raw_input(["folder", f"hub:a/b@{COMMIT}"])
    for again in ("folder", "./other/../folder", f"{Path.cwd()}/folder"):
        with pytest.raises(ConfigError, match="folder is named twice"):
            raw_input(["folder", "other", again])


def test_paths_that_are_links_to_each_other_are_left_to_the_readers(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.symlink_to(second)
    second.symlink_to(first)
    assert raw_input([str(first), str(second)]) == RawInput((first, second))


def test_where_one_path_is_wanted_several_or_a_data_set_are_refused() -> None:
    assert RawInput((Path("a"),)).only_path() == Path("a")
    for values in (["a", "b"], [f"hub:a/b@{COMMIT}"]):
        with pytest.raises(ConfigError, match=f"{', '.join(values)}: a single path is wanted"):
            raw_input(values).only_path()


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    parquet.write_table(table, path, compression="zstd", store_schema=False, **options)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_text_that_all_rows_repeat_takes_little_memory(tmp_path: Path, is_nested: bool) -> None:
    """The file has the text once, in a dictionary."""
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    path, text = tmp_path / "a.parquet", "x" * 200_000
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), pyarrow.array([text]))
    if is_nested:
        column = pyarrow.StructArray.from_arrays([column], ["de"])
    write_table(path, {"de": column})
    assert path.stat().st_size < 2000
    before = pyarrow.default_memory_pool()
    measured = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(measured)
    try:
        rows = [row["de"] for row in table_rows(path, ["de"])]
    finally:
        pyarrow.set_memory_pool(before)
    assert rows == [{"de": text} if is_nested else text] * 1000
    assert measured.max_memory() < 50_000_000


@pytest.mark.parametrize("kind", ["one text", "texts", "a list"])
def test_a_table_that_unpacks_to_far_more_than_text_does_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    monkeypatch.setattr("pipeline.artifacts.raw_input._LARGE_BYTES", 2**24)
    path, number = tmp_path / "a.parquet", 2**21
    match kind:
        case "one text":
            column = pyarrow.array(["x" * 10 * number])
        case "texts":
            column = pyarrow.array(["x" * 1000] * 20_000)
        case _:
            column = pyarrow.array([[None] * number], pyarrow.list_(pyarrow.string()))
    write_table(
        path, {"de": column, "en": pyarrow.array(["one"] * len(column))}, use_dictionary=False
    )
    assert path.stat().st_size < 30_000
    with pytest.raises(
        DataError, match=r"a\.parquet unpacks [\d,]+ bytes to [\d,]+, as usual text"
    ):
        next(iter(table_rows(path, ["de"])))
    assert next(iter(table_rows(path, ["en"]))) == {"en": "one"}


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_text_of_far_more_bytes_than_usual_text_has_is_refused(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are short: none of them would be dropped before it is on the disk."""
    monkeypatch.setattr("pipeline.artifacts.raw_input._LARGE_BYTES", 2**16)
    pack = gzip.compress
    if ending == ".zst":
        why = "the package zstandard is not installed"
        pack = pytest.importorskip("zstandard", reason=why).ZstdCompressor().compress
    few, many = (tmp_path / f"{name}{ending}" for name in ("few", "many"))
    few.write_bytes(pack(b"".join(b"%d\n" % number for number in range(2**16))))
    assert sum(1 for _ in iterate_raw_lines(few, max_line_bytes=100)) == 2**16
    many.write_bytes(pack(b"a\n" * 2**20))
    refusal = r"many\S+ unpacks [\d,]+ bytes to [\d,]+, as usual text .* or unpack it yourself"
    with pytest.raises(DataError, match=refusal):
        list(iterate_raw_lines(many, max_line_bytes=100))
