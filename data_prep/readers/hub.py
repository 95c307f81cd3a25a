"""Read a data set of the Hugging Face hub in the layout of OPUS-100, while it is fetched.

Its configurations are named by pairs, for example ``de-en``; their splits are any of ``train``,
``validation`` and ``test``; each row has a column ``translation`` with the text of both languages.
The name of the data set pins it to a commit. Lines beyond the number wanted are not fetched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from data_prep.readers.raw_text import (
    FOLDERS_IGNORED,
    OR_APART,
    SPLIT_NAMES,
    LineSource,
    NamedPair,
    RawLine,
    RawText,
    Section,
    SkippedText,
    holds_no,
    is_pair_name,
    name_pairs,
    one_language,
    same_text,
    select_pairs,
    unfit_source,
)
from data_prep.settings import CorpusConfig
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.errors import ConfigError, DataError, Interrupted, UserError, lacks_package

COLUMN = "translation"


def read_hub(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read all splits of the pairs of wanted languages, row by row."""
    if raw is None or raw.dataset is None:
        fix = "Pass --raw hub:OWNER/NAME@REVISION, or choose another source"
        raise unfit_source("hub", f"no data set of the hub was given. {fix}")
    dataset, local = raw.dataset, Path(raw.dataset.name)
    if local.exists():
        raise ConfigError(
            f"{local.absolute()} would be read in place of {dataset}. Run from another folder."
        )
    return read_dataset(dataset, config)


def read_dataset(dataset: HubDataset, config: CorpusConfig) -> RawText:
    """Return the sections of a data set, given its name for the ``datasets`` library."""
    try:
        import datasets
    except ImportError as error:
        raise lacks_package("corpus.source 'hub'", "datasets", error, extra="hub") from error
    library: ModuleType = datasets
    with _named_errors(dataset):
        names = library.get_dataset_config_names(dataset.name, revision=dataset.revision)
    named = name_pairs(sorted(filter(is_pair_name, names)), regions=config.regions)
    if not named:
        raise holds_no(dataset, "configurations named like de-en", "one laid out as OPUS-100")
    selected = select_pairs(named, config.languages)
    sections = [
        section
        for pair in sorted(selected, key=lambda pair: sorted(pair.codes))
        for section in _sections(library, dataset, pair)
    ]
    known: dict[tuple[str, str], Section] = {}
    for section in sections:  # two splits of one meaning, or both de-en and en-de
        first = known.setdefault((section.pair, section.split), section)
        if first is not section:
            places = first.sources[0].place, section.sources[0].place
            what = f"{section.split} text of the pair {section.pair}"
            fix = "Name a data set that has it once, or leave these languages out"
            raise same_text(*places, what, f"{fix} of corpus.languages")
    left_out = SkippedText(pairs_not_selected=len(named) - len(selected))
    left_out.ignore(FOLDERS_IGNORED, [name for name in names if not is_pair_name(name)])
    return RawText(sections, left_out=left_out)


@contextmanager
def _named_errors(dataset: HubDataset) -> Iterator[None]:
    """Turn any error of the library into a DataError, because its errors share no class."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{dataset} cannot be read ({reason}). Correct its name and revision, or make "
            "sure that the hub can be reached."
        ) from error


def _sections(library: ModuleType, dataset: HubDataset, pair: NamedPair) -> Iterator[Section]:
    with _named_errors(dataset):
        names = library.get_dataset_split_names(
            dataset.name, config_name=pair.name, revision=dataset.revision
        )
    first, second = sorted(zip(pair.codes, pair.spellings, strict=True))
    if first[0] == second[0]:
        fix = f"Leave its language out of corpus.languages, {OR_APART}"
        raise one_language(f"{dataset} {pair.name}", fix)
    for name in sorted(filter(SPLIT_NAMES.__contains__, names), key=[*SPLIT_NAMES].index):
        spellings = (first[1], second[1])
        one, other = (
            LineSource(f"{pair.name}/{name}.{spelling}", f"{dataset} {pair.name}/{name}.{spelling}")
            for spelling in spellings
        )
        yield Section(
            split=SPLIT_NAMES[name],
            languages=(first[0], second[0]),
            spellings=spellings,
            sources=(one, other),
            lines=_lines(library, dataset, pair.name, name, spellings=spellings),
            to_the_end=False,
        )


def _lines(
    library: ModuleType, dataset: HubDataset, pair: str, split: str, *, spellings: tuple[str, str]
) -> Iterator[RawLine]:
    """Yield rows as lines; missing text becomes an empty line."""
    with _named_errors(dataset):
        rows = library.load_dataset(
            dataset.name, pair, split=split, revision=dataset.revision, streaming=True
        )
        for number, row in enumerate(rows, start=1):
            texts = row.get(COLUMN)
            if not isinstance(texts, dict) or not texts.keys() >= set(spellings):
                raise DataError(
                    f"{dataset} {pair}/{split} has no {COLUMN} in {' and '.join(spellings)} in row "
                    f"{number}. Name a data set laid out as OPUS-100 is."
                )
            # Lone surrogates become invalid UTF-8, which the quarantine takes.
            one, other = (
                (texts[spelling] or "").encode("utf-8", "surrogatepass") for spelling in spellings
            )
            yield RawLine(number, (one, other))
