"""Stage clean: drop bad, repeated and held-out training lines.

Files used: a corpus, and further ones whose held-out lines are not to be trained on. Files built:
the same corpus with fewer training lines; validation and test text is copied as it is. Beside it
stand ten lines that each rule dropped (``dropped_samples.jsonl``), and how many training lines of
each pair are in which held-out set, over all pairs (``held_out_leaks.json``). Each dropped line is
counted under the first rule it breaks, and where one side breaks it, for that side. A pair that
loses all its lines is left without training data, which the statistics say (``emptied``). Pairs are
independent of each other, so the result does not depend on the number of workers; memory holds
250 bytes per held-out line of a language; of a pair in work 1 byte per training line, 16 per line
that repeats another, and a block of lines: import has bounded their length.
"""

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_prep.clean_pair import PairResult, PairTask, clean_pair
from data_prep.dropped_samples import DROPPED_SAMPLES_NAME, DroppedSamples
from data_prep.rules.held_out import HELD_OUT_SPLITS, HeldOutSets, held_out_sets
from data_prep.rules.judge import PairFacts
from data_prep.rules.line_language import line_identifier
from data_prep.rules.rule import RULES, SIDED_RULES, Rule
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    emptied_pairs,
    found_scripts,
    imported_statistics,
    languages,
    line_counts,
    pair_counts,
    text_name,
)
from pipeline.artifacts.settings import CleanConfig
from pipeline.distributed.workers import WorkerPool
from pipeline.errors import DataError
from pipeline.languages import letters_of, usual_script
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed, track

LEAKS_NAME = "held_out_leaks.json"


def run(call: StageCall) -> None:
    """Clean the training lines of every pair and leave the held-out lines as they are."""
    corpus, config = call.artifacts["corpus"], call.recipe.clean
    line_identifier(config)  # refused now, not in a worker
    held_out = held_out_sets(languages(corpus), corpus, call.many("tests"))
    with call.new_artifact() as writer:
        copy_held_out(corpus, writer)
        tasks = pair_tasks(corpus, writer, config=config, held_out=held_out)
        results = list(track(clean_all(tasks, call.processes), label="clean", total=len(tasks)))
        refuse_nothing(corpus, results)
        write_samples(writer, results)
        writer.write_json(LEAKS_NAME, leaks(held_out, results))
        writer.statistics |= clean_statistics(corpus, results)
        if config.identify_languages != "no":
            writer.statistics |= language_statistics(config, results)
        writer.summary += summary(corpus, results, held_out=held_out)


def refuse_nothing(corpus: Artifact, results: list[PairResult]) -> None:
    """Raises DataError where there were training lines and none are left in any pair."""
    dropped: Counter[Rule] = Counter()
    for result in results:
        dropped += result.dropped
    if dropped and not any(result.lines for result in results):
        raise DataError(
            f"{corpus.directory} has no training lines left ({_describe(dropped)}): look at its "
            "text, or relax the settings under [clean]."
        )


def copy_held_out(corpus: Artifact, writer: ArtifactWriter) -> None:
    """Copy validation and test text unchanged."""
    for split in HELD_OUT_SPLITS:
        names = corpus.names(f"{split}/")
        corpus.check(names)
        for name in names:
            shutil.copyfile(corpus.file(name), writer.path(name))


def pair_tasks(
    corpus: Artifact, writer: ArtifactWriter, *, config: CleanConfig, held_out: HeldOutSets
) -> list[PairTask]:
    """One task per pair that has training lines."""
    letters = letters_of_languages(corpus)
    corpus.check(corpus.names("train/"))
    tasks = []
    for pair in line_counts(corpus, "train"):
        first, second = pair.split("-")
        names = text_name("train", pair, first), text_name("train", pair, second)
        own = held_out.of_pair(pair) if config.held_out_scope == "own_pair" else None
        tasks.append(
            PairTask(
                pair=pair,
                sources=(corpus.file(names[0]), corpus.file(names[1])),
                outputs=(writer.path(names[0]), writer.path(names[1])),
                facts=PairFacts(
                    letters=(letters[first], letters[second]),
                    held_out=(held_out.lines[first], held_out.lines[second]),
                    own_sets=own,
                ),
                config=config,
            )
        )
    return tasks


