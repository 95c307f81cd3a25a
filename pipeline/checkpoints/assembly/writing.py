"""Writing an assembly: tensor by tensor into files of bounded size, over processes, in any order.

Which tensors share a file does not depend on the processes, so that the files are the same bytes
for any number of them. What is finished stays in the output's run folder: an interrupted assembly
goes on behind its last file.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from pipeline.artifacts.artifact import to_json
from pipeline.artifacts.digests import HashedFiles
from pipeline.artifacts.manifest import FileRecord, json_digest
from pipeline.artifacts.places import link_or_copy
from pipeline.artifacts.run_folders import claim_run_folder, remove_files
from pipeline.checkpoints.assembly.receipt import ReceiptEntry, seed_of
from pipeline.checkpoints.assembly.rules import Assignment
from pipeline.checkpoints.assembly.values import Blueprint
from pipeline.checkpoints.weights import TensorPlace, file_header, part_prefix, tensor_bytes
from pipeline.config.documents import unfinished_path
from pipeline.distributed.workers import WorkerPool
from pipeline.terminal import track

FILE_BYTES = 256 * 1024 * 1024
IDENTITY_FILE = "assembly.json"
"""What the run folder's files are of."""


@dataclass(frozen=True)
class WeightFile:
    """One file of the result."""

    number: int
    entries: tuple[Assignment, ...]

    @property
    def name(self) -> str:
        return f"{part_prefix(0)}{self.number:03d}.safetensors"

    @property
    def receipt_name(self) -> str:
        return f"{part_prefix(0)}{self.number:03d}.json"


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        receipt: of every tensor, in the model's order.
        records: digests of the files that are on disk already.
    """

    receipt: list[ReceiptEntry]
    records: dict[Path, FileRecord]


@dataclass(frozen=True)
class Finished:
    """What stands beside a finished file of the run folder."""

    file: FileRecord
    tensors: list[ReceiptEntry]


_FINISHED = TypeAdapter(Finished)
_WORKING = (
    f"{part_prefix(0)}[0-9]*.safetensors",
    f"{part_prefix(0)}[0-9]*.json",
    f".{part_prefix(0)}[0-9]*.unfinished",
)
"""What an assembly writes into its run folder, finished or not."""


def weight_files(blueprint: Blueprint, *, file_bytes: int = FILE_BYTES) -> list[WeightFile]:
    """The tensors in the model's order, cut into files of about that size."""
    files: list[WeightFile] = []
    pending: list[Assignment] = []
    size = 0
    for entry in blueprint.plan:
        nbytes = _place(blueprint, entry).nbytes
        if pending and size + nbytes > file_bytes:
            files.append(WeightFile(len(files), tuple(pending)))
            pending, size = [], 0
        pending.append(entry)
        size += nbytes
    return [*files, WeightFile(len(files), tuple(pending))] if pending else files


def write_assembly(
    blueprint: Blueprint,
    directory: Path,
    *,
    work_dir: Path,
    identity: Mapping[str, Any],
    processes: int = 1,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Write all tensors into ``directory``.

    Args:
        work_dir: the output's run folder, for what is finished (:func:`remove_finished`).
        identity: what the assembly is made of, JSON; finished files of another one are removed.
    """
    files = weight_files(blueprint, file_bytes=file_bytes)
    digest = json_digest({"identity": dict(identity), "file_bytes": file_bytes})
    _claim(work_dir, digest)
    missing = [file for file in files if _finished(file, work_dir) is None]
    _run(blueprint, missing, work_dir, processes=processes)
    directory.mkdir(parents=True, exist_ok=True)
    written = Written([], {})
    for file in files:
        finished = _finished(file, work_dir)
        assert finished is not None
        written.receipt.extend(finished.tensors)
        if link_or_copy(work_dir / file.name, directory / file.name):
            written.records[directory / file.name] = finished.file
    return written


def remove_finished(work_dir: Path) -> None:
    """Remove what an assembly kept; all of it is part of the result."""
    remove_files(work_dir, [*_WORKING, IDENTITY_FILE])


def _finished(file: WeightFile, work_dir: Path) -> Finished | None:
    """What is known of a file that is complete; None where it is not, or nothing can be told."""
    try:
        found = _FINISHED.validate_json((work_dir / file.receipt_name).read_bytes())
        size = (work_dir / file.name).stat().st_size
    except (OSError, ValueError):
        return None
    return found if size == found.file.size else None


def _claim(work_dir: Path, digest: str) -> None:
    """Make the run folder, or take over the one of the same assembly."""
    claim_run_folder(work_dir, work="assembly")
    identity = work_dir / IDENTITY_FILE
    content = to_json({"digest": digest})
    if not identity.exists() or identity.read_text(encoding="utf-8") != content:
        for pattern in _WORKING:
            for path in work_dir.glob(pattern):
                path.unlink()
        identity.write_text(content, encoding="utf-8")


def _run(
    blueprint: Blueprint, files: Sequence[WeightFile], work_dir: Path, *, processes: int
) -> None:
    processes = min(processes, len(files))
    if processes <= 1:
        for file in track(files, label="files", total=len(files)):
            write_file(blueprint, file, work_dir)
        return
    threads = max((os.cpu_count() or 1) // processes, 1)
    with WorkerPool(processes, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        futures = [pool.submit(write_file, blueprint, file, work_dir) for file in files]
        for future in track(as_completed(futures), label="files", total=len(futures)):
            future.result()


def write_file(blueprint: Blueprint, file: WeightFile, work_dir: Path) -> None:
    """Write one file and, once it is on disk, what its tensors are."""
    receipt: list[ReceiptEntry] = []
    unfinished = unfinished_path(work_dir / file.name)
    with HashedFiles() as files:
        files.write(unfinished, _pieces(blueprint, file, receipt))
    unfinished.replace(work_dir / file.name)
    document = unfinished_path(work_dir / file.receipt_name)
    finished = Finished(files.records[unfinished], receipt)
    document.write_bytes(_FINISHED.dump_json(finished))
    document.replace(work_dir / file.receipt_name)


def _pieces(
    blueprint: Blueprint, file: WeightFile, receipt: list[ReceiptEntry]
) -> Iterator[memoryview]:
    """The bytes of a file, whose tensors are made as they are asked for."""
    yield memoryview(file_header([_place(blueprint, entry) for entry in file.entries]))
    for entry in file.entries:
        value = blueprint.value(entry)
        content = tensor_bytes(value)
        receipt.append(_receipt_entry(blueprint, entry, value, content))
        yield content


def _receipt_entry(
    blueprint: Blueprint, entry: Assignment, value: Tensor, content: memoryview
) -> ReceiptEntry:
    difference = blueprint.difference(entry, value)
    if difference is None and entry.rule not in ("copied", "group router of token router"):
        difference = value  # there is nothing that it could be compared with
    return ReceiptEntry(
        target=entry.target,
        part=entry.part,
        source=entry.source,
        rule=entry.rule,
        seed=seed_of(entry, blueprint),
        norm=0.0 if difference is None else _norm(difference),
        digest=hashlib.sha256(content).hexdigest(),
    )


def _norm(difference: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference, dtype=torch.float32))


def _place(blueprint: Blueprint, entry: Assignment) -> TensorPlace:
    return TensorPlace(entry.target, blueprint.dtype, blueprint.shape(entry))
