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
from typing import Any, TypeAlias

import torch
from pydantic import TypeAdapter

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    new_artifact,
    open_artifact,
    refuse_changed,
    stage_key,
    to_json,
)
from pipeline.artifacts.digests import write_hashed
from pipeline.artifacts.extended_tokenizer import with_languages
from pipeline.artifacts.manifest import FileRecord, InputRecord, json_digest, read_manifest
from pipeline.artifacts.mixture import read_groups
from pipeline.artifacts.places import link_or_copy, refuse_inputs, refuse_to_overwrite, run_dir
from pipeline.artifacts.run_folders import claim_run_folder, remove_files
from pipeline.artifacts.tokenizer import TokenizerFiles, read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.assembly.declaration import FRESH, Assembly, SourceDeclaration
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
from pipeline.checkpoints.assembly.rules import PARTS, Assignment, Blueprint, Part, unused_tensors
from pipeline.checkpoints.assembly.target import recipe_source, target_spec
from pipeline.checkpoints.assembly.vocabulary import RowPlan, plan_rows
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.opening import open_model
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.checkpoints.weights import (
    TensorFolder,
    TensorPlace,
    file_header,
    part_prefix,
    tensor_bytes,
)
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import find_code
from pipeline.terminal import counted, track

Sources: TypeAlias = Mapping[Part, ModelSource | None]
"""The source of each part; None: it starts fresh."""
FILE_BYTES = 256 * 1024 * 1024
IDENTITY_FILE = "assembly.json"
"""File of the run directory that identifies the assembly."""


@dataclass(frozen=True)
class Parts:
    """A planned assembly: the blueprint, its sources, and the tokenizer of the result."""

    blueprint: Blueprint
    sources: Sources
    tokenizer: TokenizerFiles

    @property
    def names(self) -> dict[Part, str]:
        """Return the name of each part's source, to print."""
        return {
            part: source.origin.name if source is not None else "–"
            for part, source in self.sources.items()
        }

    def identity(self) -> dict[str, Any]:
        """Return JSON of everything that the bytes of the result depend on."""
        blueprint = self.blueprint
        return {
            "spec": blueprint.spec.model_dump(mode="json"),
            "config": blueprint.config.model_dump(mode="json"),
            "precision": blueprint.precision,
            "rows": blueprint.rows and blueprint.rows.sources,
            "plan": [[entry.target, entry.source, entry.rule] for entry in blueprint.plan],
            "sources": {
                part: source and source.record.digest for part, source in self.sources.items()
            },
        }


def tensors_of(sources: Sources) -> dict[Part, Tensors | None]:
    """Return the weights of each part's source."""
    return {
        part: source.tensors if source is not None else None for part, source in sources.items()
    }


def plan_lines(parts: Parts) -> list[str]:
    """Return a summary of a plan to print before it is carried out."""
    blueprint = parts.blueprint
    lines = [headline(blueprint, parts.names), "", summary_table(blueprint, parts.names)]
    lines += unused_lines(unused_tensors(blueprint.plan, blueprint.sources))
    return lines + (blueprint.rows.lines() if blueprint.rows is not None else [])


@dataclass(frozen=True)
class WeightFile:
    """One file of the result."""

    number: int
    entries: tuple[Assignment, ...]

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return f"{part_prefix(0)}{self.number:03d}.safetensors"

    @property
    def receipt_name(self) -> str:
        """Return the name of the JSON file beside it."""
        return f"{part_prefix(0)}{self.number:03d}.json"


@dataclass(frozen=True)
class Written:
    """The written weights.

    Attributes:
        receipt: Entries of all tensors, in the model's order.
        records: Records of the files that are on disk already.
    """

    receipt: list[ReceiptEntry]
    records: dict[Path, FileRecord]


@dataclass(frozen=True)
class Finished:
    """The contents of the JSON file beside a finished file of the run directory."""

    file: FileRecord
    tensors: list[ReceiptEntry]