def letters_of_languages(corpus: Artifact) -> dict[str, frozenset[str]]:
    """Language → scripts of its letters: as import found them, else as CLDR has them."""
    found = found_scripts(corpus)
    scripts = {code: found.get(code) or usual_script(code) for code in languages(corpus)}
    return {code: letters_of(script) if script else frozenset() for code, script in scripts.items()}


def clean_all(tasks: list[PairTask], processes: int) -> Iterator[PairResult]:
    """Results in the order of the tasks; workers are spawned, so they inherit no handlers."""
    if processes == 1 or len(tasks) < 2:
        yield from map(clean_pair, tasks)
        return
    with WorkerPool(min(processes, len(tasks))) as pool:
        yield from pool.in_order(clean_pair, tasks)


def write_samples(writer: ArtifactWriter, results: list[PairResult]) -> None:
    """Ten lines that each rule dropped, over all pairs, one JSON object per line."""
    samples = DroppedSamples()
    for result in results:
        samples.add(result.samples)
    with writer.path(DROPPED_SAMPLES_NAME).open("w", encoding="utf-8", newline="\n") as stream:
        for row in samples.rows():
            stream.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def leaks(held_out: HeldOutSets, results: list[PairResult]) -> dict[str, object]:
    """Lines of each held-out set, and of each pair's training lines those with a side in it.

    Counted are the lines that break no other rule, whether such lines are dropped or not.
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
    """Lines in languages that the identifier does not know, and what its model's file held."""
    statistics: dict[str, object] = {
        "language_not_known": {result.pair: result.language_not_known for result in results}
    }
    if config.identify_languages == "fasttext":
        with Path(config.language_model).open("rb") as stream:
            statistics["language_model_sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return statistics


def clean_statistics(corpus: Artifact, results: list[PairResult]) -> dict[str, object]:
    """Lines per pair and split; characters and dropped lines of the training text per pair."""
    pairs = {pair: dict(counts) for pair, counts in pair_counts(corpus).items()}
    for result in results:
        pairs[result.pair]["train"] = result.lines
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
        "emptied": sorted(
            emptied_pairs(corpus) | {result.pair for result in results if not result.lines}
        ),
        "imported": imported_statistics(corpus),
        "languages": corpus.statistics.get("languages", {}),
    }


def summary(corpus: Artifact, results: list[PairResult], *, held_out: HeldOutSets) -> list[str]:
    """Lines read and kept, dropped by rule and language, the largest leaks, pairs that lost most or
    all."""
    read, kept = (
        sum(numbers) for numbers in ([r.read for r in results], [r.lines for r in results])
    )
    copied = sum(sum(line_counts(corpus, split).values()) for split in HELD_OUT_SPLITS)
    lines = [
        f"read {counted(read, 'training line')} of {counted(len(results), 'pair')}, kept {kept:,}; "
        f"{counted(copied, 'validation and test line')} as they were"
    ]
    if read > kept:
        lines.append(f"dropped: {_dropped_by_rule(results)}")
        losses = {result.pair: 1 - result.lines / result.read for result in results}
        worst = sorted(losses, key=lambda pair: (-losses[pair], pair))[:3]
        shares = (f"{pair} {losses[pair]:.1%}" for pair in worst if losses[pair])
        lines.append(f"most from: {', '.join(shares)}")
    if found := _largest_leaks(held_out, results):
        lines.append(f"held-out lines in training text, most: {', '.join(found)}")
    emptied = [
        f"{result.pair} ({_describe(result.dropped)})" for result in results if not result.lines
    ] + sorted(emptied_pairs(corpus))
    if emptied:
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _largest_leaks(held_out: HeldOutSets, results: list[PairResult]) -> list[str]:
    """``de-en 12 of de-fr/test``, the three largest numbers."""
    found = [
        (-lines, result.pair, held_out.names[number])
        for result in results
        for number, lines in result.leaks.items()
    ]
    return [f"{pair} {-lines:,} of {name}" for lines, pair, name in sorted(found)[:3]]


def _dropped_by_rule(results: list[PairResult]) -> str:
    """``empty 3 (de 1, en 2), copy 1``: per rule, and per language where a side breaks it."""
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
