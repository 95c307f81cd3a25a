"""Artifacts that tests write by hand: corpora and translations of a few lines."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, Kind, new_artifact, open_artifact
from pipeline.artifacts.corpus import (
    Direction,
    Hypothesis,
    Split,
    hypotheses_name,
    text_name,
    write_hypotheses,
)
from pipeline.artifacts.tokenizer import TokenizerDescription

Texts = Mapping[Split, Mapping[str, Mapping[str, list[str]]]]


def bytes_of(languages: Iterable[str]) -> TokenizerDescription:
    """Describe a vocabulary of bytes with a token for each language."""
    return TokenizerDescription(
        kind="bytes", languages=tuple(languages), language_token_scheme="underscores"
    )


def writing(
    directory: Path,
    kind: Kind,
    stage: str = "test",
    inputs: Mapping[str, Artifact] | None = None,
    **options: Any,
) -> AbstractContextManager[ArtifactWriter]:
    """Write an artifact, without settings unless ``config`` is among the options."""
    records = {name: one.as_input for name, one in (inputs or {}).items()}
    given = {"config": {}, "inputs": records, **options}
    return new_artifact(directory, kind=kind, stage=stage, **given)


def make_corpus(
    directory: Path, texts: Texts, *, trained: Mapping[str, int] | None = None
) -> Artifact:
    """A corpus from split → pair → language → lines.

    ``trained`` is pair → number of training lines, of pairs whose training lines are not there.
    """
    pairs = {pair: {"train": count} for pair, count in (trained or {}).items()}
    with writing(directory, "corpus", "clean") as writer:
        for split, by_pair in texts.items():
            for pair, sides in by_pair.items():
                for code, lines in sides.items():
                    text = "".join(f"{line}\n" for line in lines)
                    writer.path(text_name(split, pair, code)).write_bytes(text.encode())
                    pairs.setdefault(pair, {})[split] = len(lines)
        writer.statistics["pairs"] = pairs
    return open_artifact(directory, kind="corpus")


def make_translations(
    directory: Path,
    texts: Mapping[str, Sequence[str]],
    inputs: Mapping[str, Artifact] | None = None,
) -> Artifact:
    """Translations from direction → lines, without a model unless one is among the inputs."""
    with writing(directory, "translations", inputs=inputs) as writer:
        for name, lines in texts.items():
            source, target = name.split("-")
            path = writer.path(hypotheses_name(Direction(source, target)))
            write_hypotheses(path, [Hypothesis(line) for line in lines])
    return open_artifact(directory, kind="translations")
