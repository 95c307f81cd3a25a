"""Read the files listed in the recipe, as ``mtdata`` lists them: split, pair and paths of each.

Two paths are a pair of files, line by line. One path is a file of both languages, read by its
ending: ``.tmx``, ``.tsv``, ``.parquet``, ``.jsonl``, ``.json`` or ``.csv``. All may be packed.
Sections of one split and pair follow in the order of the list.
"""

from collections import Counter
from pathlib import Path

from data_prep.readers.file_pairs import FilePair
from data_prep.readers.multiway import MultiwayFile, section_of_pair
from data_prep.readers.raw_text import (
    NamedPair,
    RawFile,
    RawText,
    Section,
    SkippedText,
    is_pair_name,
    name_pairs,
    raw_paths,
    select_pairs,
    unfit_source,
)
from data_prep.readers.tables import COLUMN_ENDINGS, TSV_ENDINGS, open_table
from data_prep.readers.tmx import survey_file
from data_prep.settings import CorpusConfig, ListedText
from pipeline.artifacts.raw_input import RawInput
from pipeline.errors import ConfigError, DataError


def read_listed(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read the files of ``corpus.files`` that are in wanted languages.

    Raises:
        ConfigError: No folder or files are given, a pair is misspelled, or a wanted language is in
            no pair of wanted languages.
        DataError: A file is missing, of no known form, or has no text of its pair.
    """
    root = _root(raw)
    if not config.files:
        example = '[{ split = "train", pair = "de-en", paths = ["a.de.gz", "a.en.gz"] }]'
        raise unfit_source(
            "listed", f"corpus.files is empty. Name each file, as in files = {example}"
        )
    for entry in config.files:
        _check_pair(entry)
    pairs = name_pairs((entry.pair for entry in config.files), regions=config.regions)
    wanted = select_pairs(pairs, config.languages)
    left_out = SkippedText(pairs_not_selected=len({*pairs} - wanted))
    chosen = [both for both in zip(config.files, pairs, strict=True) if both[1] in wanted]
    sections = [_section(root, entry, pair, config, left_out) for entry, pair in chosen]
    return RawText(sections, left_out=left_out)


def _root(raw: RawInput | None) -> Path:
    paths = raw_paths(raw, source="listed")
    if len(paths) > 1 or not paths[0].is_dir():
        problem = f"{', '.join(map(str, paths))} is not one folder"
        raise unfit_source(
            "listed", f"{problem}. Name the folder that the paths of corpus.files start from"
        )
    return paths[0]


def _check_pair(entry: ListedText) -> None:
    first, _, second = entry.pair.partition("-")
    if not is_pair_name(entry.pair) or first.lower() == second.lower():
        raise ConfigError(
            f"corpus.files names the pair {entry.pair!r}. Write two language codes, like de-en."
        )


def _section(
    root: Path, entry: ListedText, pair: NamedPair, config: CorpusConfig, left_out: Counter[str]
) -> Section:
    files = [_file(root, path) for path in entry.paths]
    if len(files) == 2:
        return FilePair((files[0], files[1]), entry.split, pair).section(config)
    opened = _open(files[0], entry, pair, config, left_out)
    return section_of_pair(opened, pair, config)


def _file(root: Path, name: str) -> RawFile:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"corpus.files names {name!r}, which lies outside of {root}. Move it in.")
    if not path.is_file():
        raise DataError(f"{path}, which corpus.files names, is not a file. Correct its name.")
    return RawFile(path, name)


def _open(
    file: RawFile,
    entry: ListedText,
    pair: NamedPair,
    config: CorpusConfig,
    left_out: Counter[str],
) -> MultiwayFile:
    if file.ending == "tmx":
        return survey_file(file, entry.split, config, left_out=left_out)
    if file.ending in (*TSV_ENDINGS, *COLUMN_ENDINGS):
        return open_table(file, entry.split, config, pair=pair.spellings)
    raise DataError(
        f"{file.path} is one file of both languages, but ends in none of .tmx, "
        f"{', '.join(f'.{ending}' for ending in (*TSV_ENDINGS, *COLUMN_ENDINGS))}. Name a file per "
        "language."
    )
