"""An assembly made: its weights, its receipt, and what it computes beside its sources."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.assembly.function_check import Divergence, divergence
from pipeline.checkpoints.assembly.plan import Part, unused_tensors
from pipeline.checkpoints.assembly.receipt import (
    RECEIPT_FILE,
    ReceiptEntry,
    headline,
    summary_table,
    unused_lines,
)
from pipeline.checkpoints.assembly.values import Blueprint
from pipeline.checkpoints.assembly.writing import remove_finished, write_assembly
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.checkpoints.tensor_file import TensorFolder
from pipeline.summary import counted

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
