"""Read files of other software without running any code that they name.

:class:`ModelFolder` reads a folder as Hugging Face's ``save_pretrained`` writes it: JSON files and
safetensors. Nothing is unpickled: a folder that has only pickled weights is refused. The functions
behind it refuse a configuration that a model of ours cannot have, and name the setting.

:func:`read_torch_file` reads a file of ``torch.save``, which is a pickle. It may construct tensors
and plain containers (torch's own list, with ``weights_only``, which also refuses tar files and
scripts), an ``argparse.Namespace``, and a few classes that are not needed and that an empty class
replaces. A file that names anything else is refused before it is constructed. Archives are mapped,
not read: entries that are not used, for example the optimizer's state, take no memory.
"""

import errno
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from pipeline.checkpoints.weights import TensorFolder
from pipeline.config.documents import parse_json, read_bytes, refuse_pointer
from pipeline.config.settings import describe_validation, one_line, shown
from pipeline.errors import CheckpointError
from pipeline.model.settings import ModelConfig

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
"""Settings of an adapter, for example LoRA, as peft writes them."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
RESTORE = "Restore it from where it was published."
_RESTORE_CLAUSE = "restore it from where it was published"
"""The same as the end of a sentence, for ``pipeline.config.documents``."""

_MAX_BYTES = 2**28
"""SentencePiece models have a few MB, NLLB's tokenizer.json 17."""


