"""Artifacts appear whole or not at all, and whatever is wrong with one is said in a sentence."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corpora import writing
from support.folder_listing import names_in
from support.forked import started_code
from support.raw_trees import write

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import manifest as manifests
from pipeline.artifacts.artifact import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Artifact,
    ArtifactWriter,
    InputRecord,
    json_digest,
    new_artifact,
    open_artifact,
    raw_digest,
    read_manifest,
    refuse_to_overwrite,
    stage_key,
)
from pipeline.artifacts.manifest import FileRecord, Kind
from pipeline.errors import ArtifactError

CONTENTS = {"text.txt": b"one\ntwo\n", "deep/er/numbers.bin": bytes(range(100)), "empty": b""}
SHARED_FOLDER = [HealthCheck.function_scoped_fixture]
SOURCE = InputRecord(kind="raw", path="/data/raw", digest="0" * 64)


def make(
    directory: Path,
    contents: dict[str, bytes] = CONTENTS,
    *,
    before_end: Callable[[ArtifactWriter], object] = lambda _: None,
    **options: Any,
) -> Artifact:
    given: Any = {"config": {"clean": {"max_characters": 5}}, "inputs": {"raw": SOURCE}, **options}
    with new_artifact(directory, kind="corpus", stage="clean", **given) as writer:
        for name, content in contents.items():
            writer.path(name).write_bytes(content)
        writer.statistics["lines"] = 2
        before_end(writer)
    return open_artifact(directory, kind="corpus")


def edit_manifest(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_finished_artifact_holds_its_files_and_says_where_it_came_from(tmp_path: Path) -> None:
    made = make(tmp_path / "corpus", wall_seconds=12.5)
    made.check()
    assert {name: made.file(name).read_bytes() for name in made.names()} == CONTENTS
    assert made.names("deep/") == ["deep/er/numbers.bin"]
    assert made.has("empty")
    assert not made.has(MANIFEST_NAME)
    assert made.statistics == {"lines": 2}
    assert made.manifest.inputs == {"raw": SOURCE}
    assert made.manifest.run.wall_seconds == 12.5
    assert made.manifest.key == stage_key(
        stage="clean",
        kind="corpus",
        config={"clean": {"max_characters": 5}},
        inputs={"raw": SOURCE.digest},
    )
    assert names_in(tmp_path) == ["corpus"]


KILLED_SCRIPT = """
import os, signal, sys
from pathlib import Path
from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts.artifact import new_artifact

moment = sys.argv[2]
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "before the manifest":
    artifacts.file_records = kill
if moment == "before the renaming":
    artifacts.replace_directory = kill
if moment == "at the renaming":
    Path.rename = kill
with new_artifact(Path(sys.argv[1]), kind="corpus", stage="clean", config={}, inputs={}) as writer:
    writer.path("deep/text.txt").write_text("half")
    if moment == "within the block":
        kill()
