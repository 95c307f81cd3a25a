"""Folders as Hugging Face's ``from_pretrained`` reads them: configuration and safetensors.

Weights are written in files of bounded size, at most one of which is in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.artifacts.hashed_files import HashedFiles
from pipeline.artifacts.manifest import FileRecord, to_json
from pipeline.checkpoints.foreign.layouts import Layout
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from pipeline.checkpoints.foreign.name_table import NameTable
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.tensor_file import file_pieces
from pipeline.checkpoints.weights import files_of
from pipeline.errors import CheckpointError
from pipeline.terminal import track

GENERATION_FILE = "generation_config.json"
EMBEDDING = "embedding.weight"
METADATA = {"format": "pt"}
"""As ``save_pretrained`` writes it, so that transformers knows whose tensors these are."""
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


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[Path, FileRecord]:
    """Write ``model.safetensors``, or several files and their index where they are large.

    Returns what an artifact says of the files, which are on disk.
    """
    sizes: list[dict[str, int]] = []
    with HashedFiles() as files:
        for number, held in enumerate(files_of(tensors)):
            files.write(_passing(directory, number), file_pieces(held, metadata=METADATA))
            sizes.append({name: value.nbytes for name, value in held.items()})
    names = _names(len(sizes))
    if len(names) > 1:
        _write_index(directory, dict(zip(names, sizes, strict=True)))
    records = {}
    for number, name in enumerate(names):
        records[_passing(directory, number).rename(directory / name)] = files.records[
            _passing(directory, number)
        ]
    return records


def _names(count: int) -> list[str]:
    """Names of files that say how many there are."""
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index(directory: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    weight_map = {tensor: name for name, tensors in sizes.items() for tensor in tensors}
    total = sum(sum(tensors.values()) for tensors in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(to_json(index), encoding="utf-8")


def _passing(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.safetensors"
