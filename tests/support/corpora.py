"""Artifacts that tests write by hand, and corpora of a few lines."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    Kind,
    new_artifact,
    open_artifact,
)
from pipeline.artifacts.corpus import Split, text_name
from pipeline.artifacts.tokenizer import TokenizerDescription

Texts = Mapping[Split, Mapping[str, Mapping[str, list[str]]]]


def bytes_of(languages: Iterable[str]) -> TokenizerDescription:
    """Describe a vocabulary of bytes with a token for each language."""
    return TokenizerDescription(
        kind="bytes", languages=tuple(languages), language_token_scheme="underscores"
    )


def writing(
    directory: Path, kind: Kind, stage: str = "test"
) -> AbstractContextManager[ArtifactWriter]:
    """Write an artifact without settings and inputs."""
    return new_artifact(directory, kind=kind, stage=stage, config={}, inputs={})


def make_corpus(directory: Path, texts: Texts) -> Artifact:
    """A corpus from split → pair → language → lines."""
    pairs: dict[str, dict[str, int]] = {}
    with writing(directory, "corpus", "clean") as writer:
        for split, by_pair in texts.items():
            for pair, sides in by_pair.items():
                for code, lines in sides.items():
                    text = "".join(f"{line}\n" for line in lines)
                    writer.path(text_name(split, pair, code)).write_bytes(text.encode())
                    pairs.setdefault(pair, {})[split] = len(lines)
        writer.statistics["pairs"] = pairs
    return open_artifact(directory, kind="corpus")
