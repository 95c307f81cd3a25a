"""Manifests: safe names, digests of files and artifacts on several ranks, changed settings."""

import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path, PurePosixPath, PureWindowsPath
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import writing
from support.process_pool import ProcessPool

from pipeline import cli
from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import manifest as manifests
from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    changed_files,
    check_together,
    open_artifact,
    read_manifest,
    refuse_changed,
)
from pipeline.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MARKER_NAME,
    describe_name,
    describe_names,
    file_records,
    write_hashed,
)
from pipeline.config.recipe import (
    Recipe,
    describe_change,
    setting_changes,
    with_defaults,
    without_settings,
)
from pipeline.distributed import process
from pipeline.distributed.world import World
from pipeline.errors import EXIT_USER_ERROR, ArtifactError

NOT_WITHIN = [
    *("valid/../../loot.txt", "..", "../loot.txt", "/etc/hostname", "a//b", "./a", "a/.", "a/", ""),
    *("a\\..\\b", "a\0b", "a\x1b[2Jb", "x" * 256, MANIFEST_NAME, "Manifest.JSON", MARKER_NAME),
]


def make_corpus(directory: Path) -> Path:
    with writing(directory, "corpus", "clean") as writer:
        for split in ("train", "valid", "test"):
            for code in ("de", "en"):
                writer.path(f"{split}/de-en/{code}.txt").write_text(f"{split} {code} word\n")
        writer.statistics["pairs"] = {"de-en": {"train": 1, "valid": 1, "test": 1}}
    return directory


def rename_in_manifest(directory: Path, old: str, new: str) -> None:
    path = directory / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["files"][new] = manifest["files"].pop(old)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", NOT_WITHIN)
def test_a_manifest_with_a_name_that_is_not_within_is_refused(tmp_path: Path, name: str) -> None:
    directory = make_corpus(tmp_path / "corpus")
    rename_in_manifest(directory, "valid/de-en/de.txt", name)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(directory)
    assert repr(name) in str(caught.value)
    with pytest.raises(ArtifactError):
        open_artifact(directory, kind="corpus")


@pytest.mark.parametrize(
    ("first", "second"), [("a/B", "a/b"), ("straße", "STRASSE"), ("e\u0301", "\u00e9")]
)
def test_two_names_that_are_one_somewhere_are_refused(first: str, second: str) -> None:
    assert describe_names([first, "else"]) is None
    assert describe_names([first, second]) is not None


@given(st.text(alphabet="ab./\\\0\n", max_size=8) | st.text(max_size=6))
def test_a_name_that_is_accepted_leads_nowhere_else(name: str) -> None:
    if describe_name(name) is not None:
        return
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        assert not path.is_absolute()
        assert not {"..", "."} & set(path.parts)
    assert str(PurePosixPath(name)) == name
    assert name not in (MANIFEST_NAME, "")


def test_a_name_that_leads_out_lets_no_stage_write_outside_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_corpus(tmp_path / "deep" / "corpus")
    (tmp_path / "deep" / "loot.txt").write_text("loot")
    rename_in_manifest(directory, "valid/de-en/de.txt", "valid/../../loot.txt")
    (tmp_path / "recipe.toml").touch()
    options = ["--recipe", str(tmp_path / "recipe.toml"), "--corpus", str(directory)]
    assert cli.main(["clean", *options, "--out", str(tmp_path / "out/clean")]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "'valid/../../loot.txt'" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out/**/*.txt"))


@pytest.mark.parametrize("name", [name for name in NOT_WITHIN if name])
def test_a_stage_cannot_write_what_its_manifest_could_not_hold(tmp_path: Path, name: str) -> None:
    writer = ArtifactWriter(tmp_path / "out")
    with pytest.raises(ArtifactError, match="which"):
        writer.path(name)
    assert not list(tmp_path.iterdir())


def test_settings_are_left_out_by_their_path_at_any_depth() -> None:
    tree = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4, "g": {"b": 5}}
    assert without_settings(tree, ["a.b.c", "f", "g.b", "a.x.y", "f.x", "x"]) == {
        "a": {"b": {"d": 2}, "e": 3},
        "g": {},
    }
    assert tree["a"] == {"b": {"c": 1, "d": 2}, "e": 3}, "the settings given stay as they are"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        (
            {"a": {"b": {"c": 1}}, "z": 0},
            {"a": {"b": {"c": 2}}, "z": 1},
            ["a.b.c: 1 → 2", "z: 0 → 1"],
        ),
        ({"c": {}}, {"a": 1, "c": {"f": 1}}, ["a: unset → 1", "c: {} → a table", "c.f: unset → 1"]),
        ({"a": {"b": 1}}, {"a": None}, ["a: a table → None", "a.b: 1 → unset"]),
        ({"a": None}, {"a": {"b": {"c": 1}}}, ["a: None → a table", "a.b.c: unset → 1"]),
        ({"b": 1, "a": [1, 2]}, {"a": [1, 3]}, ["a: [1, 2] → [1, 3]", "b: 1 → unset"]),
    ],
)
def test_differences_of_settings_are_described_by_their_paths(
    old: dict[str, object], new: dict[str, object], expected: list[str]
) -> None:
    assert setting_changes(old, new) == expected
    assert describe_change(old, new) == (expected[0] if expected else None)


