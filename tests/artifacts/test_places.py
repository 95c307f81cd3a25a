"""Nothing that is not ours is ever removed or changed, whatever lies where a stage is to write."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.corpora import writing
from support.folder_listing import names_in
from support.forked import started_code
from support.raw_trees import write
from support.tiny_plan import PLAN, RAW, RECIPE, in_this_process

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact, read_manifest
from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.manifest import MANIFEST_NAME, MARKER_NAME, Kind, run_dir
from pipeline.artifacts.places import (
    make_working,
    plan_lock_path,
    refuse_inputs,
    remove_artifact,
    replaced_dir,
    restore,
    unfinished_dir,
    why_not_ours,
)
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.run_folders import claim_run_folder, set_aside
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, ConfigError, UserError
from pipeline.jobs.plan import load_plan, resolve_plan
from pipeline.jobs.runner import run_plan
from pipeline.training.run_directory import RunDirectory

ALONE = World(0, 1, 0, 1, LOOPBACK, 0)


PATHS = (
    *("data", "data/raw", "data/corpus", "data/corpus/notes", "data/raw/en-de/more"),
    *("runs", "runs/corpus", "runs/clean", "runs/.corpus.unfinished", "runs/.clean.replaced"),
    *("runs/clean.run", "runs/.lock", "runs/.corpus.lock"),
    *("out", "Out", "out/clean", "out.run", "out.run/states", "out.run/states/update-0000001"),
    *("out.run/best", "out.run/metrics.jsonl", "out.run/lock", ".out.unfinished", ".out.replaced"),
    *(".out.lock", "link", "data/link", "runs/link"),
)
KINDS = (
    *("file", "folder", "empty", "raw", "corpus", "corpus and a file", "corpus changed"),
    *("corpus with a link", "link", "dangling link", "marked", "state"),
)
HIDDEN = re.compile(r"\..+\.(unfinished|replaced)")
"""Names that belong to the project."""
OPERATIONS = ("import_corpus", "clean", "plan", "new_artifact", "training")


@dataclass
class Layout:
    """A folder with things in it, and what of them must still be there in the end."""

    root: Path
    templates: Path
    ours: dict[Path, bytes] = field(default_factory=dict)
    """Files of artifacts and of marked working folders."""
    kept: dict[Path, bytes | str] = field(default_factory=dict)
    """The user's: a file's content, a link's target."""

    def add(self, name: str, kind: str, target: str) -> None:
        path = self.root / name
        if os.path.lexists(path):
            return
        with contextlib.suppress(OSError):  # below a file, or a link to itself
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make(path, kind, self.root / target)

    def _make(self, path: Path, kind: str, target: Path) -> None:
        match kind:
            case "file":
                path.write_text("thesis")
            case "empty":
                path.mkdir()
            case "folder":
                path.mkdir()
                (path / "thesis.txt").write_text("thesis")
            case "link" | "dangling link":
                path.symlink_to(target if kind == "link" else self.root / "nowhere")
            case "marked":
                path.mkdir()
                (path / MARKER_NAME).touch()
                (path / "half").write_text("half")
            case _:
                template = {"raw": "raw", "state": "state"}.get(kind, "corpus")
                shutil.copytree(self.templates / template, path)
                if kind == "corpus and a file":
                    (path / "train" / "thesis.txt").write_text("thesis")
                if kind == "corpus with a link":
                    (path / "train/de-en/de.txt").unlink()
                    (path / "train/de-en/de.txt").symlink_to(target)
                if kind == "corpus changed":
                    (path / "train/de-en/de.txt").write_text("edited\n")

    def look(self) -> None:
        """Note what is there: files that a manifest lists or a marker covers, and all others."""
        for path in _everything(self.root):
            if any(HIDDEN.fullmatch(part) for part in path.parts):
                continue
            if path.is_symlink():
                self.kept[path] = str(path.readlink())
            elif self._is_ours(path):
                self.ours[path] = path.read_bytes()
            else:
                self.kept[path] = path.read_bytes()

    def _is_ours(self, path: Path) -> bool:
        for folder in path.parents:
            if folder == self.root:
                return False
            if (folder / MARKER_NAME).exists():
                return True
            if (folder / MANIFEST_NAME).exists():
                manifest = read_manifest(folder)
                assert manifest is not None
                return path.relative_to(folder).as_posix() in {*manifest.files, MANIFEST_NAME}
        return False

    def changed(self, replaceable: Sequence[Path], inputs: Sequence[Path]) -> list[str]:
        """What is gone or different though it must not be."""
        free = [Path(os.path.realpath(path)) for path in replaceable]
        read = [Path(os.path.realpath(path)) for path in inputs]
        must_stay = dict(self.kept)
        for path, content in self.ours.items():
            if not _below(path, free) or _below(path, read):
                must_stay[path] = content
        return [
            str(path.relative_to(self.root))
            for path, content in must_stay.items()
            if _content(path) != content
        ]


