"""Files below the raw folders, by their endings, and what their names say of split and pair.

``all_talks_train.tsv`` and ``news/newstest2014.de-en.tsv.gz`` say their split by a word in the name
of the file or of a folder below the one named; without any, it is training text. The pair is a part
of the name between dots, or the name of a folder.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data_prep.readers.pair_names import SPLIT_NAMES, is_pair_name, spellings_of
from data_prep.readers.section import FILES_IGNORED, LeftOut, Source
from data_prep.readers.text_files import plain_name
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.errors import ConfigError, DataError
from pipeline.terminal import listed

_SPLIT_WORD = re.compile(
    r"(?<![a-z])(?:news)?(train|valid(?:ation)?|dev(?:test)?|test)(?:ing)?(?:set|s)?(?![a-z])",
    re.IGNORECASE,
)
_SPLITS = {**SPLIT_NAMES, "devtest": SPLIT_NAMES["test"]}


@dataclass(frozen=True)
class RawFile:
    """A file below a raw folder, or one that was named itself."""

    path: Path
    name: str
    """The same wherever the raw folder lies; of several, it begins with the folder's number."""

    @property
    def ending(self) -> str:
        """What its name says it holds, in small letters: ``tmx``."""
        return PurePosixPath(plain_name(self.name)).suffix.lower().removeprefix(".")

    def split(self) -> Split:
        """The split that its name says, ``train`` where it says none; DataError: several."""
        found = {_SPLITS[word.lower()] for word in _SPLIT_WORD.findall(self.name)}
        if len(found) > 1:
            raise DataError(
                f"{self.path} is named as {' and '.join(sorted(found))} text: rename it so that "
                "one of them is left."
            )
        return found.pop() if found else "train"

    def pair(self) -> tuple[str, str] | None:
        """The pair that its name says, as it is spelled, in this order; None where it says none.

        Raises:
            DataError: its name says several.
        """
        *folders, name = PurePosixPath(plain_name(self.name)).parts
        found = list(filter(is_pair_name, name.split("."))) or list(filter(is_pair_name, folders))
        if len({entry.lower() for entry in found}) > 1:
            raise DataError(
                f"{self.path} is named as text of {' and '.join(found)}: rename it so that one of "
                "them is left."
            )
        return spellings_of(found[0]) if found else None

    def source(self, side: str = "") -> Source:
        """Where the lines of one side come from, the only one or one of several."""
        return Source(name=self.name, place=f"{self.path} ({side})" if side else str(self.path))


def find_files(
    raw: RawInput | None, *, source: str, endings: Sequence[str]
) -> tuple[list[RawFile], LeftOut]:
    """Files with one of the endings, plain or packed, by name; and the others, as ignored.

    Hidden files and folders are left alone and not counted.

    Raises:
        ConfigError: no paths are given.
        DataError: a path does not exist, or there is no such file.
    """
    found = list_files(raw, source=source)
    chosen = [file for file in found if file.ending in endings]
    if not chosen:
        places = listed(raw.values) if raw else ""
        names = ", ".join(f".{ending}" for ending in endings)
        raise DataError(
            f"{places} holds no file that ends in {names} (plain, .gz or .zst), which "
            f"corpus.source = {source!r} reads: name another folder or source."
        )
    left_out = LeftOut()
    left_out.ignore(FILES_IGNORED, [file.name for file in found if file.ending not in endings])
    return chosen, left_out


def list_files(raw: RawInput | None, *, source: str) -> list[RawFile]:
    """All files that are not hidden, by name.

    Raises:
        ConfigError: no paths are given.
        DataError: a path does not exist.
    """
    paths = raw_paths(raw, source=source)
    if len(paths) == 1:
        return _files(paths[0])
    return [
        RawFile(file.path, f"{number}/{file.name}")
        for number, path in enumerate(paths, start=1)
        for file in _files(path)
    ]


def raw_paths(raw: RawInput | None, *, source: str) -> tuple[Path, ...]:
    """The paths given; ConfigError where there are none."""
    if raw is None:
        raise ConfigError(
            f"corpus.source is {source!r}, but no raw text was given: pass --raw DIR."
        )
    if isinstance(raw, HubDataset):
        raise ConfigError(
            f"corpus.source is {source!r}, but {raw} is a data set of the hub: set corpus.source "
            "to 'hub', or pass --raw DIR."
        )
    return raw.paths


def _files(path: Path) -> list[RawFile]:
    if path.is_file():
        return [RawFile(path, path.name)]
    if not path.is_dir():
        raise DataError(f"{path} does not exist: name an existing file or folder.")
    found: list[RawFile] = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        places = [Path(folder) / name for name in names if not name.startswith(".")]
        found += [
            RawFile(place, place.relative_to(path).as_posix())
            for place in places
            if place.is_file()
        ]
    return sorted(found, key=lambda file: file.name)
