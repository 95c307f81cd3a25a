"""Reading corpus and translations artifacts: which pairs, which directions, which lines.

A corpus holds ``{train,valid,test}/{pair}/{language}.txt``: UTF-8, one sentence per line, lines
end with ``\\n`` and nothing else does; none is longer than import lets in. A pair is two codes in
alphabetical order, ``de-en``; pairs that never had training lines are the zero-shot ones. Its
statistics list ``{"pairs": {pair: {split: lines}}}``, and as ``emptied`` the pairs that lost all
their training lines. Translations hold ``hypotheses/{source}-{target}.jsonl``, in
the order of the corpus's test lines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.artifacts import Artifact
from pipeline.errors import ArtifactError
from pipeline.manifest import describe_name

Split = Literal["train", "valid", "test"]


def pair_name(first: str, second: str) -> str:
    """The name of the pair of two languages, whichever comes first."""
    return "-".join(sorted((first, second)))


@dataclass(frozen=True, order=True)
class Direction:
    """A translation direction."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def pair(self) -> str:
        return pair_name(self.source, self.target)


@dataclass(frozen=True)
class Hypothesis:
    """One translated line; ``score`` is the length-normalised log-probability (0 where none)."""

    text: str
    score: float = 0.0
    truncated: bool = False
    """Part of the source was left out: it did not fit the model, and could not be divided."""
    split: int = 0
    """Parts that a source too long for the model was translated in; 0: it was translated whole."""


def pair_counts(artifact: Artifact) -> dict[str, dict[str, int]]:
    """Pair → split → number of lines of a corpus or shards artifact.

    Raises:
        ArtifactError: a name is not one of a pair; files are named after pairs.
    """
    pairs: dict[str, dict[str, int]] = artifact.statistics["pairs"]
    for name in pairs:
        if name.count("-") != 1 or "/" in name or any(map(describe_name, name.split("-"))):
            raise ArtifactError(
                f"The statistics of {artifact.directory} name a pair {name!r}, which is not two "
                f"language codes with a hyphen: run stage {artifact.manifest.stage!r} again."
            )
    return dict(sorted(pairs.items()))


def line_counts(artifact: Artifact, split: Split) -> dict[str, int]:
    """Pair → number of lines of a corpus or shards artifact, pairs without any left out."""
    pairs = pair_counts(artifact)
    return {name: counts[split] for name, counts in pairs.items() if counts.get(split)}


def emptied_pairs(artifact: Artifact) -> set[str]:
    """Pairs of a corpus or shards artifact that had training text of which nothing is left.

    They are no zero-shot pairs. An artifact that does not say has none.
    """
    return set(artifact.statistics.get("emptied", ()))


Resource = Literal["high", "medium", "low"]


def resource_of(training_lines: int, *, thresholds: tuple[int, int]) -> Resource:
    """Resource group of a pair: low up to the first threshold, high from the second on."""
    low, high = thresholds
    if training_lines >= high:
        return "high"
    return "medium" if training_lines > low else "low"


def languages(artifact: Artifact) -> list[str]:
    """All languages of a corpus or shards artifact, sorted."""
    return sorted({code for name in pair_counts(artifact) for code in name.split("-")})


def directions(artifact: Artifact, split: Split) -> list[Direction]:
    """Both directions of every pair that has lines in the split, sorted."""
    found = []
    for name in line_counts(artifact, split):
        first, second = name.split("-")
        found += [Direction(first, second), Direction(second, first)]
    return sorted(found)


def text_name(split: Split, pair: str, language: str) -> str:
    """Name of a text file within a corpus."""
    return f"{split}/{pair}/{language}.txt"


def iterate_lines(path: Path) -> Iterator[str]:
    """Lines of a text file without their ``\\n``; no other character ends a line."""
    with path.open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            yield line.removesuffix("\n")


def read_lines(corpus: Artifact, split: Split, pair: str, language: str) -> list[str]:
    """All lines of one side of a pair."""
    return list(iterate_lines(corpus.file(text_name(split, pair, language))))


def hypotheses_name(direction: Direction) -> str:
    return f"hypotheses/{direction}.jsonl"


def write_hypotheses(path: Path, hypotheses: list[Hypothesis]) -> None:
    """One JSON object per line, in order."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for hypothesis in hypotheses:
            stream.write(json.dumps(vars(hypothesis), ensure_ascii=False) + "\n")


def read_hypotheses(translations: Artifact, direction: Direction) -> list[Hypothesis]:
    """Hypotheses of one direction, in the order of the corpus's test lines."""
    path = translations.file(hypotheses_name(direction))
    return [Hypothesis(**json.loads(line)) for line in iterate_lines(path)]
