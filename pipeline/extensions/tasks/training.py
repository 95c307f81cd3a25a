"""Labelling as a task of the training loop: what a run reads, finds and writes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.manifest import Kind
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.data import LabelledData
from pipeline.extensions.tasks.files import Found, Split, with_split
from pipeline.extensions.tasks.task_model import TaskSpec, describe_task
from pipeline.extensions.tasks.xlmr import Pieces
from pipeline.model.spec import ModelSpec
from pipeline.terminal import counted


@dataclass(frozen=True)
class LabellingSummary:
    """Label-mean losses, in nats; the kept weights have the lowest perplexity."""

    loss: float
    perplexity: float
    languages: Mapping[str, float]


@dataclass(frozen=True)
class Labelling:
    """Training of a tagger or a reader."""

    data: LabelledData
    spec: TaskSpec
    pieces: Pieces
    makes: Kind = "task_model"
    notes: tuple[str, ...] = ()

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> LabellingSummary:
        """Overall, over labels, and by language."""
        loss = sum(nats for nats, _ in losses.values()) / sum(n for _, n in losses.values())
        return LabellingSummary(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            languages={way.source: nats / count for way, (nats, count) in losses.items()},
        )

    def kept_by(self, found: LabellingSummary) -> float:
        """The perplexity."""
        return found.perplexity

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Shape, settings and pieces."""
        assert spec == self.spec.encoder
        describe_task(writer, self.spec, self.pieces)

    def trained_on(self) -> str:
        """Examples and languages."""
        counts = self.data.train.num_examples
        what = "sentences, long ones in parts," if self.spec.head == "tagger" else "windows"
        return f"{sum(counts.values()):,} {what} of {counted(len(counts), 'language')}"


def trained_languages(files: Found, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The languages to train on, sorted: those asked for, or all that have training text.

    Raises:
        ConfigError: one has no training text, or none has.
    """
    there = with_split(files, "train")
    missing = [code for code in wanted if code not in there]
    if missing or not there:
        raise ConfigError(
            f"The data has no training file for {', '.join(missing) or 'any language'}: it has "
            f"some for {', '.join(there) or 'none'}; change tasks.languages, or add the file."
        )
    return tuple(sorted(wanted or there))


def chosen_files(files: Found, languages: tuple[str, ...], split: Split) -> Found:
    """Of the languages that have the split, their files."""
    return {code: files[code] for code in languages if split in files[code]}
