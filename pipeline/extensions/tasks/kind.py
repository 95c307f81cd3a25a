"""Define a kind of task: the files of a folder by language and split, inputs and scores."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pipeline.artifacts.digests import entries_below
from pipeline.artifacts.raw_input import refuse_broken_link
from pipeline.batching.batch import Labelled, LabelledBatch
from pipeline.config.settings import Route
from pipeline.errors import ArtifactError, ConfigError, unreadable
from pipeline.extensions.tasks.token_classifier import HeadKind, TaskModel, TaskSpec
from pipeline.extensions.tasks.xlmr import Pieces

Split = Literal["train", "dev", "test"]
Example = TypeVar("Example")
MAX_BYTES = 2**28
"""Largest text of a file; the largest of TyDiQA-GoldP has 60 MB."""

_LANGUAGE = r"[a-z]{2,3}(?:_[A-Za-z]{2,8})?"
_ENTITIES = re.compile(
    rf"(?P<language>{_LANGUAGE})/(?:[^/]*[-_.])?(?P<split>train|dev|test)(?:\.[A-Za-z0-9]+)?(?:\.gz)?"
)
_QUESTIONS = re.compile(
    rf"(?:.*[./])?(?P<language>{_LANGUAGE})\.(?P<split>train|dev|test)\.json(?:\.gz)?"
)


class TaskFiles:
    """Files by language and split."""

    def __init__(self, folder: Path, pattern: re.Pattern[str], names: str) -> None:
        """Find the files that match a pattern.

        Raises:
            ConfigError: there is no file, or two files are the same split.
        """
        self._paths: dict[tuple[str, Split], Path] = {}
        self._folder = folder
        for path in sorted(entries_below(folder)):
            match = pattern.fullmatch(path.relative_to(folder).as_posix())
            if match is None:
                continue
            refuse_broken_link(path)
            key = match["language"], cast("Split", match["split"])
            other = self._paths.setdefault(key, path)
            if other != path:
                raise ConfigError(f"{other} and {path} are both {key[1]} of {key[0]}. Remove one.")
        if not self._paths:
            raise ConfigError(
                f"{folder} has no files {names}, plain or .gz. Name a folder of them."
            )

    @classmethod
    def entities(cls, folder: Path) -> "TaskFiles":
        """Find files in a folder per language: ``de/train.tsv``, ``de/dev.iob2.gz``."""
        return cls(folder, _ENTITIES, "LANGUAGE/train, dev or test")

    @classmethod
    def questions(cls, folder: Path) -> "TaskFiles":
        """Find files with names like ``xquad.de.train.json``."""
        return cls(folder, _QUESTIONS, "NAME.LANGUAGE.SPLIT.json")

    def path(self, language: str, split: Split) -> Path:
        """Return the file of a split in a language."""
        return self._paths[language, split]

    def languages(self, split: Split) -> list[str]:
        """Return the languages that have a split, sorted."""
        return sorted(code for code, own in self._paths if own == split)

    def trained_languages(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the languages to train on, sorted: ``wanted``, or all that have training text.

        Raises:
            ConfigError: a wanted language, or every language, has no training text.
        """
        present = self.languages("train")
        missing = [code for code in wanted if code not in present]
        if missing or not present:
            raise ConfigError(
                f"The data has no training file for {', '.join(missing) or 'any language'}; it has "
                f"some for {', '.join(present) or 'none'}. Change tasks.languages, or add the file."
            )
        return tuple(sorted(wanted or present))

    def read(
        self, split: Split, read: Callable[[Path, str], list[Example]], languages: Iterable[str]
    ) -> Mapping[str, list[Example]]:
        """Return language → examples, for each language that has the split."""
        codes = [code for code in languages if (code, split) in self._paths]
        return {code: read(self._paths[code, split], code) for code in codes}

    def read_tests(self, read: Callable[[Path, str], list[Example]]) -> Mapping[str, list[Example]]:
        """Return language → test examples; raise ConfigError if there are no test files."""
        if not (languages := self.languages("test")):
            raise ConfigError(f"{self._folder} has no test file of any language. Add one.")
        return self.read("test", read, languages)


def read_text(path: Path) -> str:
    """Read a whole file as UTF-8.

    Raises:
        ArtifactError: the file cannot be read, exceeds ``MAX_BYTES``, or is not UTF-8.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ArtifactError(unreadable(path, error, "Name a complete file.")) from error
    if len(content) > MAX_BYTES:
        raise ArtifactError(f"{path} holds more than {MAX_BYTES:,} bytes. Name a smaller file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ArtifactError(f"Line {line} of {path} is not UTF-8. Convert the file.") from error


Scores: TypeAlias = dict[str, float]
"""Name of a score → percent."""
Predictions: TypeAlias = list[dict[str, object]]


@dataclass(frozen=True)
class TaskKind:
    """A kind of task; its examples are sentences with entities, or questions.

    Attributes:
        head: the head that the model has.
        title: the title of reports.
        unit: the examples, in words.
        training_unit: the inputs that the examples are cut into, in words.
        titles: score that reports show → its title.
        find: finds the files of a folder.
        read: returns the examples of a file in a language.
        inputs: returns the inputs of examples, with labels.
        collate: joins inputs to a batch.
        predict: returns scores and predictions of a model for examples of a language by a route.
    """

    head: HeadKind
    title: str
    unit: str
    training_unit: str
    titles: dict[str, str]
    find: Callable[[Path], TaskFiles]
    read: Callable[[Path, str], list[Any]]
    inputs: Callable[[Sequence[Any], TaskSpec, Pieces], list[Labelled]]
    collate: Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]
    predict: Callable[
        [TaskModel, Sequence[Any], str, Route], tuple[Scores, list[dict[str, object]]]
    ]