def test_settings_that_there_were_not_yet_are_at_their_defaults() -> None:
    sections = ("mixture", "training")
    today = Recipe(name="defaults").sections(sections)
    noted = {"training": {"updates": 10}, "ds_config": {"zero": 1}}
    training = {**today["training"], "updates": 10}
    filled = {"mixture": today["mixture"], "training": training, "ds_config": {"zero": 1}}
    assert with_defaults(noted, sections=sections) == filled
    assert with_defaults(filled, sections=sections) == filled


@pytest.mark.parametrize("section", [{"up_dates": 10}, {"updates": "ten"}, ["updates"], None])
def test_settings_that_cannot_be_read_any_more_stay_as_noted(section: object) -> None:
    found = with_defaults({"training": section}, sections=("mixture", "training"))
    assert found["training"] == section


STORED_RUN = Path(__file__).resolve().parents[1] / "whole" / "stored_run.tar.gz"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "artifacts.md"
FILES = {
    section.partition("\n")[0]: re.findall(r"^\| `([^`]+)` \|", section, re.M)
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]
}
"""Kind → names of its files on the page, in which words in capitals stand for names."""


def is_declared(name: str, kind: str) -> bool:
    return any(
        re.fullmatch(re.sub(r"\b[A-Z]+\b", "[^/]+", re.escape(pattern)), name)
        for pattern in FILES[kind]
    )


def test_a_stored_run_holds_only_files_that_their_kinds_declare_on_the_page() -> None:
    assert set(FILES) == set(FORMAT_VERSION)
    assert all(FILES.values())
    assert is_declared("train/de-en/de.txt", "corpus")
    assert not is_declared("train/de-en/de.tokens", "corpus")
    kinds = set()
    with tarfile.open(STORED_RUN) as archive:
        for member in archive.getmembers():
            if member.name.endswith("manifest.json"):
                stream = archive.extractfile(member)
                assert stream is not None
                manifest = json.load(stream)
                kinds.add(manifest["kind"])
                names = manifest["files"]
                assert not [n for n in names if not is_declared(n, manifest["kind"])], member.name
    assert len(kinds) >= 9


def test_a_removed_setting_counts_where_its_effect_was_another_than_todays() -> None:
    """Manifests of earlier versions note settings that there are no more."""
    today = Recipe(name="defaults").sections(("clean", "training"))
    noted = {
        "clean": {**today["clean"], "drop_near_duplicates": False},
        "training": {**today["training"], "cpu_kernels": "measured"},
    }
    assert with_defaults(noted, sections=("clean", "training")) == today
    noted["clean"]["drop_near_duplicates"] = True
    found = with_defaults(noted, sections=("clean", "training"))
    assert setting_changes(found, today) == ["clean.drop_near_duplicates: True → unset"]


def test_a_result_by_an_earlier_default_is_up_to_date_and_one_by_another_value_is_not() -> None:
    today = {"decoding": {"precision": "auto"}}
    assert setting_changes({"decoding": {"precision": "float32"}}, today) == []
    assert len(setting_changes({"decoding": {"precision": "bfloat16"}}, today)) == 1
    assert len(setting_changes(today, {"decoding": {"precision": "float32"}})) == 1