class Described(BaseModel):
    """The fields that are read from a JSON file; its other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


AnyDescribed = TypeVar("AnyDescribed", bound=Described)


def refuse_adapter(directory: Path) -> None:
    """Raise CheckpointError if a folder has an adapter, which transformers adds to its model."""
    if (directory / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{directory} has an adapter ({ADAPTER_FILE}), which is not read. Merge it into its "
            "model, and save the result and its tokenizer in another folder (peft: "
            "model.merge_and_unload().save_pretrained(DIR))."
        )


class ModelFolder:
    """A folder with ``config.json`` and weights in one or several safetensors files.

    Raises:
        CheckpointError: A file is missing, cannot be read, or is named outside of the folder.
    """

    def __init__(self, directory: Path) -> None:
        self.origin = directory

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the folder."""
        document = parse_json(
            self.read_bytes(name),
            what=str(self.origin / name),
            error=CheckpointError,
            fix=_RESTORE_CLAUSE,
        )
        if not isinstance(document, dict):
            raise CheckpointError(f"{self.origin / name} holds no JSON object. {RESTORE}")
        return document

    def described(self, kind: type[AnyDescribed], name: str = CONFIG_FILE) -> AnyDescribed:
        """Return the fields of ``kind`` in a JSON file of the folder."""
        return described(kind, self.read_object(name), self.origin / name)

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return (self.origin / name).is_file()

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a small file."""
        return read_bytes(
            self.origin / name, limit=_MAX_BYTES, error=CheckpointError, fix=_RESTORE_CLAUSE
        )

    @cached_property
    def tensors(self) -> TensorFolder:
        """Return the tensors of all weight files."""
        return TensorFolder(self.origin, self.weight_files(), fix=RESTORE)

    def weight_files(self) -> list[Path]:
        """Return the paths of the weight files, in order; an index may be left of older weights."""
        if self.has(INDEX_FILE) and not self.has(WEIGHTS_FILE):
            names = set(self.described(_Index, INDEX_FILE).weight_map.values())
            odd = [name for name in names if Path(name).name != name or "\0" in name]
            if odd:
                raise CheckpointError(
                    f"{self.origin / INDEX_FILE} names {shown(odd[0])}, which is no file of the "
                    f"folder. {RESTORE}"
                )
            return [self.origin / name for name in sorted(names)]
        if not self.has(WEIGHTS_FILE) and any(map(self.has, PICKLED)):
            raise CheckpointError(
                f"{self.origin} has only pickled weights, which can run code as they are read. If "
                "you trust them, add safetensors to the folder (transformers: "
                f"model.save_pretrained({str(self.origin)!r}))."
            )
        shards = sorted(self.origin.glob("model-*-of-*.safetensors"))
        if not self.has(WEIGHTS_FILE) and shards:
            raise CheckpointError(
                f"{self.origin} has {shards[0].name}, but no {INDEX_FILE}, which lists all files "
                f"of the weights. {RESTORE}"
            )
        return [self.origin / WEIGHTS_FILE]


class _Index(Described):
    """``model.safetensors.index.json``."""

    weight_map: dict[str, str]
    """Name of a tensor → name of its file."""


def described(kind: type[AnyDescribed], values: Mapping[str, object], origin: Path) -> AnyDescribed:
    """Return the fields of ``kind``; raise CheckpointError for the first that is invalid."""
    try:
        return kind.model_validate(values, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        found = "no such setting" if first["type"] == "missing" else shown(first["input"])
        raise CheckpointError(
            f"{origin} has {where} = {found} ({first['msg']}), which is not supported. Name "
            "another checkpoint, or restore this one if it was changed."
        ) from error


def described_model(settings: Mapping[str, object], origin: Path) -> ModelConfig:
    """Return the model with settings; raise CheckpointError if there is no such model."""
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise CheckpointError(
            f"{origin} describes no valid model: {describe_validation(error, ModelConfig)}"
        ) from error


def refuse_other(origin: Path, **settings: tuple[object, object]) -> None:
    """Raise CheckpointError if a setting, given as (found, supported value), is not supported."""
    for name, (found, supported) in settings.items():
        if found != supported:
            raise CheckpointError(
                f"{origin} has {name} = {found!r}; only {supported!r} is supported. Name another "
                "checkpoint."
            )


def refuse_unequal(origin: Path, **settings: tuple[object, object]) -> None:
    """Raise CheckpointError if encoder and decoder, in this order, differ in a setting."""
    for name, (encoder, decoder) in settings.items():
        if encoder != decoder:
            raise CheckpointError(
                f"{origin} has encoder_{name} = {encoder!r} and decoder_{name} = {decoder!r}; only "
                "equal values are supported. Name another checkpoint."
            )


def refuse_quantized(origin: Path, settings: Mapping[str, object] | None) -> None:
    """Raise CheckpointError if the checkpoint is quantized."""
    if settings is not None:
        method = settings.get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{origin} is quantized (quantization_config: {method}), so its tensors are not plain "
            "weights. Name the checkpoint that it was made from."
        )


FAIRSEQ_FORM = "{'args': argparse.Namespace(...), 'model': model.state_dict()}"
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


def read_torch_file(
    path: Path, *, keep: Sequence[str] | None = None, form: str = FAIRSEQ_FORM
) -> dict[str, Any]:
    """Return the dictionary in a file, or only its entries ``keep``; the others are freed.

    Raises:
        CheckpointError: It is no file of torch.save, holds no dictionary, is damaged, or asks for
            more than data; ``form`` says what to save instead.
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
                "If you trust it, read it with the software that wrote it and save only its "
                f"settings and weights: torch.save({form}, FILE)."
            ) from error
        # torch's own message may advise to load the file without its protection.
        problem = "" if isinstance(error, pickle.UnpicklingError) else f" ({one_line(error)})"
        raise _no_torch_file(path, problem) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {shown(type(state).__name__)}, not the dictionary of a checkpoint. "
            "Name a checkpoint."
        )
    return state if keep is None else {name: state[name] for name in keep if name in state}


def _no_torch_file(path: Path, problem: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a file of torch.save{problem}. Name a checkpoint (.pt), or "
        "restore it from where it was published."
    )


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
        raise _no_torch_file(path, f" ({error.strerror})") from error
    if start == _OLDER:
        return False
    if not start.startswith(_ARCHIVE):
        refuse_pointer(path, error=CheckpointError)
        raise _no_torch_file(path)
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