"""


@pytest.mark.parametrize(
    "moment", ["within the block", "before the manifest", "before the renaming", "at the renaming"]
)
def test_a_killed_stage_leaves_nothing_that_looks_finished_and_can_run_again(
    tmp_path: Path, moment: str
) -> None:
    out_dir = tmp_path / "corpus"
    with started_code(KILLED_SCRIPT, [str(out_dir), moment], environment=os.environ) as process:
        assert process.end()[0] == -9
    assert len(list(tmp_path.iterdir())) == 1, "what was begun must lie about"
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(out_dir, kind="corpus")
    make(out_dir, {"text.txt": b"whole"}).check()
    assert names_in(tmp_path) == ["corpus"]
    assert open_artifact(out_dir, kind="corpus").names() == ["text.txt"]


def test_what_a_kill_between_the_two_renamings_left_aside_is_put_back(tmp_path: Path) -> None:
    """The worst moment of replacing: the old one is set aside, the new one not yet in place."""
    make(tmp_path / "corpus", {"text.txt": b"old"})
    (tmp_path / "corpus").rename(tmp_path / ".corpus.replaced")
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(tmp_path / "corpus", kind="corpus")
    with pytest.raises(ArtifactError, match="exists already"):
        make(tmp_path / "corpus", {"text.txt": b"new"})
    assert (tmp_path / "corpus" / "text.txt").read_bytes() == b"old", "it was put back"
    make(tmp_path / "corpus", {"text.txt": b"newer"}, overwrite=True)
    assert (tmp_path / "corpus" / "text.txt").read_bytes() == b"newer"
    assert names_in(tmp_path) == ["corpus"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(errno.EIO, "io")])
def test_an_error_within_leaves_what_was_there_before(tmp_path: Path, error: BaseException) -> None:
    before = make(tmp_path / "corpus", {"text.txt": b"old"})

    def fail(_writer: ArtifactWriter) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        make(tmp_path / "corpus", {"text.txt": b"new"}, overwrite=True, before_end=fail)
    assert caught.value is error
    after = open_artifact(tmp_path / "corpus", kind="corpus")
    after.check()
    assert after.manifest == before.manifest
    assert names_in(tmp_path) == ["corpus"]


@pytest.mark.parametrize(
    ("place", "code"),
    [("a file", errno.ENOSPC), ("syncing", errno.EDQUOT), ("the manifest", errno.ENOSPC)],
)
def test_a_full_disk_leaves_the_old_artifact_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, place: str
) -> None:
    before = make(tmp_path / "corpus", {"text.txt": b"old"})

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    def fill_disk(_writer: ArtifactWriter) -> None:
        match place:
            case "a file":
                full()
            case "syncing":
                monkeypatch.setattr(os, "fsync", full)
            case "the manifest":
                monkeypatch.setattr(artifacts, "to_json", full)

    with pytest.raises(ArtifactError, match=r"could not be written .* make room"):
        make(tmp_path / "corpus", {"text.txt": b"new"}, overwrite=True, before_end=fill_disk)
    monkeypatch.undo()
    after = open_artifact(tmp_path / "corpus", kind="corpus")
    after.check()
    assert after.manifest == before.manifest
    assert names_in(tmp_path) == ["corpus"]


def denied(path: Path | str) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP])
@pytest.mark.parametrize("name", ["", "/en-de/train.de.gz"])
def test_an_input_that_cannot_be_read_is_not_called_the_output(
    tmp_path: Path, name: str, number: int
) -> None:
    def read(_writer: ArtifactWriter) -> None:
        raise OSError(number, os.strerror(number), f"{SOURCE.path}{name}")

    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as refused:
        make(tmp_path / "corpus", before_end=read)
    assert refused.value.filename == f"{SOURCE.path}{name}"
    assert names_in(tmp_path) == []

    def copy(_writer: ArtifactWriter) -> None:  # a full disk is the output's, whatever it names
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{SOURCE.path}{name}")

    with pytest.raises(ArtifactError, match=r"corpus could not be written .*make room"):
        make(tmp_path / "corpus", before_end=copy)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTEMPTY])
def test_what_was_replaced_and_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make(tmp_path / "corpus", {"text.txt": b"old"})
    aside = tmp_path / ".corpus.replaced"
    original = shutil.rmtree

    def refuse(path: Path, **options: Any) -> None:
        if path == aside:
            raise OSError(number, os.strerror(number), "text.txt")
        original(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    make(tmp_path / "corpus", {"text.txt": b"new"}, overwrite=True)
    assert names_in(tmp_path) == [aside.name, "corpus"]
    with pytest.raises(ArtifactError) as refused:
        make(tmp_path / "corpus", {"text.txt": b"newest"}, overwrite=True)
    assert str(refused.value).startswith(
        f"{aside} could not be removed ({os.strerror(number)}), nothing was changed: "
    )
    assert (tmp_path / "corpus" / "text.txt").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["text.txt", "empty"])
def test_a_file_without_permission_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = make(tmp_path / "corpus")
    path = made.directory / name

    def read(_files: object) -> list[bool]:
        raise denied(path)

    monkeypatch.setattr(artifacts, "are_intact", read)
    with pytest.raises(ArtifactError) as refused:
        made.check()
    assert str(refused.value) == f"{path} cannot be read (Permission denied). Make it readable."


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_an_artifact_whose_files_cannot_be_listed_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = getattr(os, call)

    def stale(path: Any, **options: Any) -> Any:
        if "inner" in str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(path, **options)

    def go_stale(writer: ArtifactWriter) -> None:
        writer.path("inner/more.txt").write_bytes(b"more")
        monkeypatch.setattr(os, call, stale)

    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        make(tmp_path / "corpus", {"text.txt": b"new"}, before_end=go_stale)
    monkeypatch.undo()
    assert not (tmp_path / "corpus").exists()


def test_a_folder_with_anything_in_it_is_replaced_only_on_demand(tmp_path: Path) -> None:
    make(tmp_path / "corpus", {"text.txt": b"old"})
    with pytest.raises(ArtifactError, match=r"exists already. .*--overwrite"):
        make(tmp_path / "corpus", {"text.txt": b"new"})
    assert (tmp_path / "corpus" / "text.txt").read_bytes() == b"old"
    make(tmp_path / "corpus", {"other.txt": b"new"}, overwrite=True)
    assert names_in(tmp_path / "corpus") == [MANIFEST_NAME, "other.txt"]
    (tmp_path / "empty").mkdir()
    refuse_to_overwrite(tmp_path / "empty", overwrite=False)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="exists already"):
        refuse_to_overwrite(tmp_path / "file", overwrite=False)


def test_an_artifact_that_is_not_there_names_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"not exist\. Run the stage that makes the shards"):
        open_artifact(tmp_path / "shards", kind="shards")


@pytest.mark.parametrize("kind", ["shards", "training_state"])
@pytest.mark.parametrize("shown", ["manifest.json", "folder"])
def test_an_artifact_that_another_rank_sees_late_is_waited_for(
    kind: Kind, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(tmp_path / "a", kind, "made") as writer:
        writer.write_json("made.json", 1)
    place = tmp_path / "a" / MANIFEST_NAME if shown == MANIFEST_NAME else tmp_path / "a"
    hidden = place.rename(tmp_path / "hidden")
    looks = iter((False, False, True))
    monkeypatch.setattr(time, "sleep", lambda _: next(looks) and hidden.rename(place))
    with pytest.raises(ArtifactError, match=r"does not exist|not a finished"):
        open_artifact(tmp_path / "a", kind=kind)
    monkeypatch.setenv("RANK", "1")  # as a shell may have it, without a launcher
    with pytest.raises(ArtifactError, match=r"does not exist|not a finished"):
        open_artifact(tmp_path / "a", kind=kind)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert open_artifact(tmp_path / "a", kind=kind).manifest.kind == kind
    monkeypatch.setattr(artifacts, "SHOWN_LATE_SECONDS", 0.0)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(tmp_path / "b", kind=kind)


def test_a_folder_without_manifest_is_not_finished(tmp_path: Path) -> None:
    make(tmp_path / "corpus")
    (tmp_path / "corpus" / MANIFEST_NAME).unlink()
    assert read_manifest(tmp_path / "corpus") is None
    with pytest.raises(ArtifactError, match=r"no manifest.json, so it is not a finished corpus"):
        open_artifact(tmp_path / "corpus", kind="corpus")


@pytest.mark.parametrize("kind", ["checkpoint", "tokenizer"])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nllb-1.3B/config.json", "import '{}' --out runs/nllb-1.3B`"),
        ("wmt.pt", "import '{}' --dictionary dict.txt --sentencepiece FILE --out runs/wmt`"),
    ],
)
def test_a_model_of_other_software_names_the_command_that_imports_it(
    tmp_path: Path, name: str, command: str, kind: Kind
) -> None:
    file = tmp_path / "my models" / name
    file.parent.mkdir(parents=True)
    file.touch()
    path = file if file.suffix == ".pt" else file.parent
    with pytest.raises(ArtifactError, match=f"checkpoint {re.escape(command.format(path))}"):
        open_artifact(path, kind=kind)


def test_an_artifact_of_another_kind_names_both_kinds(tmp_path: Path) -> None:
    make(tmp_path / "corpus")
    with pytest.raises(ArtifactError, match="is a corpus artifact where a checkpoint artifact"):
        open_artifact(tmp_path / "corpus", kind="checkpoint")


@pytest.mark.parametrize(("name", "quoted"), [("model", "{}"), ("my model", "'{}'")])
def test_a_checkpoint_given_for_its_tokenizer_names_the_command_that_extracts_it(
    name: str, quoted: str, tmp_path: Path
) -> None:
    model = tmp_path / name
    with new_artifact(model, kind="checkpoint", stage="pretrain", config={}, inputs={}):
        pass
    source, out = quoted.format(model), quoted.format(f"{model}-tokenizer")
    said = f"Run `mmnmt checkpoint import {source} --tokenizer --out {out}`, and name {model}-tok"
    with pytest.raises(ArtifactError, match=re.escape(said)):
        open_artifact(model, kind="tokenizer")


def test_another_format_version_names_both_versions_and_the_stage(tmp_path: Path) -> None:
    make(tmp_path / "corpus")
    newer = FORMAT_VERSION["corpus"] + 1
    edit_manifest(tmp_path / "corpus", format_version=newer)
    said = rf"format version {newer}, .* reads {newer - 1}. Run stage 'clean'"
    with pytest.raises(ArtifactError, match=said):
        open_artifact(tmp_path / "corpus", kind="corpus")


def test_a_manifest_that_cannot_be_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    make(tmp_path / "corpus")
    for text in ("", "{", "[]", "{}", '{"kind": "corpus"}', "\x00"):
        (tmp_path / "corpus" / MANIFEST_NAME).write_text(text)
        with pytest.raises(ArtifactError, match=r"is not a manifest .* run its stage again"):
            open_artifact(tmp_path / "corpus", kind="corpus")


def test_an_unknown_field_or_kind_in_a_manifest_is_refused(tmp_path: Path) -> None:
    for change in ({"colour": "red"}, {"kind": "corpse"}):
        directory = make(tmp_path / next(iter(change))).directory
        edit_manifest(directory, **change)
        with pytest.raises(ArtifactError, match=r"\(1 problem\)"):
            open_artifact(directory, kind="corpus")


def test_a_file_the_manifest_does_not_list_is_not_part_of_the_artifact(tmp_path: Path) -> None:
    made = make(tmp_path / "corpus")
    (tmp_path / "corpus" / "extra.txt").write_text("stray")
    assert not made.has("extra.txt")
    with pytest.raises(ArtifactError, match=r"'extra.txt'\. Restore .* run stage 'clean' again"):
        made.file("extra.txt")


@settings(suppress_health_check=SHARED_FOLDER, max_examples=60, deadline=None)
@given(content=st.binary(min_size=1, max_size=70), data=st.data())
def test_a_flipped_bit_is_found(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    made = make(tmp_path / "corpus", {"file": content}, overwrite=True)
    path = made.directory / "file"
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    with pytest.raises(ArtifactError, match="file is damaged"):
        made.check()


@pytest.mark.parametrize("size", [0, 32, 64])
def test_a_file_that_is_shorter_or_longer_is_found_by_its_size(tmp_path: Path, size: int) -> None:
    made = make(tmp_path / "corpus", {"file": b"x" * 33})
    path = made.directory / "file"
    path.write_bytes(b"x" * size)
    with pytest.raises(ArtifactError, match=rf"file has {size} bytes, its manifest says 33"):
        made.check()


def test_the_digest_knows_no_time_or_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(tmp_path / "corpus", wall_seconds=0.0)
    moved = SOURCE.model_copy(update={"path": "/elsewhere"})
    later = datetime(2001, 1, 1, tzinfo=UTC)
    clock = type("Clock", (), {"now": staticmethod(lambda _zone: later)})
    monkeypatch.setattr(artifacts, "datetime", clock)
    second = make(tmp_path / "other" / "name", inputs={"raw": moved}, wall_seconds=2.0)
    assert first.manifest.run != second.manifest.run
    assert first.digest == second.digest
    assert first.manifest.key == second.manifest.key


def test_the_digest_depends_on_content_settings_and_inputs(tmp_path: Path) -> None:
    other_input = {"raw": SOURCE.model_copy(update={"digest": "1" * 64})}
    made = [
        make(tmp_path / "a"),
        make(tmp_path / "b", {**CONTENTS, "text.txt": b"one\ntwo "}),
        make(tmp_path / "c", {**CONTENTS, "more.txt": b""}),
        make(tmp_path / "d", config={"clean": {"max_characters": 6}}),
        make(tmp_path / "e", inputs=other_input),
        make(tmp_path / "f", inputs={"corpus": SOURCE}),
    ]
    assert len({artifact.digest for artifact in made}) == len(made)


def test_the_key_depends_on_stage_settings_and_inputs_whatever_their_order() -> None:
    def key(stage: str = "clean", **changes: Any) -> str:
        values: dict[str, Any] = {
            "kind": "corpus",
            "config": {"a": 1, "b": {"c": 2, "d": 3}},
            "inputs": {"x": "1", "y": "2"},
        }
        return stage_key(stage=stage, **{**values, **changes})

    reordered = {"b": {"d": 3, "c": 2}, "a": 1}
    assert key(config=reordered, inputs={"y": "2", "x": "1"}) == key()
    others = [key(stage="mix"), key(kind="shards"), key(config={"a": 2})]
    assert len({key(), *others, key(inputs={"x": "2", "y": "1"})}) == 5


def test_a_raw_folder_is_known_by_the_names_and_contents_of_its_files(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, str | bytes]) -> str:
        return raw_digest(write(tmp_path / name, files))

    first = folder("a", {"x/one": b"1", "two": b"2"})
    assert folder("b", {"two": b"2", "x/one": b"1"}) == first
    others = [
        folder("c", {"x/one": b"1", "two": b"3"}),
        folder("d", {"y/one": b"1", "two": b"2"}),
        folder("e", {"x/one": b"1", "two": b"2", "three": b""}),
    ]
    assert len({first, *others}) == 4
    assert raw_digest(tmp_path / "a" / "two") == json_digest(
        {"size": 1, "chunks": [hashlib.sha256(b"2").hexdigest()]}
    )
    with pytest.raises(ArtifactError, match=r"does not exist\. Name an existing file or folder"):
        raw_digest(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ArtifactError, match=r"fifo is a pipe or a device\. Name an existing file"):
        raw_digest(tmp_path / "fifo")


@pytest.mark.parametrize("closed", ["de-en", "de-en/more"])
def test_a_raw_folder_that_cannot_be_listed_is_refused_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """The tests may run as root, who can list every folder."""
    write(tmp_path, {"train.de": b"1", "de-en/more/train.en": b"1", ".trash/old": b"1"})
    original = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) in (tmp_path / closed, tmp_path / ".trash"):
            raise denied(path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ArtifactError) as refused:
        raw_digest(tmp_path)
    folder = tmp_path / closed
    assert str(refused.value) == f"{folder} cannot be read (Permission denied). Make it readable."


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_taken_over_is_linked_and_not_read_again_or_else_copied(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path / "first", {"deep/weights": b"weights" * 1000})
    read: list[str] = []

    def file_records(paths: list[Path]) -> dict[Path, FileRecord]:
        read.extend(path.name for path in paths)
        return manifests.file_records(paths)

    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(artifacts, "file_records", file_records)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)

    def take_over(writer: ArtifactWriter) -> None:
        writer.take_over("deep/weights", first)

    second = make(tmp_path / "second", {"notes": b"notes"}, before_end=take_over)
    assert sorted(read) == (["notes"] if has_links else ["notes", "weights"])
    assert second.manifest.files["deep/weights"] == first.manifest.files["deep/weights"]
    second.check(second.names())
    linked = (tmp_path / "second/deep/weights").samefile(tmp_path / "first/deep/weights")
    assert linked == has_links


@pytest.mark.parametrize("change", ["removed", "edited"])
def test_a_file_that_is_not_what_was_written_is_not_taken_over(change: str, tmp_path: Path) -> None:
    first = make(tmp_path / "first", {"weights": b"weights"})
    if change == "removed":
        (tmp_path / "first/weights").unlink()
    else:
        (tmp_path / "first/weights").write_bytes(b"WEIGHTS")
    with pytest.raises(ArtifactError, match="weights"):
        make(tmp_path / "second", before_end=lambda writer: writer.take_over("weights", first))
    assert not (tmp_path / "second").exists()


def test_the_state_before_a_damaged_one_is_offered_by_name(tmp_path: Path) -> None:
    """The run of updates 8, 90 and 100 has no complete state after updates 95 and 96."""
    for update in (100, 8, 90):
        with writing(tmp_path / f"update-{update:07}", "training_state") as writer:
            writer.path("weights").write_bytes(b"weights")
    (tmp_path / "update-0000095").mkdir()
    files = {"0000096": "damaged", "old": "{}"}.items()
    write(tmp_path, {f"update-{name}/{MANIFEST_NAME}": manifest for name, manifest in files})
    for update, then in {100: "resumes after update 90", 8: "begins anew"}.items():
        state = open_artifact(tmp_path / f"update-{update:07}", kind="training_state")
        for text in (b"wEights", b""):
            (state.directory / "weights").write_bytes(text)
            with pytest.raises(ArtifactError, match=rf"{update:07} away; its stage then {then}"):
                state.file("weights")
        (state.directory / MANIFEST_NAME).write_text("{", encoding="utf-8")
        with pytest.raises(ArtifactError, match=rf"{update:07} away; its stage then {then}"):
            open_artifact(state.directory, kind="training_state")