@pytest.mark.parametrize("wanted", ["nfc", "plain"])
def test_a_vocabulary_of_before_there_was_a_choice_is_up_to_date_by_today(wanted: str) -> None:
    today = Recipe(name="defaults").sections(("tokenizer",))
    today["tokenizer"]["normalization"] = wanted
    old = {"tokenizer": {**today["tokenizer"]}}
    old["tokenizer"].pop("normalization")
    assert setting_changes(with_defaults(old, sections=("tokenizer",)), today) == []
    other = {"nfc": "plain", "plain": "nfc"}[wanted]
    made = {"tokenizer": {**today["tokenizer"], "normalization": other}}
    found = setting_changes(with_defaults(made, sections=("tokenizer",)), today)
    assert found == [f"tokenizer.normalization: {other} → {wanted}"]


# ---------------------------------------------------------------- digests


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as a process that remembers nothing, and syncs often."""
    monkeypatch.setattr(manifests, "SYNC_BYTES", 100)
    artifacts._INTACT.clear()


class Hashing:
    """Counts the files that are hashed."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._lock = threading.Lock()
        self._original = manifests._file_digest

    def __call__(self, path: Path) -> str:
        with self._lock:
            self.files.append(path.name)
        return self._original(path)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    counter = Hashing()
    monkeypatch.setattr(manifests, "_file_digest", counter)
    return counter


def pieces_of(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (99, 1), (100,), (101,), (0, 250, 0, 3, 47), (7,) * 60, (1000, 1)]
)
def test_the_record_is_that_of_the_file_read_back(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    pieces = pieces_of(*sizes)
    record = write_hashed(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert record == file_records([tmp_path / "file"])[tmp_path / "file"]


def test_writing_is_little_ahead_of_the_disk_and_every_sync_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def sync_slowly(file: int) -> None:
        time.sleep(0.05)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    before = process.steps()
    write_hashed(tmp_path / "file", pieces_of(130, 5, 290))
    assert len(synced) == process.steps() - before == 4
    assert synced[-1] == 425
    for due, size in zip((100, 235, 335, 425), synced, strict=True):
        assert due <= size <= due + 200


@pytest.mark.parametrize(("folder", "number"), [("nowhere", 2), ("", 5)])
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, number: int
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="/file") as found:
        write_hashed(tmp_path / folder / "file", pieces_of(1000))
    assert found.value.errno == number


def test_an_artifact_takes_records_over_and_reads_no_file(tmp_path: Path, hashing: Hashing) -> None:
    with writing(tmp_path / "made", "checkpoint", "x") as writer:
        path = writer.path("weights")
        writer.settled[path] = write_hashed(path, pieces_of(250))
        writer.path("notes").write_text("notes")
    assert hashing.files == ["notes"]
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    made.check()


CONTENTS = {"a.txt": b"one\n", "deep/b.bin": bytes(200), "empty": b""}


def make(directory: Path, *, age: bool = True) -> Artifact:
    """An artifact whose files were last changed some time ago, as those of real stages were."""
    with writing(directory, "corpus", "clean") as writer:
        for name, content in CONTENTS.items():
            writer.path(name).write_bytes(content)
            if age:
                os.utime(writer.directory / name, (1_700_000_000, 1_700_000_000))
    return open_artifact(directory, kind="corpus")


def tamper(path: Path) -> None:
    """Other content of the same size."""
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_a_tampered_file_is_not_given_out_whatever_asks_for_it(tmp_path: Path) -> None:
    made = make(tmp_path / "corpus")
    made.file("a.txt")
    tamper(made.directory / "a.txt")
    assert made.file("deep/b.bin").read_bytes() == CONTENTS["deep/b.bin"]
    made.check(["empty", "deep/b.bin"])
    for ask in (lambda: made.file("a.txt"), lambda: made.check(["empty", "a.txt"]), made.check):
        with pytest.raises(ArtifactError, match=r"a\.txt is damaged"):
            ask()
    (made.directory / "a.txt").unlink()
    with pytest.raises(ArtifactError, match=r"a\.txt is missing, although its manifest"):
        made.check(["a.txt"])


def test_a_file_with_its_old_time_but_another_inode_is_looked_at_again(tmp_path: Path) -> None:
    made = make(tmp_path / "corpus")
    path = made.file("a.txt")
    status = path.stat()
    (tmp_path / "other").write_bytes(b"two\n")
    os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "other").replace(path)
    with pytest.raises(ArtifactError, match=r"a\.txt is damaged"):
        made.file("a.txt")


