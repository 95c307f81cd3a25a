"""The power fails on a file system that keeps nothing that was not forced to disk, or some of it.

In the model, a file keeps the content that it had when it was last forced to disk, and each folder,
independently of the others, keeps the names of that time or has the present names already. So a
renaming can be kept before what it renames, and a removal before a renaming that came first.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.state_changes import seeing

from pipeline.artifacts.artifact import ArtifactWriter, new_artifact, open_artifact
from pipeline.artifacts.manifest import MARKER_NAME
from pipeline.artifacts.places import restore
from pipeline.checkpoints.resharding import Piece, write_pieces
from pipeline.distributed.world import LOOPBACK, World
from pipeline.training.run_directory import RunDirectory

Names = dict[str, int]
"""Name in a folder → number of its file or folder, which no other gets while it is open."""


class Disk:
    """What a loss of power may leave of a folder; ``leave_out`` is an fsync that is not done."""

    def __init__(self, root: Path, *, leave_out: int | None = None) -> None:
        self.root, self.syncs, self._leave_out = root, 0, leave_out
        self._folders: dict[int, Names] = {}
        """Number of a folder → its names on disk."""
        self._files: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        self.states: set[tuple[tuple[str, bytes | None], ...]] = set()
        """States that were possible at any moment: paths with contents, None for folders."""
        for folder in [root, *root.rglob("*")]:
            self._force(folder)

    def see(self, name: str, path: str, _half: object) -> None:
        """Note what a loss of power right before a call would leave."""
        self._note()
        if name == "fsync":
            if self.syncs != self._leave_out:
                self._force(Path(path))
            self.syncs += 1

    def _force(self, path: Path) -> None:
        number = self._number(path)
        if path.is_dir():
            self._folders[number] = self._names(path)
        else:
            self._files[number] = path.read_bytes()

    def _number(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number

    def _names(self, folder: Path) -> Names:
        return {path.name: self._number(path) for path in folder.iterdir()}

    def _note(self) -> None:
        folders = [self.root, *(path for path in self.root.rglob("*") if path.is_dir())]
        present = {self._number(folder): self._names(folder) for folder in folders}
        kept = {number: self._folders.setdefault(number, {}) for number in present}
        changing = [number for number in present if present[number] != kept[number]]
        for chosen in itertools.product((False, True), repeat=len(changing)):
            have_changed = set(itertools.compress(changing, chosen))
            names = self._folders | {number: present[number] for number in have_changed}
            self.states.add(tuple(self._below("", self._number(self.root), names)))

    def _below(
        self, prefix: str, number: int, names: dict[int, Names]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, child in sorted(names[number].items()):
            if child in names:
                yield f"{prefix}{name}", None
                yield from self._below(f"{prefix}{name}/", child, names)
            else:
                yield f"{prefix}{name}", self._files.get(child, b"")

    def close(self) -> None:
        self._note()
        for descriptor in self._open.values():
            os.close(descriptor)


@contextmanager
def power(root: Path, *, leave_out: int | None = None) -> Iterator[Disk]:
    disk = Disk(root, leave_out=leave_out)
    with seeing(root, disk.see):
        yield disk
    disk.close()


def losses(disk: Disk, root: Path, is_whole: Callable[[], bool]) -> list[str]:
    """Return the names in those states of a disk in which something is lost."""
    found = []
    for state in sorted(disk.states, key=str):
        shutil.rmtree(root)
        root.mkdir()
        for name, content in state:
            if content is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(content)
        if not is_whole():
            found.append(" ".join(name for name, _ in state))
    return found


def write(out_dir: Path, text: str) -> None:
    with new_artifact(
        out_dir, kind="corpus", stage="x", config={}, inputs={}, overwrite=True
    ) as writer:
        writer.path("deep/deeper/text.txt").write_text(text)
        writer.path("text.txt").write_text(text)


def run_directory(out_dir: Path) -> RunDirectory:
    world = World(0, 1, 0, 1, LOOPBACK, 0)
    return RunDirectory(out_dir, stage="pretrain", config={}, inputs={}, world=world)


def save(out_dir: Path, update: int) -> None:
    directory, values = run_directory(out_dir), torch.full((2,), float(update))

    def write_state(writer: ArtifactWriter) -> None:
        pieces = iter([Piece("master", "weight", 0, values)])
        writer.settled |= write_pieces(writer.directory / "optimizer", pieces, part=0)
        writer.write_json("progress.json", {"update": update})

    directory.write(directory.state_dir(update), kind="training_state", write=write_state)
    directory.prune(keep_last=1)


def finish(out_dir: Path) -> None:
    """Publish what a run has made, and remove its directory, as the end of training does."""
    directory = run_directory(out_dir)
    with directory.locked():
        directory.announce_removal(key="key")
        write(out_dir, "made")
        directory.remove()


def has_artifact(out_dir: Path) -> bool:
    restore(out_dir)
    return _is_sound(out_dir, "corpus")


def has_state(out_dir: Path) -> bool:
    states = out_dir.parent / f"{out_dir.name}.run" / "states"
    return any(_is_sound(path, "training_state") for path in states.glob("update-*"))


def _is_sound(path: Path, kind: str) -> bool:
    try:
        open_artifact(path, kind=kind).check()  # type: ignore[arg-type]
    except Exception:
        return False
    return True


Act = Callable[[Path], object]
CASES: dict[str, tuple[Act, Act, Callable[[Path], bool]]] = {
    "an artifact": (lambda out: write(out, "old"), lambda out: write(out, "new"), has_artifact),
    "a state": (lambda out: save(out, 1), lambda out: save(out, 2), has_state),
    "the end": (lambda out: save(out, 1), finish, lambda out: has_state(out) or has_artifact(out)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_power_at_any_moment_leaves_the_old_or_the_new_and_each_fsync_is_needed(
    tmp_path: Path, case: str
) -> None:
    before, act, is_there = CASES[case]

    def lost(leave_out: int | None) -> tuple[list[str], int]:
        root = tmp_path / str(leave_out)
        (root / "out.run" / "states").mkdir(parents=True)
        (root / "out.run" / MARKER_NAME).touch()
        before(root / "out")
        with power(root, leave_out=leave_out) as disk:
            act(root / "out")
        assert len(disk.states) > 10
        return losses(disk, root, lambda: is_there(root / "out")), disk.syncs

    found, syncs = lost(None)
    assert not found, "\n".join(found[:20])
    assert syncs >= 4
    for number in range(syncs):
        assert lost(number)[0], f"fsync {number} is not needed"
