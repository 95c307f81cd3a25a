"""Files of ``torch.save``, which are pickles: read without running anything that they ask for.

What a pickle may construct is listed here: tensors and plain containers (torch's own list, with
``weights_only``), the settings of a command line, and some classes of which nothing is needed and
for which an empty one stands. A file that asks for anything else is refused before it gets it.
Archives are mapped, not read: what is not looked at, such as an optimizer's state, takes no memory.
"""

import pickle
import re
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from pipeline.config.settings import one_line, shown
from pipeline.errors import CheckpointError

RESTORE = "restore it from where it was published"
_SAVE_ANEW = (
    "where you trust it, read it with the software that wrote it and save its settings and weights "
    "alone: torch.save({'args': argparse.Namespace(...), 'model': model.state_dict()}, FILE)"
)
_ARCHIVE = b"PK\x03\x04"
_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The number that files of PyTorch before 1.6 begin with, pickled."""
_FORBIDDEN = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")
"""How torch 2.11 names what a pickle must not have."""


class _Unneeded:
    """Stands for an object that nobody looks at: takes whatever it is given, does nothing."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_UNNEEDED = (
    *("fairseq.meters.AverageMeter", "fairseq.meters.TimeMeter", "fairseq.meters.StopwatchMeter"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype"),
)
"""Of the training's state: fairseq before 0.9 pickled its meters, others have numbers of numpy."""


def read_torch_file(path: Path, *, keep: Sequence[str]) -> dict[str, Any]:
    """Some entries of the dictionary that a file holds; the memory of the others is given back.

    Raises:
        CheckpointError: it is none of torch's, holds no dictionary, is damaged, or asks for more
            than data.
    """
    is_archive = _check_container(path)
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [Namespace]
    allowed += [(_Unneeded, name) for name in _UNNEEDED]
    try:
        with torch.serialization.safe_globals(allowed):
            state = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except pickle.UnpicklingError as error:
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden is None:
            raise _damaged(path, error) from error
        raise CheckpointError(
            f"{path} asks for {shown(forbidden[1])} as it is read, which could run any code, and "
            f"is not read: {_SAVE_ANEW}."
        ) from error
    except Exception as error:  # a broken pickle can raise anything
        raise _damaged(path, error) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds {shown(type(state).__name__)} where the dictionary of a checkpoint is "
            "wanted: name a checkpoint."
        )
    return {name: state[name] for name in keep if name in state}


def _check_container(path: Path) -> bool:
    """Whether it is an archive (PyTorch 1.6 and later) or one of the older files.

    What torch would unpack by other means is refused: tar files, compressed archives, and names
    that lead out of an archive.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_OLDER))
        is_archive = start.startswith(_ARCHIVE)
        if not is_archive and (start != _OLDER or tarfile.is_tarfile(path)):
            raise CheckpointError(f"{path} is no file of torch.save: name a checkpoint (.pt).")
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
            odd = [entry.filename for entry in entries if _is_odd(entry)]
            if odd:
                raise CheckpointError(
                    f"{path} has an entry {shown(odd[0])!r}, which torch.save does not write "
                    f"(compressed, or outside of the archive's folder): {RESTORE}."
                )
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): name a checkpoint (.pt)."
        ) from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise _damaged(path, error) from error
    return is_archive


def _is_odd(entry: zipfile.ZipInfo) -> bool:
    name = entry.orig_filename
    outside = name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts
    return outside or entry.compress_type != zipfile.ZIP_STORED


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a file of torch.save ({one_line(error)}): {RESTORE}."
    )


@dataclass(frozen=True)
class StateDict:
    """Tensors by their names in a file of torch's, or in several that belong together."""

    origin: Path
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def checked(cls, origin: Path, found: object) -> "StateDict":
        """What a file has for its model.

        Raises:
            CheckpointError: it is no dictionary of ordinary tensors, all of whose values are there.
        """
        if not isinstance(found, dict) or not found:
            raise CheckpointError(f"{origin} has no weights of a model: name a checkpoint.")
        for name, value in found.items():
            is_named = isinstance(name, str) and name.isprintable()
            if not (is_named and isinstance(value, Tensor) and _is_whole(value)):
                raise CheckpointError(
                    f"{origin}: {shown(name)} is no ordinary tensor whose values are all in the "
                    f"file: {RESTORE}."
                )
        return cls(origin, {name: value.detach() for name, value in found.items()})

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def _is_whole(value: Tensor) -> bool:
    """Dense, in memory, and no small piece of storage that is shown many times."""
    return (
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )
