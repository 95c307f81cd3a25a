"""Make an assembly: write its weights file by file, its receipt, and its function check.

Tensors are divided into files of bounded size. The division does not depend on how many files are
written at a time, so that the bytes are always the same. Threads write them: drawing, masking,
hashing and writing release the interpreter, and another process would first load torch. Finished
files stay in the output's run directory until all are finished: an interrupted assembly resumes
after its last file.

:func:`make_declared` opens and plans everything that a declaration names and makes the checkpoint.
"""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from pipeline.artifacts.artifact import ArtifactWriter, new_artifact, refuse_changed, stage_key
from pipeline.artifacts.manifest import FileRecord, json_digest, read_manifest, write_hashed
from pipeline.artifacts.places import link_or_copy, refuse_inputs, refuse_to_overwrite, run_dir
from pipeline.artifacts.run_folders import claim_run_folder, remove_files
from pipeline.checkpoints.assembly.declaration import Assembly, Parts, plan_declared
from pipeline.checkpoints.assembly.receipt import (
    RECEIPT_FILE,
    Divergence,
    ReceiptEntry,
    divergence,
    headline,
    seed_of,
    summary_table,
    unused_lines,
)
from pipeline.checkpoints.assembly.rules import Assignment, Blueprint, unused_tensors
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.weights import (
    TensorFolder,
    TensorPlace,
    file_header,
    part_prefix,
    tensor_bytes,
)
from pipeline.config.documents import unfinished_path
from pipeline.terminal import counted, track

FILE_BYTES = 256 * 1024 * 1024
"""Size of a file of the result, about."""
_WORKING = (
    f"{part_prefix(0)}[0-9]*.safetensors",
    f"{part_prefix(0)}[0-9]*.json",
    f".{part_prefix(0)}[0-9]*.unfinished",
)
"""Files that an assembly writes into its run directory, finished or not."""


@dataclass(frozen=True)
class Finished:
    """The contents of the JSON file beside a finished file of the run directory."""

    assembly: str
    """Digest of everything that the bytes depend on."""
    file: FileRecord
    tensors: list[ReceiptEntry]


_FINISHED = TypeAdapter(Finished)


@dataclass(frozen=True)
class WeightFile:
    """One file of the result, in the run directory until the result is complete."""

    number: int
    entries: tuple[Assignment, ...]
    work_dir: Path
    assembly: str
    """Digest of everything that the bytes depend on."""

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.work_dir / f"{part_prefix(0)}{self.number:03d}.safetensors"

    def finished(self) -> Finished | None:
        """Return the record of the complete file; None if it is incomplete or of another one."""
        try:
            found = _FINISHED.validate_json(self.path.with_suffix(".json").read_bytes())
            is_whole = self.path.stat().st_size == found.file.size
        except (OSError, ValueError):
            return None
        return found if is_whole and found.assembly == self.assembly else None


def plan_lines(parts: Parts) -> list[str]:
    """Return a summary of a plan to print before it is carried out."""
    blueprint = parts.blueprint
    lines = [headline(blueprint, parts.names), "", summary_table(blueprint, parts.names)]
    lines += unused_lines(unused_tensors(blueprint.plan, blueprint.sources))
    return lines + (blueprint.rows.lines() if blueprint.rows is not None else [])


def make_assembly(
    parts: Parts, writer: ArtifactWriter, *, work_dir: Path, processes: int
) -> list[str]:
    """Write weights, shape, tokenizer and receipt of an artifact; return a summary.

    Args:
        parts: The planned assembly.
        writer: The writer of the artifact.
        work_dir: The output's run directory, which keeps finished files.
        processes: Number of files that are written at a time.
    """
    blueprint, weights_dir = parts.blueprint, writer.directory / "weights"
    files = weight_files(parts, work_dir)
    claim_run_folder(work_dir, work="assembly")
    _write_files(blueprint, [f for f in files if f.finished() is None], processes=processes)
    weights_dir.mkdir(parents=True, exist_ok=True)
    receipt: list[ReceiptEntry] = []
    for file in files:
        finished = file.finished()
        assert finished is not None
        receipt += finished.tensors
        target = weights_dir / file.path.name
        if link_or_copy(file.path, target):
            writer.settled[target] = finished.file
    write_spec(writer, blueprint.spec)
    parts.tokenizer.write(tokenizer_directory(writer))
    found = divergence(
        blueprint.spec, TensorFolder.of_written(weights_dir), parts.tokenizer.build(), parts.sources
    )
    unused = unused_tensors(blueprint.plan, blueprint.sources)
    document = {
        "tensors": [asdict(entry) for entry in receipt],
        "unused": {source: names for source, names in unused.items() if names},
        "function_check": found and asdict(found),
    }
    writer.write_json(RECEIPT_FILE, document)
    writer.statistics["tensors"] = len(receipt)
    if found is not None:
        writer.statistics["function_check"] = asdict(found)
    remove_files(work_dir, _WORKING)
    return _summary(parts, receipt, unused, found)


def _summary(
    parts: Parts,
    receipt: Sequence[ReceiptEntry],
    unused: Mapping[str, list[str]],
    found: Divergence | None,
) -> list[str]:
    rules = Counter(entry.rule for entry in receipt)
    counts = ", ".join(f"{count:,} {rule}" for rule, count in sorted(rules.items()))
    lines = [f"{counted(len(receipt), 'tensor')}: {counts}; each one's source in {RECEIPT_FILE}"]
    lines += unused_lines(unused)
    if parts.blueprint.rows is not None:
        lines += parts.blueprint.rows.lines()
    if found is not None:
        lines.append(str(found))
    return lines


def weight_files(parts: Parts, work_dir: Path) -> list[WeightFile]:
    """Return the tensors in the model's order, divided into files of about ``FILE_BYTES``."""
    digest = json_digest({"identity": parts.identity(), "file_bytes": FILE_BYTES})
    groups: list[list[Assignment]] = []
    size = 0
    for entry in parts.blueprint.plan:
        nbytes = _place(parts.blueprint, entry).nbytes
        if not groups or size + nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += nbytes
    return [WeightFile(n, tuple(group), work_dir, digest) for n, group in enumerate(groups)]


def _write_files(blueprint: Blueprint, files: Sequence[WeightFile], *, processes: int) -> None:
    threads = max((os.cpu_count() or 1) // processes, 1)
    if min(processes, len(files)) <= 1:
        for file in track(files, label="files", total=len(files)):
            write_file(blueprint, file)
        return
    pool = ThreadPoolExecutor(processes, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        futures = [pool.submit(write_file, blueprint, file) for file in files]
        for future in track(as_completed(futures), label="files", total=len(futures)):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_file(blueprint: Blueprint, file: WeightFile) -> None:
    """Write one file and, once it is on disk, the receipt of its tensors."""
    blueprint = copy.copy(blueprint)  # which remembers the last source of its thread alone
    receipt: list[ReceiptEntry] = []
    unfinished = unfinished_path(file.path)
    record = write_hashed(unfinished, _pieces(blueprint, file, receipt))
    unfinished.replace(file.path)
    document = file.path.with_suffix(".json")
    finished = Finished(file.assembly, record, receipt)
    unfinished_path(document).write_bytes(_FINISHED.dump_json(finished))
    unfinished_path(document).replace(document)


def _pieces(
    blueprint: Blueprint, file: WeightFile, receipt: list[ReceiptEntry]
) -> Iterator[memoryview]:
    """Yield the bytes of a file; a tensor is computed when its bytes are asked for."""
    yield memoryview(file_header([_place(blueprint, entry) for entry in file.entries]))
    for entry in file.entries:
        value, norm = blueprint.value_and_norm(entry)
        content = tensor_bytes(value)
        receipt.append(_receipt_entry(blueprint, entry, norm, content))
        yield content


def _receipt_entry(
    blueprint: Blueprint, entry: Assignment, norm: float, content: memoryview
) -> ReceiptEntry:
    return ReceiptEntry(
        target=entry.target,
        part=entry.part,
        source=entry.source,
        rule=entry.rule,
        seed=seed_of(entry, blueprint),
        norm=norm,
        digest=hashlib.sha256(content).hexdigest(),
    )


def _place(blueprint: Blueprint, entry: Assignment) -> TensorPlace:
    return TensorPlace(entry.target, blueprint.dtype, blueprint.shape(entry))


def make_declared(
    assembly: Assembly, *, out_dir: Path, processes: int = 1, overwrite: bool = False
) -> list[str]:
    """Make the checkpoint of a declaration; return a summary.

    Raises:
        UserError: Something named cannot be used or does not fit.
    """
    named = {**assembly.sources, "groups": assembly.groups, "tokenizer": assembly.tokenizer}
    paths = {name: Path(path) for name, path in named.items() if path}
    refuse_inputs(out_dir, inputs=paths, run_folder=True)
    parts = plan_declared(assembly)
    config = {"assembly": assembly.model_dump(mode="json", exclude_defaults=True)}
    manifest = read_manifest(out_dir) if out_dir.is_dir() and not overwrite else None
    digests = {name: record.digest for name, record in parts.inputs.items()}
    key = stage_key(stage="upcycle", kind="checkpoint", config=config, inputs=digests)
    if manifest is not None and manifest.key == key:
        refuse_changed(out_dir)
        return [f"already done, {out_dir} is up to date."]
    refuse_to_overwrite(out_dir, overwrite=overwrite, kind="checkpoint")
    print("\n".join(plan_lines(parts)))
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="upcycle",
        config=config,
        inputs=parts.inputs,
        overwrite=overwrite,
    ) as writer:
        summary = make_assembly(parts, writer, work_dir=run_dir(out_dir), processes=processes)
        writer.summary += summary
    return summary