@pytest.mark.parametrize("linked", ["a.txt", "deep", "deep/b.bin"])
def test_a_link_within_is_refused_even_if_the_content_is_right(tmp_path: Path, linked: str) -> None:
    made = make(tmp_path / "corpus")
    (made.directory / linked).rename(tmp_path / "elsewhere")
    (made.directory / linked).symlink_to(tmp_path / "elsewhere")
    name = "a.txt" if linked == "a.txt" else "deep/b.bin"
    for ask in (made.file, made.unchecked_file, lambda name: made.check([name])):
        with pytest.raises(ArtifactError, match=rf"{linked} is a link"):
            ask(name)
    with pytest.raises(ArtifactError, match="is a link"):
        made.check()


@pytest.mark.parametrize(
    ("target", "fix"), [("kept", "Copy the file"), ("gone", "Restore it from")]
)
def test_a_manifest_that_is_a_link_is_copied_only_if_the_link_leads_somewhere(
    tmp_path: Path, target: str, fix: str
) -> None:
    made = make(tmp_path / "corpus")
    path = (made.directory / MANIFEST_NAME).rename(tmp_path / "kept")
    (made.directory / MANIFEST_NAME).symlink_to(path.with_name(target))
    with pytest.raises(ArtifactError, match=rf"manifest\.json is a link, .*\. {fix}"):
        open_artifact(made.directory, kind="corpus")