_FINISHED = TypeAdapter(Finished)
_WORKING = (
    f"{part_prefix(0)}[0-9]*.safetensors",
    f"{part_prefix(0)}[0-9]*.json",
    f".{part_prefix(0)}[0-9]*.unfinished",
)
"""Files that an assembly writes into its run directory, finished or not."""


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
    blueprint = parts.blueprint
    weights_dir = writer.directory / "weights"
    written = write_assembly(
        blueprint,
        weights_dir,
        work_dir=work_dir,
        identity=parts.identity(),
        processes=processes,
    )
    receipt = written.receipt
    writer.settled |= written.records
    write_spec(writer, blueprint.spec)
    parts.tokenizer.write(tokenizer_directory(writer))
    found = divergence(
        blueprint.spec, TensorFolder.of_written(weights_dir), parts.tokenizer.build(), parts.sources
    )
    unused = unused_tensors(blueprint.plan, blueprint.sources)
    writer.write_json(RECEIPT_FILE, _document(receipt, unused, found))
    writer.statistics["tensors"] = len(receipt)
    if found is not None:
        writer.statistics["function_check"] = asdict(found)
    remove_finished(work_dir)
    return _summary(parts, receipt, unused, found)


def _document(
    receipt: Sequence[ReceiptEntry], unused: Mapping[str, list[str]], found: Divergence | None
) -> dict[str, Any]:
    return {
        "tensors": [asdict(entry) for entry in receipt],
        "unused": {source: names for source, names in unused.items() if names},
        "function_check": found and asdict(found),
    }


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


def weight_files(blueprint: Blueprint, *, file_bytes: int = FILE_BYTES) -> list[WeightFile]:
    """Return the tensors in the model's order, divided into files of about ``file_bytes``."""
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
        blueprint: The assembly.
        directory: The directory of the result's weights.
        work_dir: The output's run directory, for finished files (:func:`remove_finished`).
        identity: JSON that identifies the assembly; finished files of another one are removed.
        processes: Number of files that are written at a time.
        file_bytes: Size of a file, about.
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
    """Remove the finished files of an assembly, which are part of the result."""
    remove_files(work_dir, [*_WORKING, IDENTITY_FILE])


def _finished(file: WeightFile, work_dir: Path) -> Finished | None:
    """Return the record of a complete file; None if it is incomplete or cannot be read."""
    try:
        found = _FINISHED.validate_json((work_dir / file.receipt_name).read_bytes())
        size = (work_dir / file.name).stat().st_size
    except (OSError, ValueError):
        return None
    return found if size == found.file.size else None


def _claim(work_dir: Path, digest: str) -> None:
    """Make the run directory, or continue the one of the same assembly."""
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
    pool = ThreadPoolExecutor(processes, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        futures = [pool.submit(write_file, blueprint, file, work_dir) for file in files]
        for future in track(as_completed(futures), label="files", total=len(futures)):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_file(blueprint: Blueprint, file: WeightFile, work_dir: Path) -> None:
    """Write one file and, once it is on disk, the receipt of its tensors."""
    blueprint = copy.copy(blueprint)  # which remembers the last source of its thread alone
    receipt: list[ReceiptEntry] = []
    unfinished = unfinished_path(work_dir / file.name)
    record = write_hashed(unfinished, _pieces(blueprint, file, receipt))
    unfinished.replace(work_dir / file.name)
    document = unfinished_path(work_dir / file.receipt_name)
    finished = Finished(record, receipt)
    document.write_bytes(_FINISHED.dump_json(finished))
    document.replace(work_dir / file.receipt_name)


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


def plan_declared(assembly: Assembly) -> Parts:
    """Open everything that a declaration names and plan the assembly; write nothing.

    Raises:
        UserError: Something named cannot be used, or does not fit.
    """
    opened = {name: _open(source) for name, source in assembly.sources.items()}
    sources: Sources = {part: opened.get(getattr(assembly.parts, part)) for part in PARTS}
    tokenizer = _tokenizer(assembly, sources)
    groups = _groups(assembly)
    return Parts(
        Blueprint(
            spec=target_spec(
                sources,
                assembly,
                tokenizer=tokenizer.build(),
                groups=read_groups(groups) if groups is not None else None,
            ),
            sources=tensors_of(sources),
            config=assembly.upcycling,
            rows=_rows(assembly, sources["embeddings"], tokenizer),
            precision=assembly.precision,
        ),
        sources,
        tokenizer,
    )


def make_declared(
    assembly: Assembly, *, out_dir: Path, processes: int = 1, overwrite: bool = False
) -> list[str]:
    """Make the checkpoint of a declaration; return a summary.

    Raises:
        UserError: Something named cannot be used or does not fit, or a source is a recipe.
    """
    for name, source in assembly.sources.items():
        if source.recipe:
            raise ConfigError(
                f"The source {name!r} is the recipe {source.recipe!r}, which has no weights. Name "
                "a checkpoint, or pass --dry-run."
            )
    paths = {name: Path(source.path) for name, source in assembly.sources.items()}
    beside = {"groups": assembly.groups, "tokenizer": assembly.tokenizer}
    paths |= {name: Path(path) for name, path in beside.items() if path}
    refuse_inputs(out_dir, inputs=paths, run_folder=True)
    parts = plan_declared(assembly)
    config = {"assembly": assembly.model_dump(mode="json", exclude_defaults=True)}
    inputs = records(assembly, parts.sources)
    if not overwrite and _is_made(out_dir, config, inputs):
        return [f"already done, {out_dir} is up to date."]
    refuse_to_overwrite(out_dir, overwrite=overwrite, kind="checkpoint")
    print("\n".join(plan_lines(parts)))
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="upcycle",
        config=config,
        inputs=inputs,
        overwrite=overwrite,
    ) as writer:
        summary = make_assembly(parts, writer, work_dir=run_dir(out_dir), processes=processes)
        writer.summary += summary
    return summary


