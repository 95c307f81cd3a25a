"""An assembly made: its weights, its receipt, and what it computes beside its sources.

A declared assembly: everything named is opened and planned, then the checkpoint is made.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    new_artifact,
    open_artifact,
    refuse_changed,
    stage_key,
)
from pipeline.artifacts.manifest import InputRecord, read_manifest
from pipeline.artifacts.mixture import read_groups
from pipeline.artifacts.places import refuse_inputs, refuse_to_overwrite, run_dir
from pipeline.artifacts.tokenizer import TokenizerFiles, read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.assembly.declaration import FRESH, Assembly, SourceDeclaration
from pipeline.checkpoints.assembly.receipt import (
    RECEIPT_FILE,
    Divergence,
    ReceiptEntry,
    divergence,
    headline,
    summary_table,
    unused_lines,
)
from pipeline.checkpoints.assembly.rules import PARTS, Part, unused_tensors
from pipeline.checkpoints.assembly.target import recipe_source, target_spec
from pipeline.checkpoints.assembly.values import Blueprint
from pipeline.checkpoints.assembly.vocabulary import RowPlan, plan_rows, with_languages
from pipeline.checkpoints.assembly.writing import remove_finished, write_assembly
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.opening import open_model
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.checkpoints.weights import TensorFolder
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import find_code
from pipeline.terminal import counted

Sources: TypeAlias = Mapping[Part, ModelSource | None]
"""Where each part comes from; None: it starts fresh."""


@dataclass(frozen=True)
class Parts:
    """An assembly that can be made: the plan, its sources, and the tokenizer of the result."""

    blueprint: Blueprint
    sources: Sources
    tokenizer: TokenizerFiles

    @property
    def names(self) -> dict[Part, str]:
        """What people call the source of each part."""
        return {
            part: source.origin.name if source is not None else "–"
            for part, source in self.sources.items()
        }

    def identity(self) -> dict[str, Any]:
        """All that decides the bytes of the result, JSON."""
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
    """The weights of each part's source."""
    return {
        part: source.tensors if source is not None else None for part, source in sources.items()
    }


def plan_lines(parts: Parts) -> list[str]:
    """What a person wants to see of a plan before it is carried out."""
    blueprint = parts.blueprint
    lines = [headline(blueprint, parts.names), "", summary_table(blueprint, parts.names)]
    lines += unused_lines(unused_tensors(blueprint.plan, blueprint.sources))
    return lines + (blueprint.rows.lines() if blueprint.rows is not None else [])


def make_assembly(
    parts: Parts, writer: ArtifactWriter, *, work_dir: Path, processes: int
) -> list[str]:
    """Write weights, shape, tokenizer and receipt of an artifact; returns what to say of it.

    Args:
        work_dir: the output's run folder, where finished files wait for the rest.
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
        blueprint.spec, TensorFolder(weights_dir), parts.tokenizer.build(), parts.sources
    )
    unused = unused_tensors(blueprint.plan, blueprint.sources)
    writer.write_json(RECEIPT_FILE, _document(receipt, unused, found))
    writer.statistics["tensors"] = len(receipt)
    if found is not None:
        writer.statistics["function_check"] = found.to_json()
    remove_finished(work_dir)
    return _summary(parts, receipt, unused, found)


def _document(
    receipt: Sequence[ReceiptEntry], unused: Mapping[str, list[str]], found: Divergence | None
) -> dict[str, Any]:
    return {
        "tensors": [entry.to_json() for entry in receipt],
        "unused": {source: names for source, names in unused.items() if names},
        "function_check": found and found.to_json(),
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


def plan_declared(assembly: Assembly) -> Parts:
    """Open what a declaration names and plan it whole; nothing is written.

    Raises:
        UserError: something named cannot be used, or does not fit.
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
    """Make the checkpoint that a declaration describes; returns what to say of it.

    Raises:
        UserError: something named cannot be used or does not fit, or is but a recipe's shape.
    """
    for name, source in assembly.sources.items():
        if source.recipe:
            raise ConfigError(
                f"The source {name!r} is the shape of recipe {source.recipe!r}, of which nothing "
                "can be made: name a checkpoint, or pass --dry-run."
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
    """Whether what would be made lies there already, as it was made."""
    manifest = read_manifest(out_dir) if out_dir.is_dir() else None
    digests = {name: record.digest for name, record in inputs.items()}
    key = stage_key(stage="upcycle", kind="checkpoint", config=config, inputs=digests)
    if manifest is None or manifest.key != key:
        return False
    refuse_changed(out_dir)
    return True


def records(assembly: Assembly, sources: Sources) -> dict[str, InputRecord]:
    """What a manifest says of everything that is read."""
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
    """The tokenizer of the result: as named, else the embeddings' own, with new languages."""
    if assembly.tokenizer:
        files = read_tokenizer_files(tokenizer_folder(_vocabulary(Path(assembly.tokenizer))))
    elif sources["embeddings"] is not None:
        files = sources["embeddings"].tokenizer
    else:
        raise ConfigError(
            "The embeddings are to start fresh, and no vocabulary is named: name the folder of a "
            "tokenizer as `tokenizer`."
        )
    languages = files.build().languages
    added = [code for code in assembly.languages if code not in languages]
    if added and assembly.tokenizer:
        raise ConfigError(
            f"The tokenizer that is named has no language {added[0]!r}: train it on a corpus with "
            "that language, or leave it out of [languages]."
        )
    return with_languages(files, added) if added else files


def _vocabulary(path: Path) -> Artifact:
    """An artifact that carries a tokenizer: of that kind, or a checkpoint or shards."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind not in ("tokenizer", "checkpoint", "shards"):
        raise ArtifactError(
            f"{path} carries no tokenizer: name a tokenizer artifact, or a checkpoint that has one."
        )
    return open_artifact(path, kind=manifest.kind)


def _rows(
    assembly: Assembly, embeddings: ModelSource | None, tokenizer: TokenizerFiles
) -> RowPlan | None:
    """Where the rows of the vocabulary come from, where it is not the source's."""
    if embeddings is None:
        return None
    old, new = embeddings.tokenizer.build(), tokenizer.build()
    resembling = {code: like for code, like in assembly.languages.items() if like != FRESH}
    for code in assembly.languages:
        known = find_code(code, old.languages)
        if known is not None:
            raise ConfigError(
                f"The model of {embeddings.origin} knows the language {code!r} already, as "
                f"{known!r}: leave it out of [languages]."
            )
    if old.fingerprint == new.fingerprint:
        return None
    return plan_rows(old, new, resembling=resembling)
