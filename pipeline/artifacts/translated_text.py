"""Read translated text: the lines of files, and their translations in the same order.

``text/{language}/{file}`` has the lines of a file, in the language of the text and in each that
they were translated into; ``scores/{language}/{file}.jsonl`` the rest of each translation. The
statistic ``directions`` counts the lines of every direction.
"""

from collections.abc import Iterator

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis, aligned_lines, hypothesis_of
from pipeline.config.documents import RESTORE, read_json_lines
from pipeline.errors import ArtifactError


def text_name(language: str, name: str) -> str:
    """Return the name of a file's lines in a language in the artifact."""
    return f"text/{language}/{name}"


def scores_name(language: str, name: str) -> str:
    """Return the name of the scores of a file's translations in the artifact."""
    return f"scores/{language}/{name}.jsonl"


def translated_directions(translated: Artifact) -> list[Direction]:
    """Return the directions of translated text.

    Raises:
        ArtifactError: The statistics do not name them.
    """
    found = translated.statistics.get("directions")
    names = [name.split("-") for name in found] if isinstance(found, dict) else []
    if not names or any(len(name) != 2 for name in names):
        raise ArtifactError(
            f"The statistics of {translated.directory} have no directions. Run stage "
            f"{translated.manifest.stage!r} again."
        )
    return [Direction(*name) for name in names]


def translated_lines(
    translated: Artifact, direction: Direction
) -> Iterator[tuple[str, Hypothesis]]:
    """Yield every line of every file with its translation.

    Raises:
        ArtifactError: The lines are missing, as in text of an earlier version, or do not fit.
    """
    below = text_name(direction.target, "")
    for text in translated.names(below):
        name = text.removeprefix(below)
        if not translated.has(text_name(direction.source, name)):
            raise ArtifactError(
                f"{translated.directory} has translations without the lines that they translate. "
                "Run translate --text again."
            )
        source = translated.file(text_name(direction.source, name))
        scores = translated.file(scores_name(direction.target, name))
        lines = aligned_lines(source, translated.file(text))
        try:
            for (line, translation), record in zip(lines, read_json_lines(scores), strict=True):
                what = f"A line of {scores}"
                yield line, hypothesis_of({**record, "text": translation}, what=what)
        except ValueError as error:
            raise ArtifactError(f"{scores} does not fit {text}: {RESTORE}.") from error