def _everything(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        yield from (Path(folder) / name for name in names)
        yield from (Path(folder) / name for name in folders if (Path(folder) / name).is_symlink())


def _below(path: Path, folders: Sequence[Path]) -> bool:
    return any(folder in (path, *path.parents) for folder in folders)


def _content(path: Path) -> bytes | str | None:
    if path.is_symlink():
        return str(path.readlink())
    return path.read_bytes() if path.is_file() else None


def working_places(out_dir: Path) -> list[Path]:
    return [out_dir, unfinished_dir(out_dir), replaced_dir(out_dir), run_dir(out_dir)]


def save_state(directory: RunDirectory, update: int) -> None:
    directory.write(
        directory.states_dir / f"update-{update:07d}",
        kind="training_state",
        write=lambda writer: writer.write_json("progress.json", {"update": update}),
    )


def train(out_dir: Path) -> None:
    """All that a training run does to its folder."""
    directory = RunDirectory(out_dir, stage="pretrain", config={}, inputs={}, world=ALONE)
    with directory.locked():
        directory.resume_from()
        for update in (2, 3):
            save_state(directory, update)
            directory.prune(keep_last=1)


def operate(
    operation: str, recipe: Path, *, given_path: Path, out_dir: Path, overwrite: bool
) -> list[Path]:
    """Run real code at random places; returns where it may replace what is ours."""
    flags = ["--overwrite"] if overwrite else []
    match operation:
        case "import_corpus" | "clean":
            option = "--raw" if operation == "import_corpus" else "--corpus"
            options = ["--recipe", str(recipe), option, str(given_path), "--out", str(out_dir)]
            assert cli.main([operation, *options, *flags]) in (0, EXIT_USER_ERROR)
        case "plan":
            plan = load_plan(str(recipe.with_name("plan.toml")))
            with contextlib.suppress(UserError):
                placed = resolve_plan(
                    plan, out_dir=out_dir, given={"text": RawInput((given_path,))}
                )
                run_plan(placed, launcher=in_this_process, say=lambda _: None)
            return [place for name in plan.stages for place in working_places(out_dir / name)]
        case "new_artifact":
            with (
                contextlib.suppress(ArtifactError),
                writing(out_dir, "corpus", overwrite=overwrite) as writer,
            ):
                writer.write_json("made.json", "anew")
        case "training":
            with contextlib.suppress(UserError):
                train(out_dir)
    return working_places(out_dir)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw tree, the corpus made of it, a training state, a recipe and a plan."""
    root = tmp_path_factory.mktemp("templates")
    write(root / "raw", RAW)
    (root / "recipe.toml").write_text(RECIPE)
    (root / "plan.toml").write_text(PLAN.format(recipe=root / "recipe.toml"))
    options = ["--recipe", str(root / "recipe.toml"), "--raw", str(root / "raw")]
    assert cli.main(["import_corpus", *options, "--out", str(root / "corpus")]) == 0
    directory = RunDirectory(root / "model", stage="pretrain", config={}, inputs={}, world=ALONE)
    save_state(directory, 1)
    (directory.states_dir / "update-0000001").rename(root / "state")
    return root


NAMES, KIND = st.sampled_from(PATHS), st.sampled_from(KINDS)


@dataclass(frozen=True)
class Scene:
    """What lies about, and what is done there."""

    operation: str
    given_name: str
    out_name: str
    overwrite: bool
    entries: list[tuple[str, str, str]]
    """Name, kind, and where a link leads."""


def names_near(out_name: str) -> list[str]:
    """Where a stage that is to write there, or a plan that is to write below it, looks."""
    places = [
        place
        for out in (Path(out_name), Path(out_name) / "corpus", Path(out_name) / "clean")
        for place in working_places(out)
    ]
    states = run_dir(Path(out_name)) / "states"
    inner = [states / "update-0000001", states / ".update-0000002.unfinished"]
    inner += [states.parent / name for name in ("best", "metrics.jsonl", "lock")]
    return [str(path) for path in (*places, *inner)]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Half of all entries lie where the operation will look; the input is often there first."""
    operation = draw(st.sampled_from(OPERATIONS))
    out_name = draw(st.sampled_from(["out", "out", "runs/clean", "data"]) | NAMES)
    given_name = draw(st.sampled_from(["data/raw", "data/raw", "Out"]) | NAMES)
    near = st.sampled_from([out_name, out_name, *names_near(out_name)])
    entries = draw(st.lists(st.tuples(near | NAMES, KIND, near | NAMES), min_size=1, max_size=6))
    kind = "corpus" if operation == "clean" else "raw"
    place = draw(st.integers(0, len(entries)) | st.just(0))
    entries.insert(place, (given_name, kind, ""))
    overwrite = draw(st.booleans() | st.just(True))
    return Scene(operation, given_name, out_name, overwrite, entries)


LOOP = [("data/raw", "raw", ""), ("runs", "link", "runs/clean")]
"""A folder of outputs that is a link into itself."""


@pytest.mark.slow
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(scene=scenes())
@example(Scene("new_artifact", "data/raw", "runs/clean", False, LOOP))
@example(Scene("import_corpus", "data/raw", "runs/clean", False, LOOP))
@example(Scene("plan", "data/raw", "runs/clean", True, LOOP))
@example(Scene("training", "data/raw", "runs/clean", False, LOOP))
def test_whatever_lies_where_nothing_of_the_users_is_removed_or_changed(
    tmp_path: Path, templates: Path, scene: Scene
) -> None:
    """Inputs stay too, and so does what other stages made."""
    layout = Layout(Path(tempfile.mkdtemp(dir=tmp_path)), templates)
    for name, kind, target in scene.entries:
        layout.add(name, kind, target)
    layout.look()
    given_path, out_dir = layout.root / scene.given_name, layout.root / scene.out_name
    replaceable = operate(
        scene.operation,
        templates / "recipe.toml",
        given_path=given_path,
        out_dir=out_dir,
        overwrite=scene.overwrite,
    )
    reads = scene.operation in ("import_corpus", "clean", "plan")
    assert not layout.changed(replaceable, [given_path] if reads else [])
    shutil.rmtree(layout.root)


def test_the_random_layouts_include_stages_that_succeed(tmp_path: Path, templates: Path) -> None:
    """Or the property would hold for a program that refuses everything."""
    for number, operation in enumerate(OPERATIONS):
        layout = Layout(tmp_path / str(number), templates)
        layout.root.mkdir()
        layout.add("data/raw", "corpus" if operation == "clean" else "raw", "")
        if operation != "training":
            layout.add("out", "corpus" if operation != "plan" else "empty", "")
        layout.look()
        out_dir = layout.root / "out"
        operate(
            operation,
            templates / "recipe.toml",
            given_path=layout.root / "data/raw",
            out_dir=out_dir,
            overwrite=True,
        )
        made = {
            "plan": out_dir / "clean",
            "training": run_dir(out_dir) / "states/update-0000003",
        }.get(operation, out_dir)
        manifest = read_manifest(made)
        assert manifest is not None
        if operation == "import_corpus":
            assert manifest == read_manifest(templates / "corpus").model_copy(  # type: ignore[union-attr]
                update={"run": manifest.run, "inputs": manifest.inputs}
            )


def tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_plan_whose_folder_holds_its_raw_data_is_refused(
    tmp_path: Path,
    templates: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(templates / "raw", "data/corpus")
    before = tree(tmp_path)
    for verb in ("run", "status"):
        arguments = [verb, "bible24", "--input", "corpus=data/corpus", "--out", "data"]
        assert cli.main(arguments) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert "The plan's folder data holds the input corpus (data/corpus)" in said
        assert said.count("\n") == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("with_artifact", [False, True])
def test_a_folder_with_a_thesis_in_it_is_not_replaced_even_on_demand(
    tmp_path: Path, templates: Path, capsys: pytest.CaptureFixture[str], with_artifact: bool
) -> None:
    precious = tmp_path / "precious"
    if with_artifact:
        shutil.copytree(templates / "corpus", precious)
    precious.mkdir(exist_ok=True)
    (precious / "thesis.txt").write_text("thesis")
    before = tree(precious)
    options = ["--recipe", str(templates / "recipe.toml"), "--corpus", str(templates / "corpus")]
    arguments = ["clean", *options, "--out", str(precious), "--overwrite"]
    assert cli.main(arguments) == EXIT_USER_ERROR
    assert "thesis.txt" in capsys.readouterr().err
    assert tree(precious) == before


@pytest.mark.parametrize(
    ("out", "relation"),
    [
        *(("data/corpus", "is"), ("data/../data/corpus", "is"), ("link/corpus", "is")),
        ("data", "holds"),
        ("data/corpus/train/clean", "lies within"),
        ("link/corpus/not/yet/there", "lies within"),
    ],
)
def test_an_output_that_is_holds_or_lies_within_its_input_is_refused_by_that_name(
    tmp_path: Path, templates: Path, capsys: pytest.CaptureFixture[str], out: str, relation: str
) -> None:
    shutil.copytree(templates / "corpus", tmp_path / "data/corpus")
    (tmp_path / "link").symlink_to("data")
    before = tree(tmp_path)
    options = ["--recipe", str(templates / "recipe.toml"), "--corpus", f"{tmp_path}/data/corpus"]
    assert cli.main(["clean", *options, "--out", str(tmp_path / out), "--overwrite"]) == 2
    assert f"{tmp_path / out} {relation} the input corpus" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", [unfinished_dir, replaced_dir, run_dir])
def test_an_input_that_lies_where_a_stage_would_work_is_refused(
    tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    out_dir = tmp_path / "out"
    for given_path in (place(out_dir), place(out_dir) / "best"):
        with pytest.raises(ConfigError, match="to work in, which"):
            refuse_inputs(out_dir, inputs={"corpus": given_path}, run_folder=True)
    refuse_inputs(out_dir, inputs={"corpus": run_dir(out_dir) / "best"}, run_folder=False)


@pytest.mark.parametrize("name", [".", "..", "a/.."])
def test_an_output_without_a_name_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with (
        pytest.raises(ArtifactError, match="does not end in a name"),
        writing(Path(name), "corpus", overwrite=True),
    ):
        pytest.fail("it was begun")


def test_a_training_does_not_work_in_a_folder_of_the_users(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "model")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("mine")
    with pytest.raises(ArtifactError, match="Name another --out"):
        train(tmp_path / "model")
    assert tree(tmp_path) == {"model.run/metrics.jsonl": b"mine"}


@pytest.mark.parametrize("foreign", ["model", "model.run"])
def test_a_folder_of_the_users_is_not_set_aside(tmp_path: Path, foreign: str) -> None:
    """Nor what is ours beside it: either both are renamed, or none."""
    save_state(RunDirectory(tmp_path / "model", stage="x", config={}, inputs={}, world=ALONE), 1)
    (tmp_path / "model.run" / MARKER_NAME).touch()
    if foreign == "model.run":
        (tmp_path / "model.run").rename(tmp_path / "ours")
    (tmp_path / foreign).mkdir()
    (tmp_path / foreign / "thesis.txt").write_text("thesis")
    before = tree(tmp_path)
    with pytest.raises(ArtifactError, match="Name another --out"):
        set_aside(tmp_path / "model")
    assert tree(tmp_path) == before


def test_a_link_is_never_worked_in(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    run_dir(tmp_path / "model").symlink_to("mine")
    with pytest.raises(ArtifactError, match="Name another --out"):
        claim_run_folder(run_dir(tmp_path / "model"), work="training")
    unfinished_dir(tmp_path / "model").symlink_to("mine")
    make_working(unfinished_dir(tmp_path / "model"))
    (unfinished_dir(tmp_path / "model") / "file").touch()
    unfinished_dir(tmp_path / "other").symlink_to("mine")
    with pytest.raises(ArtifactError, match="is a link"):
        remove_artifact(unfinished_dir(tmp_path / "other"))
    assert not list((tmp_path / "mine").iterdir())


def test_a_state_with_a_file_of_the_users_in_it_is_not_pruned(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "m", stage="pretrain", config={}, inputs={}, world=ALONE)
    with directory.locked():
        save_state(directory, 1)
        notes = directory.states_dir / "update-0000001" / "notes.txt"
        notes.write_text("mine")
        for update in (2, 3):
            save_state(directory, update)
            directory.prune(keep_last=1)
    assert directory.state_names() == ["update-0000001", "update-0000003"]
    assert notes.read_text() == "mine"


def test_hidden_folders_of_the_users_in_a_run_folder_are_no_leftovers(tmp_path: Path) -> None:
    train(tmp_path / "model")
    kept = [
        run_dir(tmp_path / "model") / ".git" / "HEAD",
        run_dir(tmp_path / "model") / "states" / ".mine" / "notes",
        run_dir(tmp_path / "model") / "states" / "mine" / "notes",
    ]
    for path in kept:
        path.parent.mkdir()
        path.write_text("mine")
    train(tmp_path / "model")
    assert [path.read_text() for path in kept] == ["mine"] * 3


@pytest.mark.parametrize("text", ["my notes", "process"])
def test_a_file_of_the_users_is_not_taken_for_a_lock(tmp_path: Path, text: str) -> None:
    path = plan_lock_path(tmp_path)

    def refuse_the_lock() -> None:
        with pytest.raises(ArtifactError, match="another file"), exclusive(path, what="x"):
            pytest.fail("it was taken")

    path.write_text(text)
    refuse_the_lock()
    assert path.read_text() == text
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    refuse_the_lock()
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    path.mkdir()
    (path / "notes").write_text(text)
    refuse_the_lock()
    assert names_in(path) == ["notes"]


PROTECTED = """
import sys
from pathlib import Path
from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.places import remove_working
root, mode = Path(sys.argv[1]), int(sys.argv[2], 8)
out, outside, working = root / "out", root / "outside", root / "working"
settings = dict(kind="corpus", stage="x", config={}, inputs={}, overwrite=True)
for name in ("first", "second", "third"):
    with new_artifact(out, **settings) as writer:
        writer.path(f"deep/er/{name}.txt").touch()
    for folder in (out / "deep/er", out / "deep", out):
        folder.chmod(0o555)
    if name == "first":
        out.rename(root / ".out.replaced")  # as an earlier replacement left it
for folder in (outside, working / "deep"):
    folder.mkdir(parents=True)
    (folder / "kept").touch()
(working / "deep" / "link").symlink_to(outside)
for folder in (outside, working / "deep", working):
    folder.chmod(mode)
remove_working(working)
print(*sorted(path.name for path in root.iterdir()), *(path.name for path in out.glob("deep/er/*")))
print(oct(outside.stat().st_mode))
"""


@pytest.mark.parametrize("mode", ["555", "000"])
def test_a_protected_folder_is_removed_once_it_is_replaced(mode: str, tmp_path: Path) -> None:
    """Links out of a working folder are not followed."""
    command = [sys.executable, "-c", PROTECTED, str(tmp_path), mode]
    if os.geteuid() == 0:  # whom modes do not stop
        if shutil.which("setpriv") is None:
            pytest.skip("root cannot give up its rights without setpriv")
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--inh-caps={rights}", f"--bounding-set={rights}", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert (tmp_path / "outside" / "kept").exists()
    assert done.stdout.split("\n") == ["out outside third.txt", oct(0o40000 | int(mode, 8)), ""]


REPLACING = """
import os, sys
from pathlib import Path
from pipeline.artifacts.artifact import new_artifact
left = int(sys.argv[2])
def counted(name):
    original = getattr(os, name)
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return original(*arguments, **options)
    setattr(os, name, call)
with new_artifact(Path(sys.argv[1]), kind=sys.argv[3], stage="x", config={}, inputs={},
                  overwrite=True) as writer:
    writer.path("deep/new.txt").write_text("new")
    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        counted(name)
"""


def exit_code_of_replacing(out_dir: Path, moment: int, *, kind: str) -> int | None:
    given = [str(out_dir), str(moment), kind]
    with started_code(REPLACING, given, environment=os.environ) as process:
        return process.end()[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corpus", "checkpoint"])
def test_killed_at_any_moment_of_replacing_the_old_or_the_new_is_there_and_nothing_in_the_way(
    tmp_path: Path, kind: Kind
) -> None:
    """A trained model is kept next to what takes its place."""
    trained = kind == "checkpoint"
    outcomes = []
    for moment in range(100):
        out_dir = tmp_path / str(moment) / "out"
        with writing(out_dir, kind, config={"ds_config": {}} if trained else {}) as writer:
            writer.path("old/old.txt").write_text("old")
        code = exit_code_of_replacing(out_dir, moment, kind=kind)
        assert code in (0, 9)
        restore(out_dir)
        found = open_artifact(out_dir, kind=kind)
        found.check()
        outcomes.append(found.names()[0])
        with writing(out_dir, kind, overwrite=True) as writer:
            writer.path("third.txt").touch()
        assert names_in(out_dir.parent) == ["out", *["out.before-1"] * trained]
        assert why_not_ours(out_dir) is None
        if trained:
            kept = open_artifact(out_dir.parent / "out.before-1", kind=kind)
            kept.check()
            assert kept.file("old/old.txt").read_text() == "old"
        if code == 0:
            break
    assert code == 0
    first_new = outcomes.index("deep/new.txt")
    assert first_new >= 4, "killed before, between and after the two renamings"
    assert outcomes == ["old/old.txt"] * first_new + ["deep/new.txt"] * (len(outcomes) - first_new)
    assert len(outcomes) - first_new >= (1 if trained else 4)
