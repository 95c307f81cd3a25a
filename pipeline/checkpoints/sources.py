"""Where a model's weights come from: a checkpoint of ours, or one of other software.

Whatever it is, it has our names, is looked at without reading values, and gives one tensor at a
time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pipeline.artifacts.manifest import InputRecord
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.model.spec import ModelSpec


class Tensors(Protocol):
    """Weights under our names, read one at a time."""

    @property
    def origin(self) -> Path:
        """What people know them by: the folder or file they are in."""

    def names(self) -> list[str]:
        """All names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one; no values are read."""

    def read(self, name: str) -> Tensor:
        """One tensor of finite floating-point numbers, as stored.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be used.
        """


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: shape, tokenizer, weights, and what a manifest says of it."""

    spec: ModelSpec
    tokenizer: TokenizerFiles
    tensors: Tensors
    record: InputRecord

    @property
    def origin(self) -> Path:
        return self.tensors.origin
