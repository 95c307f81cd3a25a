"""Stage clean: drop bad, repeated and held-out training lines.

Reads a corpus, and further ones whose held-out lines must not be trained on. Makes the same corpus
with fewer training lines; validation and test text is copied unchanged. ``dropped_samples.jsonl``
holds ten lines that each rule dropped, ``held_out_leaks.json`` the number of training lines of each
pair found in each held-out set. ``provenance/`` keeps the origins of the machine translations kept.

Each pair listed in ``clean.joined_pairs`` gets the lines of two cleaned pairs whose pivot lines are
equal (``pivot_join.py``), cleaned by the same rules. Cleaned pairs have no held-out line on either
side, so that no line is joined across one. The statistic ``joined`` counts the joined lines.

A dropped line is counted under the first rule it breaks, and for the side that breaks it, if one
does. A pair that loses all its lines is listed as ``emptied`` in the statistics. Pairs are
independent, and joined after all others are clean, so the number of workers does not change the
result.

Memory: 250 bytes per held-out line, of which a worker holds those of eight languages; for each pair
in work 1 byte per training line (2 where it has a provenance), 16 bytes per repeated line, and a
block of lines, whose length import has limited.
"""

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.clean_pair import (
    DROPPED_SAMPLES_NAME,
    DroppedSamples,
    PairResult,
    PairTask,
    clean_pair,
)
from data_prep.pivot_join import PivotedText, write_joined
from data_prep.rules.held_out import (
    HELD_OUT_SPLITS,
    HeldOutLines,
    HeldOutSets,
    held_out_sets,
    held_out_stored,
)
from data_prep.rules.judge import RULES, SIDED_RULES, PairFacts, Rule
from data_prep.rules.line_language import line_identifier
from data_prep.settings import CleanConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    emptied_pairs,
    found_scripts,
    imported_statistics,
    joined_lines,
    language_of,
    languages,
    line_counts,
    pair_counts,
    pair_name,
    provenance_name,
    text_name,
)
from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import DataError
from pipeline.languages import letters_of, usual_script
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, track

LEAKS_NAME = "held_out_leaks.json"


def run(call: StageCall) -> None:
    """Clean the training lines of every pair and leave the held-out lines as they are."""
    corpus, config = call.artifacts["corpus"], call.recipe.clean
    line_identifier(config)  # fail here rather than in a worker
    held_out = held_out_sets(languages(corpus), corpus, call.many("tests"))
    with call.new_artifact() as writer:
        copy_held_out(corpus, writer)
        corpus.check([*corpus.names("train/"), *corpus.names("provenance/")])
        pairs = list(line_counts(corpus, "train"))
        joined = joined_pairs(corpus, config)
        cleaning = Cleaning(
            corpus=corpus,
            writer=writer,
            config=config,
            letters=letters_of_languages(corpus),
            held_out=held_out.lines,
            own_sets=held_out.by_pair() if config.held_out_scope == "own_pair" else None,
        )
        found = clean_all(cleaning, pairs, joined, processes=call.processes, mpi=call.mpi)
        results = list(track(found, label="clean", total=len(pairs) + len(joined)))
        refuse_nothing(corpus, results)
        write_samples(writer, results)
        writer.write_json(LEAKS_NAME, leaks(held_out, results))
        writer.statistics |= clean_statistics(corpus, results)
        if config.identify_languages != "no":
            writer.statistics |= language_statistics(config, results)
        writer.summary += summary(corpus, results, held_out=held_out, pivot=config.pivot)


def refuse_nothing(corpus: Artifact, results: list[PairResult]) -> None:
    """Refuse to make a corpus that has lost all training lines of all pairs.

    Raises:
        DataError: Names the rules that dropped them.
    """
    dropped: Counter[Rule] = Counter()
    for result in results:
        dropped += result.dropped
    if dropped and not any(result.lines for result in results):
        raise DataError(
            f"{corpus.directory} has no training lines left ({_describe(dropped)}). Look at its "
            "text, or relax the settings under [clean]."
        )


def joined_pairs(corpus: Artifact, config: CleanConfig) -> list[str]:
    """Return the pairs to join over the pivot, sorted.

    Raises:
        DataError: One has training lines of its own, or the pivot has none with its languages.
    """
    trained, wanted = line_counts(corpus, "train"), []
    for name in config.joined_pairs:
        codes = name.split("-")
        pair = pair_name(*codes)
        missing = [code for code in codes if pair_name(code, config.pivot) not in trained]
        if pair in trained or missing:
            problem = (
                "which has training lines of its own"
                if pair in trained
                else f"but {corpus.directory} has no training lines of "
                f"{pair_name(missing[0], config.pivot)}"
            )
            raise DataError(f"clean.joined_pairs names {name}, {problem}. Take it out of the list.")
        wanted.append(pair)
    return sorted(wanted)


def copy_held_out(corpus: Artifact, writer: ArtifactWriter) -> None:
    """Copy validation and test text unchanged."""
    for split in HELD_OUT_SPLITS:
        names = corpus.names(f"{split}/")
        corpus.check(names)
        for name in names:
            shutil.copyfile(corpus.file(name), writer.path(name))


@dataclass(frozen=True)
class Cleaning:
    """Input of all pairs, sent to a worker once."""

    corpus: Artifact
    writer: ArtifactWriter
    config: CleanConfig
    letters: Mapping[str, frozenset[str]]
    """Language → scripts of its letters."""
    held_out: Mapping[str, HeldOutLines]
    """Language → its held-out lines over all pairs."""
    own_sets: Mapping[str, frozenset[int]] | None
    """Pair → numbers of its held-out sets, if only their lines are dropped."""

    def task(self, pair: str) -> PairTask:
        """Return the task of a pair, whose files were checked before."""
        first, second = pair.split("-")
        names = text_name("train", pair, first), text_name("train", pair, second)
        task = self._task(
            pair, (self.corpus.unchecked_file(names[0]), self.corpus.unchecked_file(names[1]))
        )
        name = provenance_name(pair)
        if not self.corpus.has(name):
            return task
        return replace(task, provenance=(self.corpus.unchecked_file(name), self.writer.path(name)))

    @contextmanager
    def joined_task(self, pair: str) -> Iterator[PairTask]:
        """Yield the task of a pair whose lines are joined from the two cleaned pairs."""
        codes = pair.split("-")
        first, second = (self.writer.path(text_name("train", pair, code)) for code in codes)
        joined = first.with_suffix(".joined"), second.with_suffix(".joined")
        write_joined(self._cleaned(codes[0]), self._cleaned(codes[1]), joined)
        yield self._task(pair, joined)
        for path in joined:
            path.unlink()

    def _cleaned(self, code: str) -> PivotedText:
        pivot = self.config.pivot
        pair = pair_name(code, pivot)
        text, of_pivot = (self.writer.path(text_name("train", pair, one)) for one in (code, pivot))
        return PivotedText(text, of_pivot)

    def _task(self, pair: str, sources: tuple[Path, Path]) -> PairTask:
        names = [text_name("train", pair, side) for side in pair.split("-")]
        first, second = map(language_of, pair.split("-"))
        return PairTask(
            pair=pair,
            sources=sources,
            outputs=(self.writer.path(names[0]), self.writer.path(names[1])),
            facts=PairFacts(
                letters=(self.letters[first], self.letters[second]),
                held_out=(self.held_out[first], self.held_out[second]),
                own_sets=self._own_sets(first, second),
            ),
            config=self.config,
        )

    def _own_sets(self, first: str, second: str) -> frozenset[int] | None:
        pair = pair_name(first, second)
        return None if self.own_sets is None else self.own_sets.get(pair, frozenset())


def clean_by_name(cleaning: Cleaning, pair: str) -> PairResult:
    """Clean a pair, in any process."""
    return clean_pair(cleaning.task(pair))


def join_by_name(cleaning: Cleaning, pair: str) -> PairResult:
    """Join a pair over the pivot and clean it, in any process, after both its pairs are clean."""
    with cleaning.joined_task(pair) as task:
        result = clean_pair(task)
    return replace(result, is_joined=True)


def letters_of_languages(corpus: Artifact) -> dict[str, frozenset[str]]:
    """Return language → scripts of its letters, as found at import, else from CLDR."""
    found = found_scripts(corpus)
    scripts = {code: found.get(code) or usual_script(code) for code in languages(corpus)}
    return {code: letters_of(script) if script else frozenset() for code, script in scripts.items()}


def clean_all(
    cleaning: Cleaning,
    pairs: list[str],
    joined: list[str],
    *,
    processes: int,
    mpi: bool = False,
) -> Iterator[PairResult]:
    """Yield the results in the order of the pairs, then of those to join.

    Workers are spawned processes, or ranks.
    """
    if (processes == 1 and not mpi) or len(pairs) < 2:
        for pair in pairs:
            yield clean_by_name(cleaning, pair)
        for pair in joined:
            yield join_by_name(cleaning, pair)
        return
    with held_out_stored(cleaning.held_out, cleaning.writer.path("held_out.stored")) as stored:
        shared = replace(cleaning, held_out=stored)
        with open_pool(min(processes, len(pairs)), mpi=mpi, shared=shared) as pool:
            yield from pool.in_order(with_shared(clean_by_name), pairs)
            yield from pool.in_order(with_shared(join_by_name), joined)


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
        "sets": dict(zip(held_out.names, held_out.sizes, strict=True)),
        "pairs": {
            result.pair: {
                held_out.names[number]: lines for number, lines in sorted(result.leaks.items())
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
    if config.identify_languages == "fasttext":
        with Path(config.language_model).open("rb") as stream:
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
    if any(result.dropped for result in results):
        lines.append(f"dropped: {_dropped_by_rule(results)}")
        losses = {one.pair: 1 - one.lines / one.read for one in results if one.read}
        worst = sorted(losses, key=lambda pair: (-losses[pair], pair))[:3]
        shares = (f"{pair} {losses[pair]:.1%}" for pair in worst if losses[pair])
        lines.append(f"most from: {', '.join(shares)}")
    if found := _largest_leaks(held_out, results):
        lines.append(f"held-out lines in training text, most: {', '.join(found)}")
    if joined:
        counts = (f"{one.pair} {one.lines:,} of {one.read:,}" for one in joined)
        lines.append(f"joined over {pivot}, kept of the lines with equal pivots: {listed(counts)}")
    emptied = [
        f"{result.pair} ({_describe(result.dropped)})" for result in own if not result.lines
    ] + sorted(emptied_pairs(corpus))
    if emptied:
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _largest_leaks(held_out: HeldOutSets, results: list[PairResult]) -> list[str]:
    """Return the three largest leaks, as ``de-en 12 of de-fr/test``."""
    found = [
        (-lines, result.pair, held_out.names[number])
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
