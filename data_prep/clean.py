"""Stage clean: drop bad, repeated and held-out training lines.

Reads a corpus, and further corpora with held-out lines that must not be trained on. Makes the same
corpus with fewer training lines; validation and test text is copied unchanged.
``dropped_samples.jsonl`` holds ten lines that each rule dropped, ``held_out_leaks.json`` the number
of training lines of each pair found in each held-out set. ``provenance/`` keeps the origins of the
machine translations kept.

Each pair listed in ``clean.joined_pairs`` gets the lines of two cleaned pairs that have equal pivot
lines (``pivot_join.py``), cleaned by the same rules. Cleaned pairs have no held-out line on either
side: no line is joined across one. The statistic ``joined`` counts the joined lines.

A dropped line is counted under the first rule it breaks, and for the side that breaks it, if one
does. A pair that loses all its lines is listed as ``emptied`` in the statistics. Pairs are
independent, and joined after all others are clean, so the number of workers does not change the
result.

Memory: in each process 250 bytes per held-out line of up to 128 languages; for each pair in work 1
byte per training line (2 where it has a provenance), 16 bytes per repeated line, and a block of
lines, which import has limited in length.

The sample of dropped lines is uniform and does not depend on how pairs are spread over processes:
every dropped line has a rank that depends on the seed, its rule, its pair and its line number, and
the smallest ranks are kept. Samples of parts add up to the sample of all.
"""

import hashlib
import json
import shutil
import sys
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import compress, islice
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile

from data_prep.held_out import (
    HELD_OUT_SPLITS,
    HeldOutRule,
    HeldOutSets,
    held_out_lines,
    held_out_sets,
)
from data_prep.pair_rules import (
    RULES,
    SIDED_RULES,
    LanguageRule,
    LengthRatios,
    LineDigests,
    PairRules,
    Rule,
    as_seen,
    line_identifier,
)
from data_prep.pivot_join import PivotedText, write_joined
from data_prep.settings import CleanConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    aligned_lines,
    emptied_pairs,
    found_scripts,
    imported_statistics,
    is_synthetic,
    joined_lines,
    language_of,
    languages,
    line_counts,
    pair_counts,
    pair_name,
    provenance_name,
    text_name,
)
from pipeline.distributed.process import track
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import DataError
from pipeline.languages import find_code, letters_of, written_script
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

LEAKS_NAME = "held_out_leaks.json"
BLOCK_LINES = 2048
LANGUAGE_MIN_CHARACTERS = 40
"""Shorter sides are not judged by their language."""

DROPPED_SAMPLES_NAME = "dropped_samples.jsonl"
SAMPLES, SHOWN_CHARACTERS = 10, 300
"""Sampled lines per rule, over all pairs, and characters kept of either side."""
SEED = 1

Lines = list[tuple[str, str]]


def run(call: StageCall) -> None:
    """Clean the training lines of every pair and leave the held-out lines as they are."""
    corpus, config = call.artifacts["corpus"], call.recipe.clean
    pivot = call.recipe.corpus.pivot
    pivot = find_code(pivot, languages(corpus)) or pivot
    line_identifier(config)  # fail here rather than in a worker
    held_out = held_out_sets(corpus, call.many("tests"))
    with call.new_artifact() as writer:
        for name in (name for split in HELD_OUT_SPLITS for name in corpus.names(f"{split}/")):
            shutil.copyfile(corpus.file(name), writer.path(name))
        corpus.check([*corpus.names("train/"), *corpus.names("provenance/")])
        pairs = list(line_counts(corpus, "train"))
        joined = joined_pairs(corpus, config, pivot=pivot)
        noted = found_scripts(corpus)
        scripts = {code: noted.get(code) or written_script(code) for code in languages(corpus)}
        cleaning = Cleaning(corpus, writer, config, pivot, scripts, held_out)
        found = clean_all(cleaning, pairs, joined, processes=call.processes, mpi=call.mpi)
        results = list(track(found, label="clean", total=len(pairs) + len(joined)))
        refuse_nothing(corpus, results)
        write_samples(writer, results)
        writer.write_json(LEAKS_NAME, leaks(held_out, results))
        writer.statistics |= clean_statistics(corpus, results)
        if config.identify_languages != "no":
            writer.statistics |= language_statistics(config, results)
        writer.summary += summary(corpus, results, held_out=held_out, pivot=pivot)


@dataclass(frozen=True)
class DroppedLine:
    """Line that a rule dropped."""

    rule: Rule
    pair: str
    line: int
    """Line number in the training text read, from 1."""
    sides: tuple[str, ...]
    """Languages of the sides that broke the rule; empty if both together did."""
    text: dict[str, str]
    """Language → beginning of its side."""


Ranked = tuple[bytes, DroppedLine]


@dataclass
class DroppedSamples:
    """Sample of the dropped lines of each rule."""

    of_rule: dict[Rule, list[Ranked]] = field(default_factory=dict)

    def offer(
        self, rule: Rule, *, pair: str, line: int, sides: Iterable[bool], text: tuple[str, str]
    ) -> None:
        """Consider a dropped line for the sample."""
        rank = hashlib.blake2b(f"{SEED} {rule} {pair} {line}".encode(), digest_size=8).digest()
        ranked = self.of_rule.setdefault(rule, [])
        if len(ranked) == SAMPLES and rank >= ranked[-1][0]:
            return
        codes = pair.split("-")
        cut = {code: side[:SHOWN_CHARACTERS] for code, side in zip(codes, text, strict=True)}
        broken = tuple(code for code, breaks in zip(codes, sides, strict=True) if breaks)
        insort(ranked, (rank, DroppedLine(rule, pair, line, broken, cut)), key=itemgetter(0))
        del ranked[SAMPLES:]

    def add(self, other: "DroppedSamples") -> None:
        """Merge the sample of other lines into this one."""
        for rule, ranked in other.of_rule.items():
            both = sorted([*self.of_rule.get(rule, []), *ranked], key=itemgetter(0))
            self.of_rule[rule] = both[:SAMPLES]

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield the sample as JSON objects by rule, pair and line."""
        for rule in RULES:
            dropped = [one for _, one in self.of_rule.get(rule, [])]
            yield from map(asdict, sorted(dropped, key=lambda one: (one.pair, one.line)))


@dataclass
class PairResult:
    """Lines kept of a pair, and the rules that dropped the others."""

    pair: str
    lines: int = 0
    characters: list[int] = field(default_factory=lambda: [0, 0])
    dropped: Counter[Rule] = field(default_factory=Counter)
    dropped_sides: Counter[tuple[Rule, int]] = field(default_factory=Counter)
    """(Rule, side) → lines with this side against the rule; a line can count for both sides."""
    samples: DroppedSamples = field(default_factory=DroppedSamples)
    leaks: Counter[int] = field(default_factory=Counter)
    """Number of a held-out set → lines with a side in it."""
    language_not_known: dict[str, int] = field(default_factory=dict)
    """Language unknown to the identifier → lines that were not judged for it."""
    is_joined: bool = False
    """Whether the lines read were joined over the pivot."""

    @property
    def read(self) -> int:
        """Return the number of training lines read."""
        return self.lines + self.dropped.total()


@dataclass(frozen=True)
class Cleaning:
    """Input of all pairs, sent to a worker once; files of the corpus were checked before."""

    corpus: Artifact
    writer: ArtifactWriter
    config: CleanConfig
    pivot: str
    """Language over which pairs are joined."""
    scripts: Mapping[str, str | None]
    """Language → its script; None if that is unknown."""
    held_out: HeldOutSets

    def clean(self, pair: str) -> PairResult:
        """Write the training lines of a pair that break no rule; there may be none."""
        first, second = (
            self.corpus.unchecked_file(text_name("train", pair, side)) for side in pair.split("-")
        )
        result, is_kept = self._clean(pair, (first, second))
        name = provenance_name(pair)
        if self.corpus.has(name):
            origins = aligned_lines(first, self.corpus.unchecked_file(name))
            with self.writer.path(name).open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{origin}\n" for _, origin in compress(origins, is_kept))
        return result

    def join(self, pair: str) -> PairResult:
        """Join a pair over the pivot and clean it, after the two pairs with the pivot are clean."""
        pivoted = []
        for code in pair.split("-"):
            of_pivot = pair_name(code, self.pivot)
            names = (text_name("train", of_pivot, side) for side in (code, self.pivot))
            pivoted.append(PivotedText(*map(self.writer.path, names)))
        first, second = (path.with_suffix(".joined") for path in self._outputs(pair))
        write_joined(pivoted[0], pivoted[1], (first, second))
        result, _ = self._clean(pair, (first, second))
        result.is_joined = True
        first.unlink()
        second.unlink()
        return result

    def _outputs(self, pair: str) -> list[Path]:
        return [self.writer.path(text_name("train", pair, side)) for side in pair.split("-")]

    def _clean(self, pair: str, sources: tuple[Path, Path]) -> tuple[PairResult, bytearray]:
        """Write the lines that break no rule; return the result and which lines are kept.

        Which lines are kept is noted for synthetic pairs only, which have a provenance.
        """
        result, is_kept, rules = PairResult(pair), bytearray(), self._rules(pair, sources)
        with ExitStack() as stack:
            streams = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for path in self._outputs(pair)
            ]
            number = 0
            for block in _blocks(sources):
                kept, broken = [], rules.broken(block)
                if is_synthetic(pair):
                    is_kept.extend(rule is None for rule in broken)
                for lines, rule_and_sides in zip(block, broken, strict=True):
                    number += 1
                    if rule_and_sides is None:
                        kept.append(lines)
                        continue
                    rule, sides = rule_and_sides
                    result.dropped[rule] += 1
                    result.dropped_sides.update((rule, side) for side in (0, 1) if sides[side])
                    result.samples.offer(rule, pair=pair, line=number, sides=sides, text=lines)
                for side, stream in enumerate(streams):
                    text = "".join([lines[side] + "\n" for lines in kept])
                    stream.write(text)
                    result.characters[side] += len(text) - len(kept)
                result.lines += len(kept)
        result.leaks = rules.held_out.leaks
        if rules.language_rule is not None:
            result.language_not_known = rules.language_rule.not_known
        return result, is_kept

    def _rules(self, pair: str, sources: tuple[Path, Path]) -> PairRules:
        """Return the rules, after a pass over all lines of the pair for the facts they need."""
        config, ratios = self.config, LengthRatios()
        with TemporaryFile(dir=self._outputs(pair)[0].parent) as file:
            digests = LineDigests(file)
            for block in _blocks(sources):
                ratios.add(block)
                digests.add(["\n".join(as_seen(*lines)) for lines in block])
            duplicates = digests.duplicates()
        first, second = map(language_of, pair.split("-"))
        scripts = self.scripts[first], self.scripts[second]
        letters = [letters_of(script) if script else frozenset[str]() for script in scripts]
        identifier, language_rule = line_identifier(config), None
        if identifier is not None:
            language_rule = LanguageRule(
                identifier, (first, second), scripts, min_characters=LANGUAGE_MIN_CHARACTERS
            )
        return PairRules(
            config,
            letters=(letters[0], letters[1]),
            held_out=HeldOutRule(
                held_out_lines(self.held_out, first),
                held_out_lines(self.held_out, second),
                drops=config.drop_held_out_overlap,
            ),
            median_ratio=ratios.median(),
            duplicates=duplicates,
            language_rule=language_rule,
        )


def _blocks(sources: tuple[Path, Path]) -> Iterator[Lines]:
    lines = aligned_lines(*sources)
    while block := list(islice(lines, BLOCK_LINES)):
        yield block


def refuse_nothing(corpus: Artifact, results: list[PairResult]) -> None:
    """Refuse to lose all training lines of all pairs; the DataError names the rules."""
    dropped: Counter[Rule] = Counter()
    for result in results:
        dropped += result.dropped
    if dropped and not any(result.lines for result in results):
        raise DataError(
            f"{corpus.directory} has no training lines left ({_describe(dropped)}). Look at its "
            "text, or relax the settings under [clean]."
        )


def joined_pairs(corpus: Artifact, config: CleanConfig, *, pivot: str) -> list[str]:
    """Return the pairs to join over the pivot, sorted; DataError if one cannot be joined."""
    trained, wanted = line_counts(corpus, "train"), []
    for name in config.joined_pairs:
        codes = [find_code(code, languages(corpus)) or code for code in name.split("-")]
        pair = pair_name(*codes)
        missing = [code for code in codes if pair_name(code, pivot) not in trained]
        is_new = codes[0] != codes[1] and pair not in wanted
        if pivot in codes or pair in trained or missing or not is_new:
            problem = (
                "which has training lines of its own"
                if pair in trained
                else "which is no further pair of two languages"
                if not is_new
                else f"which has the pivot {pivot}, corpus.pivot"
                if pivot in codes
                else f"but {corpus.directory} has no training lines of "
                f"{pair_name(missing[0], pivot)}"
            )
            raise DataError(f"clean.joined_pairs names {name}, {problem}. Take it out of the list.")
        wanted.append(pair)
    return sorted(wanted)


def clean_all(
    cleaning: Cleaning, pairs: list[str], joined: list[str], *, processes: int, mpi: bool = False
) -> Iterator[PairResult]:
    """Yield the results in the order of the pairs, then of those to join."""
    if (processes == 1 and not mpi) or len(pairs) < 2:
        yield from map(cleaning.clean, pairs)
        yield from map(cleaning.join, joined)
        return
    with open_pool(min(processes, len(pairs)), mpi=mpi, shared=cleaning) as pool:
        yield from pool.in_order(with_shared(Cleaning.clean), pairs)
        yield from pool.in_order(with_shared(Cleaning.join), joined)


def write_samples(writer: ArtifactWriter, results: list[PairResult]) -> None:
    """Write ten lines that each rule dropped, over all pairs, one JSON object per line."""
    samples = DroppedSamples()
    for result in results:
        samples.add(result.samples)
    with writer.path(DROPPED_SAMPLES_NAME).open("w", encoding="utf-8", newline="\n") as stream:
        for row in samples.rows():
            stream.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def leaks(held_out: HeldOutSets, results: list[PairResult]) -> dict[str, object]:
    """Return the lines of each held-out set, and each pair's training lines with a side in it.

    Only lines that break no earlier rule count, whether or not they are dropped.
    """
    return {
        "sets": {one.name: one.size for one in held_out.sets},
        "pairs": {
            result.pair: {
                held_out.sets[number].name: lines for number, lines in sorted(result.leaks.items())
            }
            for result in results
            if result.leaks
        },
    }


def language_statistics(config: CleanConfig, results: list[PairResult]) -> dict[str, object]:
    """Return the lines in languages unknown to the identifier, and its model's digest."""
    statistics: dict[str, object] = {
        "language_not_known": {result.pair: result.language_not_known for result in results}
    }
    if config.language_model is not None:
        with config.language_model.open("rb") as stream:
            statistics["language_model_sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return statistics


def clean_statistics(corpus: Artifact, results: list[PairResult]) -> dict[str, object]:
    """Return lines per pair and split, and characters and dropped lines per pair."""
    pairs = {pair: dict(counts) for pair, counts in pair_counts(corpus).items()}
    for result in results:
        pairs.setdefault(result.pair, {})["train"] = result.lines
    emptied = emptied_pairs(corpus) | {one.pair for one in results if not one.is_joined}
    matched = {one.pair: {"matched": one.read} for one in results if one.is_joined}
    joined = joined_lines(corpus) | matched
    return {
        "pairs": pairs,
        "characters": {
            result.pair: {
                "train": dict(zip(result.pair.split("-"), result.characters, strict=True))
            }
            for result in results
        },
        "dropped": {
            result.pair: {rule: result.dropped[rule] for rule in RULES} for result in results
        },
        "dropped_sides": {
            result.pair: {
                rule: {
                    code: result.dropped_sides[rule, side]
                    for side, code in enumerate(result.pair.split("-"))
                }
                for rule in SIDED_RULES
            }
            for result in results
        },
        "emptied": sorted(emptied - {one.pair for one in results if one.lines}),
        **({"joined": joined} if joined else {}),
        "imported": imported_statistics(corpus),
        "languages": corpus.statistics.get("languages", {}),
    }


def summary(
    corpus: Artifact, results: list[PairResult], *, held_out: HeldOutSets, pivot: str
) -> list[str]:
    """Summarize lines read, kept and dropped, the largest leaks and the largest losses."""
    own, joined = (
        [one for one in results if one.is_joined == is_joined] for is_joined in (False, True)
    )
    read, kept = (sum(numbers) for numbers in ([r.read for r in own], [r.lines for r in own]))
    copied = sum(sum(line_counts(corpus, split).values()) for split in HELD_OUT_SPLITS)
    lines = [
        f"read {counted(read, 'training line')} of {counted(len(own), 'pair')}, kept {kept:,}; "
        f"{counted(copied, 'validation and test line')} as they were"
    ]
    if any(result.dropped for result in own):
        lines.append(f"dropped: {_dropped_by_rule(own)}")
        losses = {one.pair: round(1 - one.lines / one.read, 3) for one in own if one.read}
        worst = sorted(losses, key=lambda pair: (-losses[pair], pair))[:3]
        if shares := [f"{pair} {losses[pair]:.1%}" for pair in worst if losses[pair]]:
            lines.append(f"most from: {', '.join(shares)}")
    if found := _largest_leaks(held_out, results):
        lines.append(f"held-out lines in training text, most: {', '.join(found)}")
    if joined:
        counts = (f"{one.pair} {one.lines:,} of {one.read:,}" for one in joined)
        lines.append(f"joined over {pivot}, kept of the lines with equal pivots: {listed(counts)}")
        if dropped := _dropped_by_rule(joined):
            lines[-1] += f"; dropped: {dropped}"
    emptied = [
        f"{result.pair} ({_describe(result.dropped)})" for result in own if not result.lines
    ] + sorted(emptied_pairs(corpus) - {one.pair for one in joined if one.lines})
    if emptied:
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _largest_leaks(held_out: HeldOutSets, results: list[PairResult]) -> list[str]:
    """Return the three largest leaks, as ``de-en 12 of de-fr/test``."""
    found = [
        (-lines, result.pair, held_out.sets[number].name)
        for result in results
        for number, lines in result.leaks.items()
    ]
    return [f"{pair} {-lines:,} of {name}" for lines, pair, name in sorted(found)[:3]]


def _dropped_by_rule(results: list[PairResult]) -> str:
    """Return lines per rule, and per language if a side breaks it: ``empty 3 (de 1, en 2)``."""
    parts = []
    for rule in RULES:
        number = sum(result.dropped[rule] for result in results)
        sides: Counter[str] = Counter()
        for result in results:
            for side, code in enumerate(result.pair.split("-")):
                sides[code] += result.dropped_sides[rule, side]
        languages = listed(f"{code} {count:,}" for code, count in sides.most_common() if count)
        if number:
            parts.append(f"{rule} {number:,}" + (f" ({languages})" if languages else ""))
    return ", ".join(parts)


def _describe(dropped: Counter[Rule]) -> str:
    return ", ".join(f"{rule}: {dropped[rule]}" for rule in RULES if dropped[rule])


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("clean"))
