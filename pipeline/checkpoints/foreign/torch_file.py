"""Read files of ``torch.save``, which are pickles, without running any code that they name.

A pickle may construct tensors and plain containers (torch's own list, with ``weights_only``, which
also refuses tar files and scripts), an ``argparse.Namespace``, and a few classes that are not
needed and that an empty class replaces. A file that names anything else is refused before it is
constructed. Archives are mapped, not read: entries that are not used, such as the optimizer's
state, take no memory.
"""

import errno
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.foreign.model_folder import RESTORE
from pipeline.config.settings import one_line, shown
from pipeline.errors import CheckpointError

_SAVE_ANEW = (
    "If you trust it, read it with the software that wrote it and save only its settings and "
    "weights: torch.save({'args': argparse.Namespace(...), 'model': model.state_dict()}, FILE)"
)
_ARCHIVE = b"PK\x03\x04"
_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number at the beginning of files of PyTorch before 1.6."""
_FORBIDDEN = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")
"""Finds the forbidden name in the message of torch 2.11."""


class _Unneeded:
    """Replaces an object that is not needed: accepts any arguments and any state."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_UNNEEDED = (
    *("fairseq.meters.AverageMeter", "fairseq.meters.TimeMeter", "fairseq.meters.StopwatchMeter"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype"),
)
"""Classes in the training state: meters of fairseq before 0.9, and numbers of numpy."""


def read_torch_file(path: Path, *, keep: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the dictionary in a file, or only its entries ``keep``; the others are freed.

    Raises:
        CheckpointError: It is no file of torch.save, holds no dictionary, is damaged, or asks for
            more than data.
    """
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [Namespace]
    allowed += [(_Unneeded, name) for name in _UNNEEDED]
    is_archive = _is_archive(path)
    try:
        with torch.serialization.safe_globals(allowed):
            state = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except Exception as error:  # a broken pickle can raise anything
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden is not None:
            raise CheckpointError(
                f"{path} asks for {shown(forbidden[1])} as it is read, which could run any code. "
                f"{_SAVE_ANEW}."
            ) from error
        # torch's own message may advise to load the file without its protection.
        problem = "" if isinstance(error, pickle.UnpicklingError) else f" ({one_line(error)})"
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save{problem}. Name a checkpoint (.pt), or "
            "restore it from where it was published."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {shown(type(state).__name__)}, not the dictionary of a checkpoint. "
            "Name a checkpoint."
        )
    return state if keep is None else {name: state[name] for name in keep if name in state}


def _is_archive(path: Path) -> bool:
    """Return whether the file is an archive (PyTorch 1.6 and later), which is mapped, or older.

    Mapped values of a compressed entry would be wrong: torch.save never compresses, and such a file
    is refused. So are files of other forms, which torch may read, but with advice to trust them.
    """
    try:
        if path.is_fifo() or path.is_char_device():  # it could wait for somebody to write
            raise OSError(errno.ESPIPE, "it is no ordinary file")
        with path.open("rb") as stream:
            start = stream.read(len(_OLDER))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): name a checkpoint (.pt)."
        ) from error
    if start == _OLDER:
        return False
    if not start.startswith(_ARCHIVE):
        raise CheckpointError(f"{path} is no file of torch.save. Name a checkpoint (.pt).")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({one_line(error)}). {RESTORE}") from error
    compressed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise CheckpointError(
            f"{path} has a compressed entry {shown(compressed[0].filename)!r}, which torch.save "
            f"does not write. {RESTORE}"
        )
    return True


@dataclass(frozen=True)
class StateDict:
    """Tensors by name, from one file of torch.save or from several that belong together."""

    origin: Path
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def checked(cls, origin: Path, found: object) -> "StateDict":
        """Check that ``found`` maps names to ordinary tensors.

        Raises:
            CheckpointError: It is no dictionary of dense tensors that have all of their values.
        """
        if not isinstance(found, dict) or not found:
            raise CheckpointError(f"{origin} has no weights of a model. Name a checkpoint.")
        for name, value in found.items():
            is_named = isinstance(name, str) and name.isprintable()
            if not (is_named and isinstance(value, Tensor) and _is_whole(value)):
                raise CheckpointError(
                    f"{origin}: {shown(name)} is no ordinary tensor with all of its values in the "
                    f"file. {RESTORE}"
                )
        return cls(origin, {name: value.detach() for name, value in found.items()})

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return self.tensors[name]


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor is dense, in memory, and no view that repeats a smaller storage."""
    return (
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )
