"""Stage import_corpus: raw pair folders, or phrases made from Unicode CLDR, become a corpus.

Files used: a tree as ``readers/tree.py`` describes it. Files built: the corpus layout of
``pipeline/artifacts/corpus.py``, and ``quarantine.jsonl`` with every line that is no text. A tree
is read in constant memory. Characters that some tools take for line ends become spaces.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from data_prep.raw_lines import REASONS, LineCounts, Quarantine, good_lines
from data_prep.readers.cldr import Phrase, check_languages, make_phrases
from data_prep.readers.tree import LAYOUT, SPLITS, PairFolder, find_pairs, require_languages
from data_prep.side_languages import EvenSample, are_swapped, code_warning, script_of_language
from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Split, pair_name, text_name
from pipeline.config import CorpusConfig
from pipeline.errors import ConfigError, DataError
from pipeline.languages import canonical
from pipeline.scripts import count_scripts
from pipeline.stages import StageCall
from pipeline.summary import counted, listed, tallied
from pipeline.terminal import track

QUARANTINE_NAME = "quarantine.jsonl"


@dataclass
class Tally:
    """What was read and written; becomes the statistics and the summary of the artifact."""

    pairs: dict[str, dict[Split, int]] = field(default_factory=dict)
    characters: dict[str, dict[Split, dict[str, int]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    emptied: set[str] = field(default_factory=set)
    """Pairs that came with training files of which no line is left."""
    empty_sides: set[str] = field(default_factory=set)
    """``de-en train de``: sides that have lines but no text."""
    no_text: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Reason, language) → lines that are no text."""
    swapped: list[str] = field(default_factory=list)
    """``de-en train``: pairs of files that look swapped and were accepted."""
    scripts: dict[str, Counter[str]] = field(default_factory=dict)
    """Language → script → letters of a sample."""
    spellings: dict[str, set[str]] = field(default_factory=dict)
    """Language → how the raw folders spell it."""

    def add(
        self, split: Split, languages: Sequence[str], *, lines: int, characters: Sequence[int]
    ) -> None:
        """Record what one split of a pair holds; characters per side, without line ends."""
        pair = pair_name(*languages)
        self.pairs.setdefault(pair, dict.fromkeys(SPLITS, 0))[split] = lines
        sides = dict(zip(languages, characters, strict=True))
        self.characters.setdefault(pair, {})[split] = sides
        if split == "train" and not lines:
            self.emptied.add(pair)

    def add_lines(self, split: Split, languages: Sequence[str], found: LineCounts) -> None:
        """Record what was found in the lines of two files."""
        self.counts += Counter(
            {
                "lines_read": found.read,
                "quarantined": found.quarantined,
                "lines_over_limit": found.over_limit,
                "byte_order_marks": found.byte_order_marks,
                "carriage_returns": found.carriage_returns,
                "lines_with_inner_separator": found.separators,
                "lines_without_text": sum(found.without_text),
                "lines_with_nul": sum(side["nul"] for side in found.no_text),
                "lines_with_invalid_utf8": sum(side["invalid_utf8"] for side in found.no_text),
                "lines_too_long": sum(side["too_long"] for side in found.no_text),
            }
        )
        for side, code in enumerate(languages):
            for reason, number in found.no_text[side].items():
                self.no_text[reason, code] += number
            if found.kept and found.without_text[side] >= found.kept:
                self.empty_sides.add(f"{pair_name(*languages)} {split} {code}")

    def add_sample(self, sample: EvenSample, folder: PairFolder) -> None:
        """Record the letters of a sample of two files."""
        for side, code in enumerate(folder.languages):
            self.spellings.setdefault(code, set()).add(folder.spellings[side])
            letters = self.scripts.setdefault(code, Counter())
            letters.update(count_scripts("".join(sample.side(side))))


def run(call: StageCall) -> None:
    """Bring raw text into the layout that all later stages read."""
    config = call.recipe.corpus
    tally = Tally()
    with call.new_artifact() as writer:
        if config.source == "cldr":
            import_phrases(config, writer, tally=tally)
        else:
            import_tree(raw_dir(call), config, writer, tally=tally)
        writer.statistics |= statistics(tally)
        writer.summary += summary(tally)


def raw_dir(call: StageCall) -> Path:
    """The raw folder; ConfigError where none was given."""
    if "raw" not in call.raw:
        raise ConfigError(
            "corpus.source is 'tree', but no raw folder was given: pass --raw DIR, a tree with "
            f"{LAYOUT}, or set corpus.source to 'cldr'."
        )
    root = call.raw["raw"]
    if not root.is_dir():
        raise DataError(f"{root} is a file where a tree of pair folders is wanted: {LAYOUT}.")
    return root


def import_tree(root: Path, config: CorpusConfig, writer: ArtifactWriter, *, tally: Tally) -> None:
    """Read every pair of files once, in step, and write the lines that are text."""
    folders = find_pairs(
        root, wanted=config.languages, max_line_bytes=config.max_line_bytes, counts=tally.counts
    )
    with writer.path(QUARANTINE_NAME).open("w", encoding="utf-8", newline="\n") as stream:
        quarantine = Quarantine(stream, root)
        for folder in track(folders, label="import"):
            for split in folder.files:
                import_files(
                    folder, split, writer, config=config, quarantine=quarantine, tally=tally
                )


def import_files(
    folder: PairFolder,
    split: Split,
    writer: ArtifactWriter,
    *,
    config: CorpusConfig,
    quarantine: Quarantine,
    tally: Tally,
) -> None:
    """Write the lines of two files that are text.

    Raises:
        DataError: the files cannot be read in step, are damaged, or look swapped.
    """
    paths, languages = folder.files[split], folder.languages
    first, second = (
        writer.path(text_name(split, folder.pair, code)).open("w", encoding="utf-8", newline="\n")
        for code in languages
    )
    found, sample, characters = LineCounts(), EvenSample(), [0, 0]
    with first, second:
        for one, other in good_lines(
            paths,
            limit=_limit(config, split),
            max_line_bytes=config.max_line_bytes,
            quarantine=quarantine,
            counts=found,
        ):
            first.write(one + "\n")
            second.write(other + "\n")
            characters[0] += len(one)
            characters[1] += len(other)
            sample.offer(one, other)
    tally.add(split, languages, lines=found.kept, characters=characters)
    tally.add_lines(split, languages, found)
    tally.add_sample(sample, folder)
    if are_swapped(sample, folder.spellings):
        if config.swapped_sides == "refuse":
            raise DataError(_swapped(paths, folder))
        tally.swapped.append(f"{folder.pair} {split}")


def import_phrases(config: CorpusConfig, writer: ArtifactWriter, *, tally: Tally) -> None:
    """Write CLDR phrases: all splits for pairs with the pivot, test alone for zero-shot pairs."""
    cldr = check_languages(config.cldr)
    phrases = make_phrases(cldr)
    known = {cldr.pivot, *cldr.train_pairs}
    wanted = {canonical(code) for code in config.languages} or known
    splits: dict[str, dict[Split, list[Phrase]]] = {
        pair_name(cldr.pivot, code): {
            "train": phrases.train[code],
            "valid": phrases.valid,
            "test": phrases.test,
        }
        for code in cldr.train_pairs
    }
    for first, second in combinations(cldr.zero_shot, 2):
        splits[pair_name(first, second)] = {"test": phrases.test}
    selected = {pair: of for pair, of in splits.items() if wanted.issuperset(pair.split("-"))}
    require_languages(wanted, (pair.split("-") for pair in selected), present=known)
    for pair, of_pair in sorted(selected.items()):
        for split, listed_phrases in of_pair.items():
            kept = listed_phrases[: _limit(config, split)]
            tally.counts["lines_read"] += len(listed_phrases)
            tally.counts["lines_over_limit"] += len(listed_phrases) - len(kept)
            _write_phrases(kept, pair, split, writer, tally=tally)


def statistics(tally: Tally) -> dict[str, object]:
    """Lines and characters per pair and split, what was found on the way, and the languages."""
    return {
        "pairs": tally.pairs,
        "characters": tally.characters,
        "counts": dict(sorted(tally.counts.items())),
        "emptied": sorted(tally.emptied),
        "languages": {
            code: {
                "spellings": sorted(spellings),
                "script": script_of_language(tally.scripts[code], spellings),
            }
            for code, spellings in sorted(tally.spellings.items())
        },
    }


def summary(tally: Tally) -> list[str]:
    """What was read and kept, left out and changed; which pairs lack what; what looks wrong."""
    kept = {split: sum(counts[split] for counts in tally.pairs.values()) for split in SPLITS}
    lines = [
        f"read {counted(tally.counts['lines_read'], 'line')} of {counted(len(tally.pairs), 'pair')}"
        f", kept {sum(kept.values()):,} ("
        + ", ".join(f"{split} {number:,}" for split, number in kept.items())
        + ")"
    ]
    parts = [_left_out(tally), _changed(tally), _lacking(tally), _looks_wrong(tally)]
    return lines + [part for part in parts if part]


def _left_out(tally: Tally) -> str:
    counts, parts = tally.counts, []
    if counts["quarantined"]:
        sides = {
            f"{reason} in {code}": tally.no_text[reason, code]
            for reason in REASONS
            for code in sorted(tally.spellings)
            if tally.no_text[reason, code]
        }
        listing = listed(tallied({name: number}) for name, number in sides.items())
        pairs = counted(counts["quarantined"], "line")
        parts.append(f"{pairs} and their counterparts into {QUARANTINE_NAME} ({listing})")
    if counts["lines_over_limit"]:
        parts.append(f"{counts['lines_over_limit']:,} beyond the lines wanted per pair")
    for name, noun in (
        ("pairs_not_selected", "pair of other languages"),
        ("folders_repeated", "folder with the same text"),
        ("folders_ignored", "folder not named like a pair"),
    ):
        if counts[name]:
            first, *rest = noun.split(" ")
            parts.append(" ".join([counted(counts[name], first), *rest]))
    return f"left out: {'; '.join(parts)}" if parts else ""


def _changed(tally: Tally) -> str:
    names = {
        "lines_with_inner_separator": "odd separators made spaces in",
        "carriage_returns": "carriage returns removed from",
        "byte_order_marks": "byte order marks removed from",
        "lines_without_text": "no text (kept) in",
    }
    parts = [
        f"{text} {counted(tally.counts[name], 'line')}"
        for name, text in names.items()
        if tally.counts[name]
    ]
    return ", ".join(parts)


def _lacking(tally: Tally) -> str:
    """Pairs and sides without what a pair usually has; one that is for tests alone may be so."""
    trained = [pair for pair, counts in tally.pairs.items() if counts["train"]]
    lacking = {
        "no training data left": sorted(tally.emptied),
        "no validation set": [pair for pair in trained if not tally.pairs[pair]["valid"]],
        "no test lines": [pair for pair in trained if not tally.pairs[pair]["test"]],
        "no lines at all": [
            pair for pair, counts in tally.pairs.items() if not any(counts.values())
        ],
        "only empty lines": sorted(tally.empty_sides),
    }
    parts = [f"{what}: {listed(pairs)}" for what, pairs in lacking.items() if pairs]
    if not trained:
        parts.insert(0, "no pair has training lines")
    return "; ".join(parts)


def _looks_wrong(tally: Tally) -> str:
    warnings = [
        warning
        for code, spellings in sorted(tally.spellings.items())
        if (warning := code_warning(tally.scripts[code], spellings))
    ]
    if tally.swapped:
        warnings.append(f"sides look swapped in {listed(tally.swapped)}")
    merged = [
        f"{code} ({listed(sorted(spellings))})"
        for code, spellings in sorted(tally.spellings.items())
        if len(spellings) > 1
    ]
    if merged:
        warnings.append(f"several spellings are one language: {listed(merged)}")
    return f"look at: {'; '.join(warnings)}" if warnings else ""


def _swapped(paths: tuple[Path, Path], folder: PairFolder) -> str:
    first, second = folder.spellings
    return (
        f"{paths[0]} reads as {second} and {paths[1]} as {first}: exchange the names of the two "
        "files, or set corpus.swapped_sides to 'accept' if they are right."
    )


def _write_phrases(
    phrases: list[Phrase], pair: str, split: Split, writer: ArtifactWriter, *, tally: Tally
) -> None:
    languages = pair.split("-")
    for code in languages:
        with writer.path(text_name(split, pair, code)).open(
            "w", encoding="utf-8", newline="\n"
        ) as stream:
            stream.writelines(f"{phrase[code]}\n" for phrase in phrases)
    characters = [sum(len(phrase[code]) for phrase in phrases) for code in languages]
    tally.add(split, languages, lines=len(phrases), characters=characters)


def _limit(config: CorpusConfig, split: Split) -> int | None:
    match split:
        case "train":
            return config.max_train_lines
        case "valid":
            return config.max_valid_lines
        case "test":
            return config.max_test_lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("import_corpus"))
