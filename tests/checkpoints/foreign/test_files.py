"""What a file of torch.save holds is read, and nothing that it asks for is run."""

import io
import os
import pickle
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoints.foreign.files import StateDict, read_torch_file
from pipeline.errors import CheckpointError

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.float16)}


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "older"])
def test_weights_and_settings_are_read(is_archive: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    args = Namespace(encoder_layers=3, langs=["de", "en"])
    torch.save(
        {"args": args, "model": WEIGHTS, "extra_state": {}},
        path,
        _use_new_zipfile_serialization=is_archive,
    )
    state = read_torch_file(path, keep=["args", "model"])
    assert state["args"] == args
    assert set(state) == {"args", "model"}
    weights = StateDict.checked(path, state["model"])
    assert weights.names() == ["a", "b"]
    for name, value in WEIGHTS.items():
        assert weights.shape(name) == tuple(value.shape)
        assert torch.equal(weights.read(name), value)


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "older"])
@pytest.mark.parametrize("place", ["optimizer", "args"])
def test_a_malicious_pickle_runs_nothing(place: str, is_archive: bool, tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = tmp_path / "model.pt"
    state = {"args": Namespace(), "model": WEIGHTS, place: Payload(target)}
    torch.save(state, path, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(CheckpointError, match=r"mkdir.*could run any code") as caught:
        read_torch_file(path, keep=["args", "model"])
    assert "\n" not in str(caught.value)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists(), "the payload works where it is run"


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_a_bare_pickle_is_refused_unread(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"model": Payload(target)}, protocol=protocol))
    with pytest.raises(
        CheckpointError, match=r"model\.pt cannot be read as a file of torch\.save\."
    ) as caught:
        read_torch_file(path, keep=["args", "model"])
    assert "weights_only" not in str(caught.value)
    assert not target.exists()


def test_state_of_training_that_nobody_needs_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": WEIGHTS, "extra_state": {"best": np.float64(3.5)}}, path)
    assert torch.equal(read_torch_file(path, keep=["model"])["model"]["a"], WEIGHTS["a"])


def truncated(is_archive: bool) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        torch.save({"model": WEIGHTS}, path, _use_new_zipfile_serialization=is_archive)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return damage


def text(path: Path) -> None:
    path.write_text("encoder.layers.0.fc1.weight 0.1 0.2\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def tar_file(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("../pickle")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"abcd"))


def tar_file_that_begins_as_an_older_file(path: Path) -> None:
    torch.save({"model": WEIGHTS}, path, _use_new_zipfile_serialization=False)
    start = path.read_bytes()[:15]
    header = bytearray(tarfile.TarInfo("n").tobuf(tarfile.USTAR_FORMAT))
    header[: len(start)] = start
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path.write_bytes(bytes(header) + bytes(1024))
    assert tarfile.is_tarfile(path)


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


def a_list(path: Path) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(truncated(True), id="truncated archive"),
        pytest.param(truncated(False), id="truncated older file"),
        *(os.mkfifo, lambda path: path.symlink_to("/dev/full")),
        *(text, empty, tar_file, tar_file_that_begins_as_an_older_file, script, other_zip, a_list),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_is_no_checkpoint_is_refused(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    write(path)
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path, keep=["args", "model"])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_torch_file(tmp_path / "missing.pt", keep=["model"])


@pytest.mark.parametrize(
    "found",
    [
        *(None, {}, {"a": [1.0]}, {1: torch.ones(2)}, {"a\nb": torch.ones(2)}),
        {"a": torch.ones(1).expand(10**6, 10**6)},
        *({"a": torch.eye(3).to_sparse()}, {"a": torch.ones(2, device="meta")}),
    ],
    ids="none, empty, list, number for name, lines, expanded, sparse, no values".split(", "),
)
def test_weights_are_ordinary_tensors_with_all_values(found: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        StateDict.checked(tmp_path, found)


def test_what_is_not_looked_at_takes_no_memory(tmp_path: Path) -> None:
    """Weights of an archive lie in the file, not in storage of their own."""
    path = tmp_path / "model.pt"
    torch.save({"model": WEIGHTS, "last_optimizer_state": torch.ones(1000)}, path)
    maps = Path("/proc/self/maps")
    assert str(path) not in maps.read_text()
    state = read_torch_file(path, keep=["args", "model"])
    assert str(path) in maps.read_text()
    assert torch.equal(state["model"]["a"], WEIGHTS["a"])
