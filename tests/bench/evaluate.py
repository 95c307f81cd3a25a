"""Scores of an evaluation, line by line: what each costs, beside langdetect's own calls.

Language accuracy is both of its scores, plain and restricted to the languages of the lines; the
peer asks langdetect for every line twice. BLEU and chrF++ are sacreBLEU's own statistics. The
processor time of four systems in 188 directions of 2,000 lines follows, with the paired tests of
the statistics, on one processor and on two, and the most memory that the process held. The lines
are the test lines of the folder that MMNMT_BIBLE names, or of shared/data/bible beside the
repository.

    python tests/bench/evaluate.py [--quick] [--rounds N] [--json FILE]
"""

import gzip
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import compare, interleaved, parse_options, report

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.language_grams import grams_of_lines, langdetect_profiles
from pipeline.evaluation.paired_tests import RandomisationTask, randomisation_p_values
from pipeline.evaluation.score_slot import Score, TranslatedLines
from pipeline.evaluation.significance import BootstrapTask, resampled_scores

BIBLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "bible"
LANGUAGES = "cs da de el es fi fr he hu ja ko lv ml nl pl pt ru sr sv tl vi zh".split()
DIRECTIONS, LINES, SYSTEMS = 188, 2000, 4
PEER_LINES = 110


def main() -> None:
    options = parse_options(__doc__ or "")
    corpus = Path(os.environ.get("MMNMT_BIBLE", BIBLE))
    texts = read_lines(corpus, total=220 if options.quick else LINES)
    lines = TranslatedLines(Direction("xx", "en"), texts, texts[::-1], lambda: texts)
    known = frozenset((*LANGUAGES, "en"))
    accuracies = (
        LanguageAccuracy.plain(known, seed=1),
        LanguageAccuracy.restricted(known, seed=1),
    )
    others: tuple[Score, ...] = (Bleu("13a", {"en": "13a"}), Chrf())
    share = max(len(texts) // PEER_LINES, 1)

    def detect() -> None:
        grams_of_lines.cache_clear()
        for score in accuracies:
            score.line_statistics(lines)

    few = texts[::share]
    contestants: dict[str, Callable[[], object]] = {
        "ours": detect,
        "langdetect": lambda: langdetects(few),
        **{one.column.title: partial(one.line_statistics, lines) for one in others},
        "paired tests": paired_tests(lines, (*others,)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    interleaved(
        {name: counted(one, seconds[name]) for name, one in contestants.items()},
        rounds=options.rounds,
        warm_up=0,
    )
    seconds["langdetect"] = [one * len(texts) / len(few) for one in seconds["langdetect"]]
    report(
        compare({name: seconds[name] for name in ("ours", "langdetect")}, case="LangAcc", target=1),
        options,
        shapes=f"{len(texts)} lines in {len(LANGUAGES)} languages",
    )
    total = 0.0
    for name in ("ours", *(one.column.title for one in others), "paired tests"):
        each = statistics.median(seconds[name])
        per_direction = each * LINES / len(texts) * (1 if name == "paired tests" else SYSTEMS)
        total += per_direction * DIRECTIONS
        speed, whole = len(texts) / each, per_direction * DIRECTIONS
        print(f"{name}: {speed:,.0f} lines per processor second, {whole:,.0f} s in all")
    print(
        f"{SYSTEMS} systems, {DIRECTIONS} directions, {LINES} lines: {total / 60:.1f} minutes of "
        f"one processor, {total / 120:.1f} on two"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak:,.0f} MB")


def counted(contestant: Callable[[], object], seconds: list[float]) -> Callable[[], object]:
    """The contestant, which leaves behind what it took of the processor: on a machine that is
    shared it takes longer, by as much as the others run."""

    def run() -> None:
        started = time.process_time()
        contestant()
        seconds.append(time.process_time() - started)

    return run


def read_lines(corpus: Path, *, total: int) -> list[str]:
    """The first test lines of every language, in turns."""
    each = [
        gzip.decompress((corpus / f"en-{code}" / f"test.{code}.gz").read_bytes())
        .decode("utf-8")
        .splitlines()[: total // len(LANGUAGES) + 1]
        for code in LANGUAGES
    ]
    return [line for row in zip(*each, strict=True) for line in row][:total]


def langdetects(texts: Sequence[str]) -> None:
    """langdetect's answer for every text, twice, as two priors ask for it."""
    from langdetect import DetectorFactory, detect_langs

    DetectorFactory.seed = 1
    for _ in range(2):
        for text in texts:
            detect_langs(text)


def paired_tests(lines: TranslatedLines, scores: tuple[Score, ...]) -> Callable[[], object]:
    """Bootstrap and randomisation of one direction, all systems, from stored statistics."""
    folder = Path(tempfile.mkdtemp())
    rows = {one.column.name: one.line_statistics(lines).rows for one in scores}
    paths = []
    for system in range(SYSTEMS):
        order = np.random.default_rng(system).permutation(len(lines.hypotheses))
        paths.append(folder / f"{system}.npz")
        np.savez_compressed(paths[-1], **{name: one[order] for name, one in rows.items()})
    bootstrap = BootstrapTask(paths, scores, seed=1)
    randomisation = RandomisationTask(paths, 0, scores, seed=1)
    return lambda: (resampled_scores(bootstrap), randomisation_p_values(randomisation))


if __name__ == "__main__":
    langdetect_profiles()
    main()
