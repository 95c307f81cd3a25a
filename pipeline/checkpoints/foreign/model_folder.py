"""Read folders as Hugging Face's ``save_pretrained`` writes them: JSON files and safetensors.

Nothing is executed or unpickled: a folder that has only pickled weights is refused. The functions
at the end refuse a configuration that a model of ours cannot have, and name the setting.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.checkpoints.weights import TensorFolder
from pipeline.config.documents import parse_json, read_bytes
from pipeline.config.settings import describe_validation, shown
from pipeline.errors import CheckpointError
from pipeline.model.settings import ModelConfig

CONFIG_FILE = "config.json"
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
                "you trust them, save them as safetensors (transformers: "
                "model.save_pretrained(DIR))."
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