def test_a_link_to_a_system_file_is_not_copied_into_the_next_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing(tmp_path / "corpus", "corpus", "import_corpus") as writer:
        for split in ("train", "valid"):
            for code in ("de", "en"):
                writer.path(f"{split}/de-en/{code}.txt").write_text(f"{split} {code}\n")
        writer.statistics["pairs"] = {"de-en": {"train": 1, "valid": 1}}
    (tmp_path / "corpus" / "valid/de-en/de.txt").unlink()
    (tmp_path / "corpus" / "valid/de-en/de.txt").symlink_to("/etc/passwd")
    (tmp_path / "recipe.toml").write_text("[clean]\n")
    options = ["--recipe", str(tmp_path / "recipe.toml"), "--corpus", str(tmp_path / "corpus")]
    assert cli.main(["clean", *options, "--out", str(tmp_path / "out")]) == EXIT_USER_ERROR
    assert "valid/de-en/de.txt is a link" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_a_file_with_a_digest_per_chunk_is_known_and_its_damage_found(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the manifests of earlier versions have them, for chunks of 64 MiB."""
    monkeypatch.setattr(manifests, "CHUNK_BYTES", 64)
    made = make(tmp_path / "corpus")
    path = made.directory / MANIFEST_NAME
    content = bytes(range(size))
    (made.directory / "a.txt").write_bytes(content)
    chunks = [sha256(content[start : start + 64]).hexdigest() for start in range(0, size, 64)]
    document = json.loads(path.read_text(encoding="utf-8"))
    document["files"]["a.txt"] = {"size": size, "chunks": chunks}
    path.write_text(json.dumps(document), encoding="utf-8")
    opened = open_artifact(made.directory, kind="corpus")
    assert opened.file("a.txt").read_bytes() == content
    assert opened.manifest.model_dump()["files"]["a.txt"] == {"size": size, "chunks": tuple(chunks)}
    (made.directory / "a.txt").write_bytes(content[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"a\.txt is damaged"):
        open_artifact(made.directory, kind="corpus").file("a.txt")
    document["files"]["a.txt"] = {"size": size}
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a manifest"):
        open_artifact(made.directory, kind="corpus")


def test_a_file_is_hashed_once_in_a_process(tmp_path: Path, hashing: Hashing) -> None:
    made = make(tmp_path / "corpus")
    hashing.files.clear()
    for _ in range(3):
        made.check(made.names())
        open_artifact(made.directory, kind="corpus").file("a.txt")
    assert sorted(hashing.files) == ["a.txt", "b.bin", "empty"]


def test_a_file_changed_this_instant_is_not_remembered(tmp_path: Path, hashing: Hashing) -> None:
    """A second change might leave the same time, by the clock of the file system."""
    made = make(tmp_path / "corpus")
    status = (made.directory / "a.txt").stat()
    with mock.patch("time.time_ns", return_value=status.st_mtime_ns + 1_000_000):
        made.check(["a.txt"])
        made.check(["a.txt"])
    assert hashing.files.count("a.txt") == 3, "by sealing, and by both checks"


def test_several_threads_hash_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for index in range(20):
        paths.append(tmp_path / f"{index}")
        paths[-1].write_bytes(os.urandom(index * 23))
    used: set[int] = set()
    barrier = threading.Barrier(2, timeout=20)
    original = manifests._file_digest

    def digest(path: Path) -> str:
        if threading.get_ident() not in used and len(used) < 2:
            used.add(threading.get_ident())
            barrier.wait()
        return original(path)

    monkeypatch.setattr(manifests, "MAX_THREADS", 1)
    alone = file_records(paths)
    monkeypatch.setattr(manifests, "MAX_THREADS", 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(manifests, "_file_digest", digest)
    assert file_records(paths) == alone
    assert len(used) == 2


def test_a_change_is_noticed_by_size_and_time_alone(tmp_path: Path, hashing: Hashing) -> None:
    made = make(tmp_path / "corpus")
    hashing.files.clear()
    assert changed_files(made.directory, made.manifest) == {}
    sealed = (made.directory / "manifest.json").stat().st_mtime
    os.utime(made.directory / "a.txt", (sealed + 1, sealed + 1))
    (made.directory / "deep/b.bin").write_bytes(b"shorter")
    (made.directory / "empty").unlink()
    assert changed_files(made.directory, made.manifest) == {
        "a.txt": "changed since it was made",
        "deep/b.bin": "changed since it was made",
        "empty": "is missing",
    }
    assert hashing.files == []


def test_what_just_looks_changed_is_hashed(tmp_path: Path, hashing: Hashing) -> None:
    made = make(tmp_path / "corpus")
    hashing.files.clear()
    sealed = (made.directory / "manifest.json").stat().st_mtime
    os.utime(made.directory / "a.txt", (sealed + 1, sealed + 1))
    refuse_changed(made.directory)
    assert hashing.files == ["a.txt"]
    tamper(made.directory / "a.txt")
    os.utime(made.directory / "a.txt", (sealed + 2, sealed + 2))
    with pytest.raises(ArtifactError, match=r"a\.txt is damaged"):
        refuse_changed(made.directory)


def check_and_count(world: World, directory: Path) -> tuple[list[str], str]:
    """The files this rank hashed, and the error it met."""
    del world
    artifacts._INTACT.clear()
    counter = Hashing()
    with mock.patch.object(manifests, "_file_digest", counter):
        made = open_artifact(directory, kind="corpus")
        try:
            check_together(made)
            made.check(made.names())
        except ArtifactError as error:
            return counter.files, str(error)
    return counter.files, ""


def test_ranks_hash_a_share_each(pool2: ProcessPool, tmp_path: Path) -> None:
    (first, _), (second, _) = pool2.run(check_and_count, make(tmp_path / "corpus").directory)
    assert sorted(first + second) == ["a.txt", "b.bin", "empty"]
    assert {len(first), len(second)} == {1, 2}


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("a.txt", tamper, "damaged"),
        ("deep/b.bin", tamper, "damaged"),
        ("a.txt", Path.unlink, "missing"),
    ],
)
def test_damage_in_the_share_of_either_rank_is_one_error_on_both(
    pool2: ProcessPool, tmp_path: Path, name: str, spoil: Callable[[Path], None], said: str
) -> None:
    directory = make(tmp_path / "corpus").directory
    spoil(directory / name)
    (_, first), (_, second) = pool2.run(check_and_count, directory)
    assert first == second
    assert f"{name} is {said}" in first
