"""Folders as Hugging Face's ``save_pretrained`` writes them: JSON files beside safetensors.

Nothing is executed or unpickled: a folder whose weights are pickled alone is refused.

Folders as Hugging Face's ``from_pretrained`` reads them: configuration and safetensors.

Weights are written in files of bounded size, at most one of which is in memory.

``config.json`` of M2M-100 and NLLB-MoE for models of ours, and which of those it cannot be.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from torch import Tensor

from pipeline.checkpoints.weights import UNREADABLE
from pipeline.config.documents import parse_json, read_bytes
from pipeline.config.settings import one_line, shown
from pipeline.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
RESTORE = "restore it from where it was published"

_MAX_BYTES = 2**28
"""SentencePiece models have a few MB, NLLB's tokenizer.json 17."""


class Described(BaseModel):
    """What we read of a file that says more than that."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


AnyDescribed = TypeVar("AnyDescribed", bound=Described)


class ModelFolder:
    """``config.json`` and weights in safetensors, in one file or several.

    Raises:
        CheckpointError: a file is missing, cannot be read, or is named outside of the folder.
    """

    def __init__(self, directory: Path) -> None:
        self.origin = directory
        self._file_of: dict[str, Path] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def read_object(self, name: str) -> dict[str, Any]:
        """One of its JSON files, which holds an object."""
        document = parse_json(
            self.read_bytes(name),
            what=str(self.origin / name),
            error=CheckpointError,
            fix=RESTORE,
        )
        if not isinstance(document, dict):
            raise CheckpointError(f"{self.origin / name} holds no JSON object: {RESTORE}.")
        return document

    def described(self, kind: type[AnyDescribed], name: str = CONFIG_FILE) -> AnyDescribed:
        """What a JSON file says, as far as ``kind`` asks for it."""
        try:
            return kind.model_validate(self.read_object(name), strict=False)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{self.origin / name} says {where} = {shown(first['input'])} "
                f"({first['msg']}): {RESTORE}."
            ) from error

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.origin / name).is_file()

    def read_bytes(self, name: str) -> bytes:
        """A whole small file."""
        return read_bytes(self.origin / name, limit=_MAX_BYTES, error=CheckpointError, fix=RESTORE)

    # ------------------------------------------------------------ weights

    def names(self) -> list[str]:
        return sorted(self._files())

    def shape(self, name: str) -> tuple[int, ...]:
        self._files()
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from its file."""
        path = self._files()[name]
        try:
            with safe_open(path, framework="pt") as stream:
                tensor: Tensor = stream.get_tensor(name)
        except UNREADABLE as error:
            raise CheckpointError(
                f"{path}: tensor {name} cannot be read ({one_line(error)}): {RESTORE}."
            ) from error
        return tensor

    def weight_files(self) -> list[Path]:
        """Its files of weights, in order."""
        if self.has(INDEX_FILE):
            names = set(self.described(_Index, INDEX_FILE).weight_map.values())
            odd = [name for name in names if Path(name).name != name]
            if odd:
                raise CheckpointError(
                    f"{self.origin / INDEX_FILE} names {shown(odd[0])}, which is no file of the "
                    f"folder: {RESTORE}."
                )
            return [self.origin / name for name in sorted(names)]
        if not self.has(WEIGHTS_FILE) and any(map(self.has, PICKLED)):
            raise CheckpointError(
                f"{self.origin} has its weights in pickled files alone, which can run code as they "
                "are read: save it as safetensors where you trust it (transformers: "
                "model.save_pretrained(DIR))."
            )
        return [self.origin / WEIGHTS_FILE]

    def _files(self) -> dict[str, Path]:
        if self._file_of is None:
            self._file_of = {}
            for path in self.weight_files():
                self._read_header(path, self._file_of)
        return self._file_of

    def _read_header(self, path: Path, file_of: dict[str, Path]) -> None:
        try:
            with safe_open(path, framework="pt") as stream:
                for name in sorted(stream.keys()):
                    self._shapes[name] = tuple(stream.get_slice(name).get_shape())
                    file_of[name] = path
        except UNREADABLE as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({one_line(error)}): {RESTORE}."
            ) from error


class _Index(Described):
    """``model.safetensors.index.json``."""

    weight_map: dict[str, str]
    """Tensor → file."""
