"""Folders as Hugging Face's ``from_pretrained`` reads them: configuration and safetensors.

Weights are written in files of bounded size, at most one of which is in memory.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipeline.artifacts.manifest import to_json
from pipeline.checkpoints.foreign.layouts import Layout
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from pipeline.checkpoints.foreign.name_table import NameTable
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.weights import SHARD_BYTES
from pipeline.errors import CheckpointError
from pipeline.terminal import track

GENERATION_FILE = "generation_config.json"
EMBEDDING = "embedding.weight"
_SYSTEM_ERROR = re.compile(r"(?:os error|code:) (\d+)")
"""How safetensors writes the number of an error of the operating system into its message."""
LONGEST_OUTPUT = 200
"""Tokens of a translation, unless told otherwise; as M2M-100 comes."""


def write_configs(directory: Path, config: dict[str, Any], layout: Layout) -> None:
    """``config.json`` and ``generation_config.json``."""
    (directory / CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    longest = min(LONGEST_OUTPUT, config["max_position_embeddings"])
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = {name: config[name] for name in ids} | {"max_length": longest, "num_beams": 5}
    if layout.absent:
        # Rows of zeros have logits of their own: they are left out, also of the normalisation.
        generation |= {"suppress_tokens": layout.absent, "renormalize_logits": True}
    (directory / GENERATION_FILE).write_text(to_json(generation), encoding="utf-8")


def foreign_tensors(
    source: ModelSource, table: NameTable, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """All tensors by their names there, read one at a time.

    Raises:
        CheckpointError: the family has no tensor for one of ours; before any is read.
    """
    names = {name: table.to_theirs(name) for name in tensor_shapes(source.spec)}
    lacking = [name for name, theirs in names.items() if theirs is None]
    if lacking:
        raise CheckpointError(
            f"{source.origin} has the tensor {lacking[0]}, for which the format has no name: "
            "export it to another one."
        )
    for name, theirs in track(names.items(), label="export"):
        assert theirs is not None
        value = source.tensors.read(name)
        yield theirs, layout.rearranged(value) if name == EMBEDDING else value


def write_tensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write ``model.safetensors``, or several files and their index where they are large."""
    files: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        if pending and size + value.nbytes > SHARD_BYTES:
            files.append(_flush(directory, pending, number=len(files)))
            pending, size = {}, 0
        pending[name] = value.contiguous()
        size += value.nbytes
    files.append(_flush(directory, pending, number=len(files)))
    _name_files(directory, files)


def _flush(directory: Path, tensors: dict[str, Tensor], *, number: int) -> dict[str, int]:
    """Write a file under a passing name; returns the bytes of its tensors."""
    path = _passing(directory, number)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    return {name: value.nbytes for name, value in tensors.items()}


def _name_files(directory: Path, files: list[dict[str, int]]) -> None:
    """Their names say how many there are, which is known when all are written."""
    if len(files) == 1:
        _passing(directory, 0).rename(directory / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _passing(directory, number).rename(directory / name)
        weight_map |= dict.fromkeys(sizes, name)
    total = sum(sum(sizes.values()) for sizes in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(to_json(index), encoding="utf-8")


def _passing(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.safetensors"