def _is_made(
    out_dir: Path, config: Mapping[str, object], inputs: Mapping[str, InputRecord]
) -> bool:
    """Return whether ``out_dir`` already holds the unchanged result."""
    manifest = read_manifest(out_dir) if out_dir.is_dir() else None
    digests = {name: record.digest for name, record in inputs.items()}
    key = stage_key(stage="upcycle", kind="checkpoint", config=config, inputs=digests)
    if manifest is None or manifest.key != key:
        return False
    refuse_changed(out_dir)
    return True


def records(assembly: Assembly, sources: Sources) -> dict[str, InputRecord]:
    """Return the records of all inputs for a manifest."""
    found = {str(part): source.record for part, source in sources.items() if source is not None}
    groups = _groups(assembly)
    if groups is not None:
        found["groups"] = groups.as_input
    if assembly.tokenizer:
        found["tokenizer"] = _vocabulary(Path(assembly.tokenizer)).as_input
    return found


def _open(source: SourceDeclaration) -> ModelSource:
    return recipe_source(source) if source.recipe else open_model(Path(source.path))


def _groups(assembly: Assembly) -> Artifact | None:
    return open_artifact(Path(assembly.groups), kind="groups") if assembly.groups else None


def _tokenizer(assembly: Assembly, sources: Sources) -> TokenizerFiles:
    """Return the named tokenizer, or else that of the embeddings with the new languages."""
    if assembly.tokenizer:
        files = read_tokenizer_files(tokenizer_folder(_vocabulary(Path(assembly.tokenizer))))
    elif sources["embeddings"] is not None:
        files = sources["embeddings"].tokenizer
    else:
        raise ConfigError(
            "The embeddings start fresh, but no vocabulary is named. Name the folder of a "
            "tokenizer as `tokenizer`."
        )
    languages = files.build().languages
    added = [code for code in assembly.languages if code not in languages]
    if added and assembly.tokenizer:
        raise ConfigError(
            f"The named tokenizer has no language {added[0]!r}. Train it on a corpus with that "
            "language, or leave it out of [languages]."
        )
    return with_languages(files, added) if added else files


def _vocabulary(path: Path) -> Artifact:
    """Open an artifact that contains a tokenizer: a tokenizer, a checkpoint or shards."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind not in ("tokenizer", "checkpoint", "shards"):
        raise ArtifactError(
            f"{path} contains no tokenizer. Name a tokenizer artifact, or a checkpoint that has "
            "one."
        )
    return open_artifact(path, kind=manifest.kind)


def _rows(
    assembly: Assembly, embeddings: ModelSource | None, tokenizer: TokenizerFiles
) -> RowPlan | None:
    """Return the plan of the embedding rows; None if the vocabulary stays or starts fresh."""
    if embeddings is None:
        return None
    old, new = embeddings.tokenizer.build(), tokenizer.build()
    resembling = {code: like for code, like in assembly.languages.items() if like != FRESH}
    for code in assembly.languages:
        known = find_code(code, old.languages)
        if known is not None:
            raise ConfigError(
                f"The model of {embeddings.origin} already knows the language {code!r}, as "
                f"{known!r}. Leave it out of [languages]."
            )
    if old.fingerprint == new.fingerprint:
        return None
    return plan_rows(old, new, resembling=resembling)
